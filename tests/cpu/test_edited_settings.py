"""Settings of plans that were edited: each one that a technique has, with values of another kind, is refused in one line that names it, or is a default."""

import dataclasses
import warnings

import pytest
import torch
from tests.attacks.models import WIDTH, Block, Images, Net, adamw
from tests.attacks.places import VARIANTS, freeze
from tests.plans import a_plan
from torch import nn

from tightfit.errors import ApplyError, PlanError
from tightfit.planner.plan import Choice, Plan
from tightfit.runtime.apply import apply_choices

_MISSING = object()
_OTHERS = (None, "x", -1, [[1]], {}, 10**30, float("nan"))


class Attending(Block):
    """Attention by hand."""

    is_attention = True

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens of the same shape."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + (q @ k.transpose(-2, -1)).softmax(-1) @ v


def _put_on(name: str, changed: str | None = None, value: object = None) -> tuple[list[Choice], str]:
    """The choices of a technique on a small model, with one setting of the first choice that has it changed, and what they are refused with."""
    variant = VARIANTS[name]
    model = Images() if name == "tiled convolutions" else Net([Attending(), Attending()])
    if variant.freezes:
        freeze(model)
    optimizer = adamw(model)
    choices = variant.find(model, [optimizer])
    if changed is not None:
        number = next(n for n, choice in enumerate(choices) if changed in choice.settings)
        settings = {k: v for k, v in choices[number].settings.items() if k != changed}
        settings |= {} if value is _MISSING else {changed: value}
        choices[number] = dataclasses.replace(choices[number], settings=settings)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            apply_choices(choices, model, [optimizer]).undo()
    except ApplyError as error:
        return choices, str(error)
    return choices, ""


@pytest.mark.parametrize("name", VARIANTS)
def test_a_setting_of_another_kind_is_refused_by_its_name(name):
    choices, refused = _put_on(name)
    assert choices
    assert refused == ""
    for changed in {setting for choice in choices for setting in choice.settings}:
        for value in (_MISSING, *_OTHERS):
            told = _put_on(name, changed, value)[1]
            is_text = any(isinstance(choice.settings.get(changed), str) for choice in choices)
            if value is not _MISSING and not (is_text and value == "x"):
                assert changed in told, value
            assert "\n" not in told
            # What is missing has a default, or is named.
            assert not told or value is not _MISSING or changed in told


def test_a_misspelt_name_is_refused_with_the_right_one():
    choices, _ = _put_on("tiled tokens")
    settings = dict(choices[0].settings)
    settings["num_tile"] = settings.pop("num_tiles")
    with pytest.raises(ApplyError, match=r"no technique has a setting 'num_tile' \(did you mean num_tiles\?\)"):
        apply_choices([dataclasses.replace(choices[0], settings=settings)], Net([Attending(), Attending()]), [])


def test_names_that_only_say_what_was_found_are_taken():
    settings = {"keep": [0], "outputs": ["qkv"]}
    choice = Choice(
        technique="selective_checkpointing",
        where="Net.blocks.0",
        settings=settings,
        saves_bytes=0,
        adds_seconds=0,
        exact=True,
    )
    apply_choices([choice], Net([Attending(), Attending()]), []).undo()


def test_text_stands_for_numbers_and_conditions():
    assert _put_on("tiled tokens", "num_tiles", "2")[1] == ""
    assert _put_on("update in backward", "clips", "True")[1] == ""
    assert "num_tiles is '2.5', and takes 1 to 1048576" in _put_on("tiled tokens", "num_tiles", "2.5")[1]


@pytest.mark.parametrize(("begin", "end"), [(0, 1000), (2, 2), (2, 1)])
def test_a_range_without_children_is_refused(begin, end):
    settings = {"begin": begin, "end": end}
    choice = Choice(
        technique="nested_checkpointing",
        where="Net.blocks",
        settings=settings,
        saves_bytes=0,
        adds_seconds=0,
        exact=True,
    )
    with pytest.raises(ApplyError, match=f"Net.blocks has no children {begin} to {end - 1}"):
        apply_choices([choice], Net(), [])


@pytest.mark.parametrize(("field", "value"), [("technique", ["a"]), ("where", 5), ("settings", 5)])
def test_a_choice_of_another_form_is_no_plan(field, value):
    changed = a_plan().to_json()
    changed["choices"][0] = {**changed["choices"][0], field: value}
    with pytest.raises(PlanError, match=f"this plan was changed: .*{field}.* 5|a"):
        Plan.from_json(changed)


@pytest.mark.parametrize(("field", "value"), [("model", None), ("versions", 5)])
def test_a_field_of_another_form_is_no_plan(field, value):
    with pytest.raises(PlanError, match=f"this plan was changed: {field} is {value}, not names with values"):
        Plan.from_json({**a_plan().to_json(), field: value})


def test_a_choice_that_is_there_twice_is_refused():
    changed = a_plan().to_json()
    choices = [{**changed["choices"][0], "technique": "optimizer_kernel", "where": "optimizer"}] * 2
    with pytest.raises(PlanError, match="optimizer_kernel@optimizer is there twice"):
        Plan.from_json({**changed, "choices": choices})


@pytest.mark.parametrize("name", ["optimizer kernel", "pure bf16", "optimizer offload"])
def test_a_second_choice_of_a_technique_for_the_whole_model_is_refused(name):
    choices, _ = _put_on(name)
    other = dataclasses.replace(choices[0], where="Net.other")
    model = Net([Attending(), Attending()])
    with pytest.raises(ApplyError, match="the plan has it 2 times, and it can be applied once"):
        apply_choices([choices[0], other], model, [adamw(model)])
