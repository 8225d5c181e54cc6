"""The page of a plan in a real browser: it loads nothing, complains of nothing, and is as wide as its window by day and by night."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.browser.driver import Browser, browser
from tests.histories import training
from tests.hostile_text import HOSTILE_TEXTS, behind_every_text
from tests.plans import a_plan, run

from tightfit.planner.plan import Plan
from tightfit.reports.html.fragment import framed_page
from tightfit.reports.html.history_page import html_page
from tightfit.reports.html.inert_text import inert
from tightfit.reports.html.plan_page import plan_page
from tightfit.reports.summary import summarize


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def test_it_opens_from_a_file_without_any_request_or_complaint(chromium: Browser, tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    path.write_text(plan_page(a_plan()), encoding="utf-8")
    colours = []
    for theme in ("light", "dark"):
        chromium.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        chromium.logs("performance")
        chromium.send("url", {"url": path.as_uri()})
        assert chromium.requested() == [path.as_uri()]
        assert chromium.logs("browser") == []
        colours.append(chromium.run("return getComputedStyle(document.querySelector('.stair')).stroke"))
        text = "return getComputedStyle(document.querySelector('.mark-name')).fill"
        assert chromium.run(text) != chromium.run("return getComputedStyle(document.body).backgroundColor")
        assert chromium.run("return document.documentElement.scrollWidth <= innerWidth")
        box = "const box = document.querySelector('.curve').getBoundingClientRect(); return [box.width, box.height]"
        width, height = chromium.run(box)
        assert 600 < width < 1400
        assert height == pytest.approx(width * 380 / 860, rel=0.01)
        outside = (
            "const box = document.querySelector('.curve').getBoundingClientRect();"
            "return [...document.querySelectorAll('.curve text, .curve path')].filter(part => {"
            "const own = part.getBoundingClientRect(); return own.left < box.left - 1 || own.right > box.right + 1"
            " || own.top < box.top - 1 || own.bottom > box.bottom + 1; }).map(part => part.textContent)"
        )
        assert chromium.run(outside) == []
        chromium.picture(tmp_path / f"{theme}.png")
        assert (tmp_path / f"{theme}.png").stat().st_size > 20_000
    assert colours[0] != colours[1]


# Plans whose words would cover each other if each stood above its mark: at the top beside the budget, and beside the plain run.
@pytest.mark.parametrize(
    ("planned", "baseline"), [((9.5, 0.14), (15, 0.1)), ((9.9, 0.101), (10.4, 0.1)), ((14, 0.1), (15, 0.1))]
)
def test_no_words_cover_others(
    chromium: Browser, tmp_path: Path, planned: tuple[float, float], baseline: tuple[float, float]
) -> None:
    path = tmp_path / "plan.html"
    path.write_text(plan_page(a_plan(run=run(*planned), baseline=run(*baseline))), encoding="utf-8")
    chromium.send("url", {"url": path.as_uri()})
    boxes = chromium.run(
        "return [...document.querySelectorAll('.mark-name, .budget-name')].map(words => words.getBoundingClientRect())"
        ".map(box => [box.left, box.top, box.right, box.bottom])"
    )
    assert len(boxes) == 3
    for (left, top, right, bottom), (other_left, other_top, other_right, other_bottom) in itertools.combinations(
        boxes, 2
    ):
        assert right <= other_left or other_right <= left or bottom <= other_top or other_bottom <= top


@pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
def test_what_would_harm_a_page_that_trusted_it_is_text(chromium: Browser, tmp_path: Path, text: str) -> None:
    path = tmp_path / "hostile.html"
    plan = Plan.from_json(behind_every_text(a_plan().to_json(), text) | {"margin": "safe"})
    path.write_text(plan_page(plan), encoding="utf-8")
    chromium.logs("performance")
    chromium.send("url", {"url": path.as_uri()})
    assert chromium.requested() == [path.as_uri()]
    assert chromium.logs("browser") == []
    assert chromium.run("return window.broken ?? null") is None
    assert chromium.run("return document.querySelector('h1').textContent").split() == f"train.py{inert(text)}".split()
    assert (
        chromium.run("return [...document.querySelectorAll('script, img, [onload], [onfocus], [onmouseover]')].length")
        == 0
    )


def test_a_page_in_a_notebooks_frame_draws_itself_and_cannot_reach_out(chromium: Browser, tmp_path: Path) -> None:
    path = tmp_path / "notebook.html"
    page = html_page(training(), summarize(training()))
    reaching = page.replace("</body>", "<script>parent.document.title = 'reached'</script></body>")
    path.write_text(f"<!doctype html><title>notebook</title>{framed_page(reaching)}", encoding="utf-8")
    chromium.send("url", {"url": path.as_uri()})
    frame = chromium.send("element", {"using": "css selector", "value": "iframe"})
    chromium.send("frame", {"id": frame})
    try:
        chromium.wait("return document.documentElement.dataset.ready === 'true'")
        assert "277.0 MiB" in chromium.run("return document.getElementById('verdict').textContent")
    finally:
        chromium.send("frame", {"id": None})
    assert chromium.run("return document.title") == "notebook"
