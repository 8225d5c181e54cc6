"""Whatever a name, a file name or an exception says is text in every piece of HTML: no markup, no template, no script, no change of direction."""

import dataclasses
import json
import re

import jinja2
import pytest
from tests.histories import history_with, training
from tests.hostile_text import DIRECTION_CONTROLS, HOSTILE_TEXTS, behind_every_text
from tests.html_reader import Reader
from tests.null.history_runs import tape_of
from tests.plans import a_plan

import tightfit
from tightfit.planner.plan import Plan
from tightfit.reports.html.fragment import estimate_fragment, framed_page
from tightfit.reports.html.history_page import html_page
from tightfit.reports.html.inert_text import inert
from tightfit.reports.html.plan_page import plan_page
from tightfit.reports.html.templates import FOLDER, render
from tightfit.reports.summary import summarize
from tightfit.simulate.history import History

hostile = pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
OWN_MARKUP = {"styles", "script", "data"}


def one_line(text: str) -> str:
    return " ".join(text.split())


def history_page(text: str) -> Reader:
    history = history_with(text)
    return Reader(html_page(history, summarize(history)))


def data_of(page: Reader) -> dict:
    return json.loads(next(words for tag, words in page.words if tag == "script"))


class TestAPlan:
    @hostile
    def test_shows_it_as_text(self, text: str) -> None:
        plain = Reader(plan_page(a_plan()))
        page = Reader(
            plan_page(
                Plan.from_json(behind_every_text(a_plan().to_json(), text) | {"margin": "safe", "choices_digest": None})
            )
        )
        assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
        assert [set(attributes) for _, attributes in page.elements] == [
            set(attributes) for _, attributes in plain.elements
        ]
        assert one_line(page.text).count(one_line(inert(text))) > 10

    @hostile
    def test_shows_the_text_of_an_exception(self, text: str) -> None:
        refused = dataclasses.replace(a_plan().alternatives[0], why=f"ValueError: {text}")
        page = Reader(plan_page(a_plan(alternatives=(refused,), advice=(text,))))
        assert f"ValueError: {inert(text)}" in [words for tag, words in page.words if tag == "td"]
        assert inert(text) in [words for tag, words in page.words if tag == "li"]


class TestAHistory:
    @hostile
    def test_keeps_it_in_its_data_and_its_title(self, text: str) -> None:
        page = history_page(text)
        assert [tag for tag, _ in page.elements] == [tag for tag, _ in history_page("x").elements]
        data = data_of(page)
        assert {inert(text), f"net.{inert(text)}"} <= set(data["texts"])
        assert data["summary"]["assumptions"][0]["what"] == inert(text)
        (title,) = (words for tag, words in page.words if tag == "title")
        assert title == f"{inert(text).rpartition('/')[2]}.pickle: memory report"

    @hostile
    def test_its_block_of_data_ends_where_the_page_ends_it(self, text: str) -> None:
        (block,) = re.findall(
            r'<script type="application/json" id="data">([^<]*)</script>',
            html_page(history_with(text), summarize(history_with(text))),
        )
        assert not set("<>&") & set(block)

    def test_can_be_written_whatever_a_file_is_called(self) -> None:
        history = dataclasses.replace(training(), label="\udcff\ud800.pickle")
        assert "<title>??.pickle: memory report</title>" in html_page(history, summarize(history)).encode().decode()


class TestANotebook:
    @hostile
    def test_shows_an_estimate_with_it_as_text(self, text: str) -> None:
        found = tightfit.estimate(tape_of([1 << 30], [0], lines=[f"{text}.py:1"]), "RTX 4060").to_json()
        plain = Reader(estimate_fragment(found))
        page = Reader(
            estimate_fragment(behind_every_text(found, text) | {key: found[key] for key in ("at_peak", "margin")})
        )
        assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
        assert [set(attributes) for _, attributes in page.elements] == [
            set(attributes) for _, attributes in plain.elements
        ]
        assert one_line(inert(text)) in one_line(page.text)

    @hostile
    def test_shows_a_page_in_a_frame_that_it_cannot_leave(self, text: str) -> None:
        page = f"<!doctype html><title>{text}</title>"
        (frame,) = Reader(framed_page(page)).elements
        assert frame[0] == "iframe"
        assert frame[1]["srcdoc"] == inert(page)
        assert set(frame[1]) == {"srcdoc", "sandbox", "width", "height"}
        assert frame[1]["sandbox"] == "allow-scripts"


class TestInertText:
    def test_controls_of_direction_are_shown_and_not_obeyed(self) -> None:
        assert inert("photo\u202egpj.py") == "photo\\u202egpj.py"
        assert inert(DIRECTION_CONTROLS) == "".join(f"\\u{ord(control):04x}" for control in DIRECTION_CONTROLS)

    def test_what_is_written_from_right_to_left_stays(self) -> None:
        assert (
            inert("\u05e9\u05dc\u05d5\u05dd train.py \u2028 \U0001f600")
            == "\u05e9\u05dc\u05d5\u05dd train.py \u2028 \U0001f600"
        )

    def test_halves_of_surrogate_pairs_become_question_marks(self) -> None:
        assert inert("a\ud800b\udcff") == "a?b?"

    @pytest.mark.parametrize("page", [history_with, lambda text: a_plan(target=text)])
    def test_no_page_holds_a_control_of_direction(self, page) -> None:
        made = page(DIRECTION_CONTROLS)
        text = html_page(made, summarize(made)) if isinstance(made, History) else plan_page(made)
        assert not set(DIRECTION_CONTROLS) & set(text)
        assert not re.search(r"(?<!\\)\\u20(2[a-e]|6[6-9])", text.partition('id="data">')[2].partition("</script>")[0])


class TestTheTemplates:
    def test_a_value_that_is_missing_is_an_error(self) -> None:
        with pytest.raises(jinja2.UndefinedError, match="'height' is undefined"):
            render("frame.html", page="")

    def test_only_the_projects_own_markup_is_not_escaped(self) -> None:
        sources = [path.read_text() for path in FOLDER.iterdir() if path.suffix in (".html", ".svg")]
        assert len(sources) > 5
        assert {name for source in sources for name in re.findall(r"(\w+)\s*\|\s*safe", source)} == OWN_MARKUP
        assert not [source for source in sources if "autoescape" in source or re.search(r"\w=\{\{", source)]
