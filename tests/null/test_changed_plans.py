"""A plan whose choices were changed in its file promises nothing: what was simulated is of other choices."""

import dataclasses
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from tests.plans import a_plan

from tightfit.planner.explain import sentences, verdict
from tightfit.planner.plan import Plan
from tightfit.reports.html.plan_page import plan_page
from tightfit.reports.plans import PlanText

Change = Callable[[dict[str, Any]], None]


def _two() -> Plan:
    plan = a_plan()
    return dataclasses.replace(
        plan, choices=(*plan.choices, dataclasses.replace(plan.choices[0], where="another.place"))
    )


def _written(change: Change) -> Plan:
    value = json.loads(json.dumps(_two().to_json()))
    change(value)
    return Plan.from_json(json.loads(json.dumps(value)))


def _without_the_last(value: dict[str, Any]) -> None:
    value["choices"].pop()


def _elsewhere(value: dict[str, Any]) -> None:
    value["choices"][0]["where"] = "head"


def _otherwise(value: dict[str, Any]) -> None:
    value["choices"][0]["settings"]["chunks"] = 3


def _in_another_order(value: dict[str, Any]) -> None:
    value["choices"].reverse()


def _of_before(value: dict[str, Any]) -> None:
    del value["choices_digest"]
    value["choices"].pop()


def _said(plan: Plan) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(PlanText(plan))
    return out.getvalue()


@pytest.mark.parametrize("change", [_without_the_last, _elsewhere, _otherwise])
def test_the_peak_of_others_is_not_promised(change: Change) -> None:
    plan = _written(change)
    assert plan.is_changed
    assert verdict(plan).startswith("changed by hand: ")
    said, page = _said(plan), plan_page(plan)
    assert "planned" not in said and "simulated 9" not in said and "fits" not in said
    assert "fits" not in page.partition('id="verdict"')[2].partition("</h2>")[0]
    assert list(sentences(plan)) == [verdict(plan) + "."]


@pytest.mark.parametrize("change", [lambda value: None, _in_another_order, _of_before])
def test_the_same_choices_are_the_plan(change: Change) -> None:
    plan = _written(change)
    assert not plan.is_changed
    assert "planned" in _said(plan)


def test_it_stays_so_when_it_is_written_again() -> None:
    plan = _written(_without_the_last)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
