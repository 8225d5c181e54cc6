"""Each private name of torch that the source uses is in a manifest, each name of a manifest is used and there, and a torch without one is told."""

import dataclasses
import re
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from tests.surface.private_names import BOTH, CHILD, Use, uses

from tightfit.capture.patches import manifest as of_child
from tightfit.errors import UnsupportedTorch
from tightfit.errors.private_names import FIRST_TORCH, Name, known, number, require, version_of
from tightfit.torch_hooks import manifest as of_user

ROWS = (*of_child.IN_BOTH, *of_child.IN_CHILD, *of_user.IN_USERS_PROCESS)
# Private identifiers of others, by where they are from.
NOT_OF_TORCH = {
    "python": (
        "_active",
        "_clear_cache",
        "_DummyThread",
        "_exit",
        "_getframe",
        "_current_frames",
        "_exit_callbacks",
        "_exit_function",
        "_inst",
        "_fields",
        "_lru_cache_wrapper",
        "_map_async",
        "_queue",
        "_registry",
        "_shutdown",
        "_SimpleCData",
        "_threads_queues",
    ),
    "numpy": ("_rand", "_bit_generator"),
    "lightning": ("_compiler_ctx", "_step_fn", "_current_fx_name"),
    "native symbols": (
        of_child.GUARD_REGISTRY.name,
        of_child.CUDA_HOOKS.name,
        of_child.STACK_OF_HOOKS.name,
        of_user.WRAP_TENSOR.name,
    ),
    "ours": ("_JoinedBackward", "_NONE"),
    # What no module or class of torch has by its name: a mark on parameters, a parameter of softmax, attributes of compiled modules, of a mode
    # and of fused optimizers.
    "torch's, as no name": (
        "_is_param",
        "_stacklevel",
        "_orig_mod",
        "_allow_unsafe_data_ptr_access",
        "_step_supports_amp_scaling",
    ),
}
# Beginnings of names of operators and of their namespaces, which they are compared with.
BEGINNINGS = ("_foreach_", "_scaled_dot_product_", "_c10d")
# Operators that only some builds have; each is taken where it is there.
OF_SOME_BUILDS = ("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss")


@pytest.fixture(scope="module")
def used() -> dict[Name | None, list[Use]]:
    """The uses of each row; those that no row covers under None."""
    found: dict[Name | None, list[Use]] = defaultdict(list)
    not_listed = {*(name for names in NOT_OF_TORCH.values() for name in names), *BEGINNINGS, *OF_SOME_BUILDS}
    for use in uses():
        rows = [row for row in ROWS if covers(row, use.name)]
        for row in rows:
            found[row].append(use)
        is_module = any(str(row).startswith(f"{use.name}.") for row in ROWS)
        if not rows and not is_module and use.name not in not_listed:
            found[None].append(use)
    return found


def covers(row: Name, used_name: str) -> bool:
    """Whether a row is about a name: its own, something of what it names, or, of an attribute, the last part."""
    return used_name in (str(row), row.name) or used_name.startswith(f"{row}.")


def rooms(row: Name, found: list[Use]) -> set[str]:
    """The rooms of uses as a row has them: by their folder in `capture`, as a whole elsewhere."""
    return {use.room if use.room.startswith(f"{CHILD[0]}/") else use.room.split("/")[0] for use in found}


def test_each_private_name_that_is_used_is_listed(used: dict[Name | None, list[Use]]) -> None:
    assert used[None] == [], "say in a manifest what these are for"


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_each_name_is_used_where_its_row_says(used: dict[Name | None, list[Use]], row: Name) -> None:
    assert set(row.used_by) == rooms(row, used[row])


def test_a_name_is_listed_once_and_by_the_process_that_uses_it(used: dict[Name | None, list[Use]]) -> None:
    assert len({row.path for row in ROWS}) == len(ROWS)
    for row, found in used.items():
        tops = {use.file.split("/")[0] for use in found}
        processes = {room in CHILD for room in tops - set(BOTH)} or {True, False}
        is_in_both = len(processes) == 2 or bool(tops & set(BOTH))
        table = of_child.IN_BOTH if is_in_both else of_child.IN_CHILD if True in processes else of_user.IN_USERS_PROCESS
        assert row is None or row in table, row


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_each_name_is_there(row: Name) -> None:
    if row.library != "torch":
        pytest.importorskip(row.library)
    if row.is_expected() and (row.is_in_cpu_builds or torch.version.cuda is not None):
        assert row.is_there()


@pytest.mark.parametrize(
    "row",
    [
        *ROWS,
        *of_child.SLOTS,
        *of_child.OLDER_SLOTS,
        of_child.GUARD_REGISTRY,
        of_child.CUDA_HOOKS,
        of_child.STACK_OF_HOOKS,
        of_user.WRAP_TENSOR,
    ],
    ids=str,
)
def test_each_row_says_what_it_is_for_and_in_which_versions(row: Name) -> None:
    assert row.purpose
    assert not row.purpose.endswith(".")
    assert all(re.fullmatch(r"\d+\.\d+", version) for version in (row.first, row.last))


def test_the_slots_are_those_of_the_header() -> None:
    headers = [(Path(torch.__file__).parent / "include" / name).read_text() for name in of_child.HOOKS_HEADERS]
    # The destructor comes first and has two slots.
    names = re.findall(r"^\s*virtual\s+[^(]*?([~\w]+)\(", "".join(headers), re.MULTILINE)
    slots = of_child.OLDER_SLOTS if version_of("torch") < (2, 7) else of_child.SLOTS
    assert all(names[slot.index - 1] == slot.function for slot in slots)


@pytest.mark.parametrize("check", [of_child.check, of_user.check.__wrapped__], ids=["child", "user"])
def test_to_look_for_all_names_takes_under_5_ms(check: object) -> None:
    """Of processor time, when the modules have been imported, as they are in a process that is about to trace or to train."""
    assert callable(check)
    took = []
    for _ in range(5):
        before = time.process_time()
        check()
        took.append(time.process_time() - before)
    assert min(took) < 0.005


def test_a_missing_name_is_one_line_that_says_which_where_and_what_to_do() -> None:
    rows = (known("torch:zeros", "to test", "effects"), known("torch._C:_gone", "to test a check", "effects"))
    with pytest.raises(UnsupportedTorch) as raised:
        require((*rows, known("torch._gone:name", "to test", "effects")))
    said = str(raised.value)
    assert "\n" not in said
    assert said.startswith(f"torch {torch.__version__} has no torch._C._gone, which tightfit needs to test a check")
    assert "(and lacks 1 more)" in said
    assert "pip install 'torch>=" in said


def test_a_name_that_came_later_is_not_missed_in_an_older_torch_and_is_in_a_newer_one() -> None:
    come = known("torch._C:_gone", "to test", "effects", first="99.0", before="something else is done")
    require([come])
    assert not come.is_expected()
    with pytest.raises(UnsupportedTorch):
        require([dataclasses.replace(come, first="1.0")])
    with pytest.raises(UnsupportedTorch):
        require([dataclasses.replace(come, before="")])


@pytest.mark.parametrize("row", [row for row in ROWS if row.before], ids=str)
def test_what_is_done_before_a_version_is_said_of_names_that_are_newer_than_the_first_of_all(row: Name) -> None:
    assert number(row.first) >= number(FIRST_TORCH)


def test_a_torch_that_is_older_than_all_that_were_tried_is_refused_though_it_has_all_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.7.1+cpu")
    with pytest.raises(
        UnsupportedTorch, match=r"^torch 2\.7\.1\+cpu is too old; torch 2\.8 to \S+ are known to work: pip"
    ):
        require([known("torch:zeros", "to test", "effects")])


def test_names_that_are_looked_up_when_they_are_needed_stop_nothing() -> None:
    require([known("torch._C:_gone", "to test", "effects", is_checked=False)])
