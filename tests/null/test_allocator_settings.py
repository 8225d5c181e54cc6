"""The allocator settings, as torch 2.13 reads them from PYTORCH_CUDA_ALLOC_CONF."""

import pytest

from tightfit.allocator import settings
from tightfit.allocator.settings import KEYS, AllocatorSettings, add_to_environment, settings_of_environment
from tightfit.errors import UsageError
from tightfit.units import MIB

NONE = (0,) * 16


def test_an_empty_string_is_the_defaults():
    assert AllocatorSettings.parse("") == AllocatorSettings()
    assert AllocatorSettings() == AllocatorSettings(
        max_split_size_bytes=None,
        max_non_split_rounding_bytes=20 * MIB,
        garbage_collection_threshold=0.0,
        roundup_power2_divisions=NONE,
        expandable_segments=False,
        large_segment_size_bytes=20 * MIB,
        per_process_memory_fraction=1.0,
    )


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("max_split_size_mb:128", {"max_split_size_bytes": 128 * MIB}),
        (" max_split_size_mb : 32 ,", {"max_split_size_bytes": 32 * MIB}),
        ("max_split_size_mb:32,max_split_size_mb:64", {"max_split_size_bytes": 64 * MIB}),
        ("max_split_size_mb:+32.7 MiB", {"max_split_size_bytes": 32 * MIB}),
        ("max_split_size_mb:-1", {"max_split_size_bytes": (2**44 - 1) * MIB}),
        ("max_non_split_rounding_mb:64", {"max_non_split_rounding_bytes": 64 * MIB}),
        ("garbage_collection_threshold:.8", {"garbage_collection_threshold": 0.8}),
        ("expandable_segments:True", {"expandable_segments": True}),
        ("per_process_memory_fraction:0.5", {"per_process_memory_fraction": 0.5}),
        # The other sizes may not be below the large segment's, wherever it stands in the string.
        (
            "max_split_size_mb:64,large_segment_size_mb:64",
            {
                "max_split_size_bytes": 64 * MIB,
                "large_segment_size_bytes": 64 * MIB,
                "max_non_split_rounding_bytes": 64 * MIB,
            },
        ),
        ("roundup_power2_divisions:4", {"roundup_power2_divisions": (4,) * 16}),
        ("roundup_power2_divisions:[]", {}),
        ("roundup_power2_divisions:[64:8,256:4,>:1]", {"roundup_power2_divisions": (8,) * 7 + (0, 4) + (1,) * 7}),
        ("roundup_power2_divisions:[>:4,64:2]", {"roundup_power2_divisions": (2,) * 7 + (4,) * 9}),
        (
            "roundup_power2_divisions:[>:4],roundup_power2_divisions:[2:8]",
            {"roundup_power2_divisions": (8,) * 2 + (4,) * 14},
        ),
        ("roundup_power2_divisions:[1048576:2]", {"roundup_power2_divisions": (2,) * 16}),
        (
            "backend:native,pinned_use_background_threads:True,pinned_num_register_threads:8,throw_on_cudamalloc_oom:True",
            {},
        ),
    ],
)
def test_parse_reads_what_torch_reads(text, changed):
    assert AllocatorSettings.parse(text) == AllocatorSettings(**changed)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("max_split_size:64", "max_split_size'"),
        ("MAX_SPLIT_SIZE_MB:64", "MAX_SPLIT_SIZE_MB"),
        ("max_split_size_mb:19", "max_split_size_mb must be at least 20"),
        ("large_segment_size_mb:64,max_split_size_mb:32", "max_split_size_mb must be at least 64"),
        ("large_segment_size_mb:10", "large_segment_size_mb must be at least 11"),
        ("max_non_split_rounding_mb:19", "max_non_split_rounding_mb"),
        ("max_split_size_mb:abc", "max_split_size_mb needs a whole number"),
        ("max_split_size_mb:99999999999999999999999", "max_split_size_mb needs a whole number"),
        ("max_split_size_mb", "max_split_size_mb needs a value"),
        ("max_split_size_mb:\u00a064", "max_split_size_mb needs a whole number"),
        ("max_split_size_mb:\uff16\uff14", "max_split_size_mb needs a whole number"),
        ("garbage_collection_threshold:\u0660.5", "garbage_collection_threshold needs a number"),
        ("max_split_size_mb:,", "max_split_size_mb needs a value"),
        ("max_split_size_mb:[20:1]", "max_split_size_mb takes one value"),
        ("max_split_size_mb:32 expandable_segments:False", "max_split_size_mb"),
        ("garbage_collection_threshold:0", "garbage_collection_threshold"),
        ("garbage_collection_threshold:1", "garbage_collection_threshold"),
        ("garbage_collection_threshold:nan", "garbage_collection_threshold"),
        ("per_process_memory_fraction:1.5", "per_process_memory_fraction"),
        ("expandable_segments:true", "expandable_segments"),
        ("pinned_use_background_threads:1", "pinned_use_background_threads"),
        ("pinned_num_register_threads:3", "pinned_num_register_threads"),
        ("pinned_num_register_threads:256", "pinned_num_register_threads"),
        ("pinned_reserve_segment_size_mb:0", "pinned_reserve_segment_size_mb"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions"),
        ("roundup_power2_divisions:0", "roundup_power2_divisions"),
        ("roundup_power2_divisions:[65:8]", "65:8"),
        ("roundup_power2_divisions:[64:3]", "64:3"),
        ("roundup_power2_divisions:[64:8", "not closed"),
        ("roundup_power2_divisions:[64:8:2]", "malformed"),
        ("roundup_power2_divisions:[64]", "malformed"),
        ("backend:cudaMallocAsync", "backend:cudaMallocAsync"),
        ("backend:foo", "backend:foo"),
        (",", "','"),
    ],
)
def test_parse_refuses_in_one_line_that_names_the_key(text, names):
    with pytest.raises(UsageError) as caught:
        AllocatorSettings.parse(text)
    assert names in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_pair_that_leaks_is_refused_with_the_reason():
    with pytest.raises(UsageError, match=r"without bound.*123548"):
        AllocatorSettings.parse("max_split_size_mb:128,expandable_segments:True")
    assert AllocatorSettings.parse("max_split_size_mb:128,expandable_segments:False").max_split_size_bytes == 128 * MIB


def test_every_key_of_torch_is_known():
    assert len(KEYS) == 20
    assert {"backend", "large_segment_size_mb", "roundup_power2_divisions", "pinned_free_catch_all"} <= set(KEYS)


@pytest.mark.parametrize(
    ("installed", "environ", "read"),
    [
        ((2, 8), {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, ""),
        ((2, 9), {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "expandable_segments:True"),
        ((2, 9), {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": ""}, ""),
        ((2, 8), {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        ((2, 8), {}, ""),
    ],
)
def test_the_environment_is_read_as_the_installed_torch_reads_it(
    installed: tuple[int, int], environ: dict[str, str], read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(settings, "installed_torch", lambda: installed)
    assert settings_of_environment() == read


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_settings_that_are_added_keep_those_of_the_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    # Set first, so that it is taken back at the end.
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    monkeypatch.setattr(settings, "installed_torch", lambda: (2, 9))
    monkeypatch.setenv(name, "expandable_segments:True")
    add_to_environment("per_process_memory_fraction:0.5")
    assert settings_of_environment() == "expandable_segments:True,per_process_memory_fraction:0.5"
