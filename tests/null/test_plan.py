"""A plan as data and in words."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from tightfit.errors import PlanError
from tightfit.fit.searching.permitted import grouped
from tightfit.planner.explain import groups, sentences, verdict
from tightfit.planner.plan import Alternative, Bound, Choice, ParetoPoint, Plan, Run
from tightfit.simulate.estimate import Peak
from tightfit.tape import Assumption

GIB = 1 << 30


def choice(where: str, technique: str = "checkpointing", **settings: object) -> Choice:
    return Choice(technique=technique, where=where, settings=settings, saves_bytes=GIB, adds_seconds=0.001, exact=True)


def run(gib: float, seconds: float) -> Run:
    size = int(gib * GIB)
    peak = Peak(
        allocated_bytes=size - GIB,
        reserved_bytes=size,
        device_bytes=size,
        device_low_bytes=size,
        device_high_bytes=size + GIB // 8,
    )
    return Run(peak=peak, seconds_per_step=seconds)


def a_plan(**changes: object) -> Plan:
    plan = Plan(
        target="train.py",
        device="a card",
        capacity_bytes=24 * GIB,
        budget_bytes=10 * GIB,
        headroom_bytes=GIB // 8,
        fits=True,
        run=run(9.5, 0.12),
        baseline=run(15, 0.1),
        promised_bytes=int(9.4 * GIB),
        choices=tuple(choice(f"Net.h.{i}") for i in range(4)),
        bound=Bound(seconds_per_step=0.119, is_proven=True),
        alternatives=(
            Alternative(
                name="nothing", device_bytes=15 * GIB, seconds_per_step=0.1, fits=False, exact=True, why="too much"
            ),
        ),
        frontier=(
            ParetoPoint(device_bytes=9 * GIB, seconds_per_step=0.13),
            ParetoPoint(device_bytes=11 * GIB, seconds_per_step=0.11),
        ),
        advice=("half the batch",),
        model={"roots": [{"class": "Net", "num_parameters": 3, "inputs": {"0": [2, 3]}}]},
        host_bytes=0,
        disk_bytes=0,
        versions={"torch": "2.13.0"},
        assumptions=(Assumption(where="train.py:3", what="something"),),
    )
    return dataclasses.replace(plan, **changes)


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = a_plan()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_the_object_that_is_printed_has_what_was_agreed() -> None:
    printed = json.loads(json.dumps(a_plan().to_json()))
    agreed = "schema fits peak host_bytes disk_bytes seconds_per_step baseline choices bound alternatives assumptions"
    assert set(agreed.split()) <= set(printed)
    assert {"technique", "where", "saves_bytes", "adds_seconds", "exact"} <= set(printed["choices"][0])
    assert printed["baseline"]["peak"]["device_bytes"] == 15 * GIB


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a plan"),
        ("[]", "this is no plan; make one"),
        ("{}", "this is no plan; make one"),
        ('{"schema": 99}', "this is no plan; make one"),
        ('{"schema": 99, "choices": []}', "this plan has schema 99, and this tightfit reads 1: a newer one wrote it"),
        ('{"schema": 1, "peak": 3}', "this is no plan"),
        ('{"schema": 1, "choices": [], "peak": 3}', "this plan was changed, or another version of tightfit wrote it"),
    ],
)
def test_what_is_no_plan_is_one_clear_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=said) as caught:
        Plan.load(tmp_path / "plan.json")
    assert "\n" not in str(caught.value)
    assert "plan.json" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("choices", "x"), ("choices", [{"technique": "t"}]), ("coverage", []), ("proof", None), ("device", "4090")],
)
def test_a_changed_plan_says_nothing_of_python(tmp_path: Path, name: str, value: object) -> None:
    written = json.loads(json.dumps(a_plan().to_json())) | {name: value}
    with pytest.raises(PlanError, match="this plan was changed, or another version of tightfit wrote it"):
        Plan.from_json(written)


def test_a_plan_without_its_choices_promises_nothing_less() -> None:
    written = json.loads(json.dumps(a_plan().to_json())) | {"choices": []}
    written["baseline"]["peak"]["device_bytes"] = written["peak"]["device_bytes"] + 1
    with pytest.raises(
        PlanError, match="this plan was changed: it has no choices, and a lower peak than the plain run"
    ):
        Plan.from_json(written)
    written["baseline"]["peak"]["device_bytes"] -= 1
    assert Plan.from_json(written).choices == ()


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("frontier", 0, "device_bytes"), "x"),
        (("frontier", 0, "seconds_per_step"), float("nan")),
        (("choices", 0, "saves_bytes"), None),
        (("baseline", "peak", "device_bytes"), []),
        (("budget_bytes",), "10GiB"),
    ],
)
def test_a_figure_that_is_none_is_one_clear_line(where: tuple[str | int, ...], value: object) -> None:
    written = json.loads(json.dumps(a_plan().to_json()))
    holder = written
    for key in where[:-1]:
        holder = holder[key]
    holder[where[-1]] = value
    with pytest.raises(PlanError, match=f"{where[-1]} is"):
        Plan.from_json(written)


def test_places_that_differ_by_a_number_are_one_line() -> None:
    blocks = [choice(f"Net.h.{i}.mlp") for i in (0, 1, 2, 5)]
    (group,) = groups(blocks)
    assert (group.where, group.num_places, group.saves_bytes) == ("Net.h.[0-2,5].mlp", 4, 4 * GIB)
    assert [g.where for g in groups([choice("Net.h.1"), choice("Net.h.2", keep=[1])])] == ["Net.h.1", "Net.h.2"]
    assert groups([choice("Net.a.0.b.1"), choice("Net.a.1.b.2")])[0].where == "Net.a.*.b.* (2 places)"
    # The number of a class's name is no place.
    assert groups([choice("UNet2D.a.0.b.1"), choice("UNet2D.a.1.b.2")])[0].where == "UNet2D.a.*.b.* (2 places)"
    assert dict(grouped(("x", f"UNet2D.a.{i}", "no") for i in range(2))) == {"x": "UNet2D.a.* (2): no"}


def test_the_answer_is_said_in_words() -> None:
    assert verdict(a_plan()).startswith("fits with 1 technique (4 places): 9.50 GiB of 10.00 GiB")
    assert verdict(a_plan(choices=())).startswith("fits without changes: 9.50 GiB of 10.00 GiB")
    assert verdict(a_plan(fits=False, budget_bytes=8 * GIB)).startswith("does not fit: 1.63 GiB more than 8.00 GiB")
    said = "\n".join(sentences(a_plan()))
    assert "+20.0%" in said
    # The curve is of budgets, with what is kept free: 10 ms less with 11 GiB than with 10.
    assert "1.00 GiB more would save about 10.0 ms per step" in said


def test_more_memory_saves_no_more_than_the_curve_has() -> None:
    curve = [(9.5, 0.12), (9.9, 0.118), (10.25, 0.1), (30.0, 0.01)]
    plan = a_plan(
        frontier=tuple(ParetoPoint(device_bytes=int(size * GIB), seconds_per_step=seconds) for size, seconds in curve)
    )
    said = "\n".join(sentences(plan))
    assert "256.0 MiB more would save about 20.0 ms per step" in said


def test_more_memory_is_more_than_the_budget_and_saves_what_the_plan_takes() -> None:
    points = tuple(
        ParetoPoint(device_bytes=int(size * GIB), seconds_per_step=seconds)
        for size, seconds in [(9.0, 0.2), (9.45, 0.12), (9.8, 0.09), (10.25, 0.11)]
    )
    # Predicted to hold more than the simulated run does: the point below it is not the plan.
    plan = a_plan(frontier=points, run=run(9.2, 0.12), promised_bytes=int(9.45 * GIB), predicted_seconds=0.12)
    assert "256.0 MiB more would save about 10.0 ms per step" in "\n".join(sentences(plan))
    # The budget has room for it already.
    plan = a_plan(frontier=points[:3], run=run(9.2, 0.12), promised_bytes=int(9.45 * GIB), predicted_seconds=0.12)
    assert "more would save" not in "\n".join(sentences(plan))


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("margin", "margn", "the plan has a field 'margn' (did you mean margin?)"),
        ("baseline", "base_line", "(did you mean baseline?)"),
        ("coverage", "Coverage", "(did you mean coverage?)"),
    ],
)
def test_a_misspelt_field_is_not_ignored(right: str, wrong: str, says: str) -> None:
    value = a_plan().to_json()
    value[wrong] = value.pop(right)
    with pytest.raises(PlanError, match=re.escape(says)):
        Plan.from_json(value)


def test_fields_of_others_are_left_alone() -> None:
    assert Plan.from_json({**a_plan().to_json(), "comment": "for the large model"}) == a_plan()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"setings": {}}, "a@b has a field 'setings' (did you mean settings?)"),
        ({"colour": "red"}, "a@b has a field 'colour', which no choice has"),
    ],
)
def test_a_choice_has_its_fields_alone(changes: dict[str, object], says: str) -> None:
    choice = {"technique": "a", "where": "b", "settings": {}, "saves_bytes": 1, "adds_seconds": 0.0, "exact": True}
    with pytest.raises(PlanError, match=re.escape(says)):
        Plan.from_json({**a_plan().to_json(), "choices": [{**choice, **changes}]})


@pytest.mark.parametrize(
    ("gib", "seconds", "said"),
    [
        (
            14.7,
            0.3,
            "A poor trade: each step takes 3.0 times as long, for 2.0% less memory (307.2 MiB): look at the other suggestions first.",
        ),
        (
            15,
            0.2,
            "A poor trade: each step takes 2.0 times as long, for no less memory: look at the other suggestions first.",
        ),
        (9.5, 0.2, ""),  # a third of the memory for twice the time
        (14.9, 0.11, ""),  # little of either
    ],
)
def test_a_plan_that_takes_much_time_for_little_memory_says_so(gib: float, seconds: float, said: str) -> None:
    found = [s for s in sentences(a_plan(run=run(gib, seconds))) if "poor trade" in s]
    assert found == ([said] if said else [])
