"""The page of a plan: all that the plan says stands in it, as text and never as markup, and it needs nothing else."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.hostile_text import behind_every_text
from tests.html_reader import Reader
from tests.plans import GIB, a_plan, run

from tightfit.cli.main import run as tightfit
from tightfit.planner.plan import Bound, ParetoPoint, Plan
from tightfit.reports.html.plan_curve import _strokes, curve_of, curve_points, seconds_per_unit, ticks
from tightfit.reports.html.plan_labels import Box
from tightfit.reports.html.plan_page import plan_page
from tightfit.tape import Assumption

ATTACK = "</style></title><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\ud800"


@pytest.fixture(scope="module")
def page() -> Reader:
    return Reader(plan_page(a_plan()))


class TestWhatItSays:
    def test_the_answer_and_both_runs(self, page: Reader) -> None:
        assert "Fits with 1 technique (4 places) : 9.50 GiB of 10.00 GiB on a card" in page.text
        assert "plain 15.00 GiB 14.88 GiB to 15.12 GiB 14.50 GiB 14.00 GiB 100.0 ms" in page.text
        assert "planned 9.50 GiB 9.38 GiB to 9.62 GiB 9.00 GiB 8.50 GiB 120.0 ms" in page.text

    def test_choices_that_differ_by_a_number_are_one_row(self, page: Reader) -> None:
        assert "checkpointing Net.h.[0-3] 4 −4.00 GiB +20.0 ms yes keeps the output of `mlp.up`" in page.text

    def test_the_alternatives_verified_or_not(self, page: Reader) -> None:
        assert "no changes 15.00 GiB 100.0 ms no yes 5 GiB over the budget" in page.text
        assert "by hand not verified no predicted, not verified" in page.text

    def test_why_advice_and_assumptions_each_once(self, page: Reader) -> None:
        assert "time per step: 120.0 ms instead of 100.0 ms (+20.0%)" in page.text
        assert "1.00 GiB more would save about 10.0 ms per step." in page.text
        assert "half the batch size would need about 8 GiB" in page.text
        assert page.text.count("a value is assumed to be 1.0") == 1
        assert "(train.py:3, train.py:9)" in page.text

    def test_an_assumption_of_no_line_has_no_empty_place(self) -> None:
        dropped = Assumption(where="", what="a file was dropped")
        text = Reader(plan_page(dataclasses.replace(a_plan(), assumptions=(dropped,)))).text
        assert dropped.what in text and "()" not in text

    def test_a_plan_that_does_not_fit_says_by_how_much(self) -> None:
        page = Reader(plan_page(a_plan(fits=False, budget_bytes=8 * GIB)))
        assert "Does not fit : 1.63 GiB more than 8.00 GiB on a card, even with every allowed technique" in page.text
        assert "Lowest peak found: 9.50 GiB (upper bound 9.63 GiB, 1.63 GiB over the budget)." in page.text
        assert page.of("span", "bad")

    def test_a_run_that_fits_without_changes_has_no_choices_and_no_planned_run(self) -> None:
        page = Reader(plan_page(a_plan(choices=(), frontier=(), run=run(9, 0.1), baseline=run(9, 0.1))))
        assert "Fits without changes" in page.text
        assert "planned 9" not in page.text
        assert "there is no trade-off to show" in page.text
        assert not page.of("svg")


class TestTheCurve:
    def test_its_points_are_marked_in_order_and_listed_with_what_a_gib_more_saves(self, page: Reader) -> None:
        across = [float(point["cx"] or "") for point in page.of("circle", "point")]
        down = [float(point["cy"] or "") for point in page.of("circle", "point")]
        assert across == sorted(across)
        assert down == sorted(down)
        assert across[2] - across[1] == pytest.approx(across[1] - across[0], abs=0.2)
        assert "9.00 GiB 130.0 ms 10.0 ms 11.00 GiB 110.0 ms 3.0 ms 13.00 GiB 104.0 ms" in page.text

    def test_the_plan_the_plain_run_and_the_budget_are_marked_in_words(self, page: Reader) -> None:
        labels = [words for tag, words in page.words if tag == "text"]
        assert {"the plan: 9.50 GiB, 120.0 ms", "the plain run: 15.00 GiB, 100.0 ms", "budget 10.00 GiB"} <= set(labels)
        assert {"peak GPU memory, GiB", "milliseconds per step"} <= set(labels)
        assert {"9", "10", "15", "100", "130"} <= set(labels)
        assert (len(page.of("path", "planned")), len(page.of("path", "plain"))) == (2, 2)

    def test_a_mark_beside_the_curve_is_explained_and_one_on_it_is_not(self, page: Reader) -> None:
        assert (
            "beside the curve: predicted 9.40 GiB, simulated 9.50 GiB; predicted 119.0 ms, simulated 120.0 ms."
            in page.text
        )
        on_it = a_plan(promised_bytes=int(9.5 * GIB), bound=Bound(seconds_per_step=0.12, is_proven=True))
        assert "beside the curve" not in Reader(plan_page(on_it)).text
        unknown = a_plan(promised_bytes=int(9.5 * GIB), bound=Bound(seconds_per_step=0.08, is_proven=False))
        assert "beside the curve" not in Reader(plan_page(unknown)).text

    @pytest.mark.parametrize(
        ("margin", "end"), [("safe", "its upper end"), ("likely", "the mark itself"), ("0", "its lower end")]
    )
    def test_what_has_to_fit_is_said_by_the_margin(self, margin: str, end: str) -> None:
        assert f"a plan fits if {end} does." in plan_page(a_plan(margin=margin))

    def test_the_words_of_a_plan_at_the_upper_left_cover_no_part_of_the_curve(self) -> None:
        """A tight budget: its line and words are right above the mark, and the stair begins beside it."""
        points = tuple(
            ParetoPoint(device_bytes=int(size * GIB), seconds_per_step=seconds)
            for size, seconds in ((9.0, 0.12), (9.4, 0.117), (9.8, 0.114), (10.4, 0.11), (11.2, 0.1), (12.0, 0.08))
        )
        curve = curve_of(
            a_plan(frontier=points, run=run(8.8, 0.119), baseline=run(13, 0.02), budget_bytes=int(9.0 * GIB))
        )
        label = curve.marks[-1].label.box
        assert not sum(label.overlap(stroke) for stroke in _strokes([(p.x, p.y) for p in curve.points]))

    def test_the_words_of_the_plan_do_not_cover_the_line_of_the_budget(self) -> None:
        for gib in (12.6, 13, 13.4, 13.8):
            curve = curve_of(a_plan(run=run(gib, 0.12), budget_bytes=14 * GIB))
            line = Box(left=curve.budget.at, top=curve.top, right=curve.budget.at + 1, bottom=curve.bottom)
            assert [mark.label.box.overlap(line) for mark in curve.marks if mark.kind == "planned"] == [0]

    def test_words_cover_neither_the_curve_nor_the_budget_and_are_tied_to_their_mark(self) -> None:
        """A plan left of its curve, and a plain run at the curve's end, as of an 8B model on a tight budget."""
        points = tuple(
            ParetoPoint(device_bytes=int(size * GIB), seconds_per_step=seconds)
            for size, seconds in (
                (18.6, 0.862),
                (20.1, 0.799),
                (21.6, 0.758),
                (24.7, 0.694),
                (26.2, 0.654),
                (28.6, 0.635),
            )
        )
        curve = curve_of(
            a_plan(frontier=points, run=run(17.8, 0.8356), baseline=run(30.7, 0.6387), budget_bytes=18 * GIB)
        )
        line = Box(left=curve.budget.at - 1, top=curve.top, right=curve.budget.at + 1, bottom=curve.bottom)
        axis = Box(left=curve.left - 2, top=curve.bottom - 2, right=curve.right, bottom=curve.bottom + 2)
        strokes = [*_strokes([(p.x, p.y) for p in curve.points]), line, axis]
        assert [sum(map(mark.label.box.overlap, strokes)) for mark in curve.marks] == [0, 0]
        assert curve.marks[1].leader is not None

    def test_it_is_a_picture_with_a_name_and_a_description(self, page: Reader) -> None:
        (picture,) = page.of("svg")
        assert picture["role"] == "img"
        names = (picture["aria-labelledby"] or "").split()
        assert [a.get("id") for tag, a in page.elements if tag in ("title", "desc") and a.get("id")] == names
        assert "The curve goes from 9.00 GiB and 130.0 ms to 13.00 GiB and 104.0 ms, in 3 points." in page.text

    def test_nothing_is_drawn_outside_of_it(self, page: Reader) -> None:
        for point in page.of("circle", "point"):
            assert 72 <= float(point["cx"] or "") <= 836
            assert 30 <= float(point["cy"] or "") <= 328

    def test_a_single_point_at_the_budget_is_a_curve_too(self) -> None:
        only = (ParetoPoint(device_bytes=9 * GIB, seconds_per_step=0.1),)
        same = run(9, 0.1)
        page = Reader(plan_page(a_plan(frontier=only, run=same, baseline=same, budget_bytes=9 * GIB)))
        assert len(page.of("circle", "point")) == 1

    def test_what_a_gib_more_saves(self) -> None:
        assert seconds_per_unit(curve_points(a_plan()), GIB) == pytest.approx([0.01, 0.003, None])
        assert seconds_per_unit([], GIB) == []

    def test_a_plan_of_less_than_a_gib_is_in_mib(self) -> None:
        whole = a_plan()
        points = [dataclasses.replace(p, device_bytes=p.device_bytes // 64) for p in whole.frontier]
        runs = [
            dataclasses.replace(
                run,
                peak=dataclasses.replace(
                    run.peak,
                    device_bytes=run.peak.device_bytes // 64,
                    device_low_bytes=run.peak.device_low_bytes // 64,
                    device_high_bytes=run.peak.device_high_bytes // 64,
                ),
            )
            for run in (whole.baseline, whole.run)
        ]
        small = dataclasses.replace(
            whole, frontier=tuple(points), baseline=runs[0], run=runs[1], budget_bytes=whole.budget_bytes // 64
        )
        curve = curve_of(small)
        assert curve.bytes_unit == "MiB"
        assert [tick.words for tick in curve.ticks_across] == ["140", "160", "180", "200", "220", "240"]
        assert "time saved per extra MiB" in Reader(plan_page(small)).text
        assert curve_of(whole).bytes_unit == "GiB"

    @given(low=st.floats(0, 1e4), span=st.floats(1e-3, 1e5))
    def test_ticks_are_few_round_and_within(self, low: float, span: float) -> None:
        found = [tick for tick, _ in ticks(low, low + span)]
        assert 2 <= len(found) <= 9
        assert found[0] >= low - 1e-6 * span
        assert found[-1] <= low + span * (1 + 1e-6)
        step = found[1] - found[0]
        assert round(step / 10.0 ** math.floor(math.log10(step) + 1e-6), 3) in (1, 2, 5)
        assert len({words for _, words in ticks(low, low + span)}) == len(found)


class TestItIsSafeAndWhole:
    def test_whatever_a_plan_says_is_text(self) -> None:
        page, plain = (
            Reader(
                plan_page(
                    Plan.from_json(
                        behind_every_text(a_plan().to_json(), ATTACK) | {"margin": "safe", "choices_digest": None}
                    )
                )
            ),
            Reader(plan_page(a_plan())),
        )
        assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
        assert not page.of("script") + page.of("img")
        assert page.text.count("<script>alert(1)</script>") > 10

    def test_it_can_be_written_whatever_the_plan_says(self) -> None:
        plan_page(a_plan(target=ATTACK)).encode()

    def test_it_refers_to_nothing_and_may_load_and_run_nothing(self) -> None:
        page = plan_page(a_plan())
        assert not re.search(r"https?://|url\(|@import|javascript:", page)
        reader = Reader(page)
        assert not [a for _, a in reader.elements if {"src", "href", "style"} & set(a) or any(k[:2] == "on" for k in a)]
        policy = next(a["content"] for a in reader.of("meta") if a.get("http-equiv") == "Content-Security-Policy")
        assert policy is not None
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert "script-src" not in policy


class TestTheCommand:
    @pytest.fixture(autouse=True)
    def _here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        a_plan().save("plan.json")

    def test_writes_the_page_and_says_so(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert tightfit(["report", "plan.json"]) == 0
        assert capsys.readouterr().err.startswith("wrote plan.html (")
        assert Path("plan.html").read_text() == plan_page(a_plan())
        assert sorted(path.name for path in Path().iterdir()) == ["plan.html", "plan.json"]

    @pytest.mark.parametrize(
        "more", [("--format", "json"), ("--format", "perfetto"), ("--device", "4090"), ("-p", "a=1"), ("--", "1")]
    )
    def test_other_options_are_refused_in_a_line(
        self, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
    ) -> None:
        assert tightfit(["report", "plan.json", *more]) == 2
        answer = capsys.readouterr()
        assert answer.out == ""
        assert answer.err.startswith("tightfit: plan.json is a plan: it becomes a page")
        assert answer.err.count("\n") == 1

    def test_a_plan_of_another_schema_is_refused_in_a_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        Path("plan.json").write_text(Path("plan.json").read_text().replace('"schema": 1', '"schema": 9'))
        assert tightfit(["report", "plan.json"]) == 3
        assert capsys.readouterr().err.startswith(
            "tightfit: plan.json: this plan has schema 9, and this tightfit reads 1"
        )
