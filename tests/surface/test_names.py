"""The public names of the library, their parameters and the fields of what they return. A change here is a change for every user."""

import dataclasses
import inspect

import pytest

import tightfit

PUBLIC_NAMES = [
    *("Device", "Estimate", "Plan", "Replay", "Session", "Tape", "TightfitError"),
    *("apply", "estimate", "find_device", "guard", "leaks", "plan", "record", "replay"),
]

PARAMETERS = {
    "estimate": "target device | arguments parameters options steps until timeout largest_batch alloc_conf margin calibration show_output allow_writes allow_network meanwhile used on_progress",
    "plan": "target device | budget host disk allow without arguments parameters options steps until timeout largest_batch alloc_conf margin calibration show_output prove allow_writes allow_network say used on_progress",
    "apply": "plan model optimizer | check_steps disk_folder",
    "guard": "model optimizer | plans on_terminate post_mortems calm_steps ballast",
    "replay": "recording | alloc_conf memory device",
    "record": "path | stacks max_events",
    "leaks": "| quiet",
    "find_device": "text",
}


def test_the_public_names() -> None:
    assert tightfit.__all__ == PUBLIC_NAMES
    assert len(PUBLIC_NAMES) <= 15
    assert dir(tightfit) == sorted([*PUBLIC_NAMES, "__version__"])


def test_every_name_is_there_and_another_is_an_attribute_error() -> None:
    assert all(getattr(tightfit, name) is not None for name in PUBLIC_NAMES)
    with pytest.raises(AttributeError, match="'tightfit' has no attribute 'estimat'"):
        _ = tightfit.estimat  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    parameters = inspect.signature(getattr(tightfit, name)).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    keyword_only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert " ".join([*positional, *(["|", *keyword_only] if keyword_only else [])]) == PARAMETERS[name]
    # A plan is put on a model and its optimizer; all else takes at most two things by position.
    assert len(positional) <= (3 if name == "apply" else 2)


def test_an_estimate_is_frozen_and_knows_how_to_show_itself() -> None:
    assert tightfit.Estimate.__dataclass_params__.frozen  # type: ignore[attr-defined]
    for method in ("to_json", "explain", "__rich__", "_repr_html_", "_repr_pretty_"):
        assert callable(getattr(tightfit.Estimate, method))
    assert [field.name for field in dataclasses.fields(tightfit.Estimate)] == [
        "target",
        "device",
        "capacity_bytes",
        "peak",
        "at_peak",
        "moment",
        "allocation_sites",
        "spans",
        "band",
        "host_peak_bytes",
        "seconds_per_step",
        "versions",
        "assumptions",
        "coverage",
        "margin",
        "pinned_peak_bytes",
        "pinned_tensor_bytes",
        "idle_seconds_per_step",
        "disk_peak_bytes",
        "seconds_band",
        "counts",
        "input_pipeline",
    ]


def test_every_error_has_an_exit_code() -> None:
    assert tightfit.TightfitError.exit_code == 3
    codes = {error.__name__: error.exit_code for error in _descendants(tightfit.TightfitError)}
    assert codes["UsageError"] == codes["UnknownDevice"] == 2
    assert codes["DoesNotFit"] == 1
    assert codes["CaptureError"] == codes["MissingExtra"] == codes["RecordingError"] == 3


def _descendants(error: type[tightfit.TightfitError]) -> list[type[tightfit.TightfitError]]:
    return [found for child in error.__subclasses__() for found in (child, *_descendants(child))]
