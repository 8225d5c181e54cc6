"""The page of `tightfit watch` in a real browser: it draws, follows, answers, and shows hostile names as text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.browser.driver import Browser, browser
from tests.hostile_text import HOSTILE_TEXTS
from tests.watch.machines import ScriptedSource
from tests.watch.served import served

from tightfit.units import GIB
from tightfit.watch.machine.printable import printable

HOSTILE = printable("".join(HOSTILE_TEXTS.values()), 2000)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def source() -> ScriptedSource:
    found = ScriptedSource({10: 30 * GIB, 11: 3 * GIB})
    found.commands[11] = HOSTILE
    return found


@pytest.fixture(scope="module")
def page(chromium: Browser, source: ScriptedSource, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with served(tmp_path_factory.mktemp("store"), source) as server:
        chromium.logs("performance")
        chromium.logs("browser")
        chromium.send("url", {"url": server.url})
        chromium.wait("return document.documentElement.dataset.ready === 'true'", 30)
        yield chromium


def text(page: Browser, selector: str) -> Any:
    return page.run("return document.querySelector(arguments[0]).textContent", selector)


def test_it_asks_nobody_but_its_server(page: Browser) -> None:
    origin = page.run("return location.origin")
    assert {address.startswith(origin) for address in page.requested()} == {True}
    assert page.logs("browser") == []


def test_cards_processes_and_history_are_there(page: Browser) -> None:
    assert "33.0 GiB" in text(page, ".card")
    assert "41 % of 80.0 GiB" in text(page, ".card")
    rows = page.run(
        "return [...document.querySelectorAll('#processes tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert [row[1] for row in rows] == ["10", "11"]
    assert page.run("return document.querySelectorAll('#chart path.layer').length") == 2
    assert page.run("return document.querySelectorAll('#chart .limit').length") == 1


def test_names_that_would_harm_are_text(page: Browser) -> None:
    assert page.run("return window.broken ?? null") is None
    cells = page.run("return [...document.querySelectorAll('#processes td.command')].map(cell => cell.textContent)")
    assert HOSTILE in cells
    assert HOSTILE in text(page, "#legend")
    assert page.run("return document.querySelectorAll('img, iframe, #processes script').length") == 0


def test_it_follows_the_machine(page: Browser, source: ScriptedSource) -> None:
    source.used[12] = 40 * GIB
    page.wait("return document.querySelector('.card').textContent.includes('73.0 GiB')", 30)
    page.wait("return document.querySelectorAll('#processes tbody tr').length === 3", 30)
    source.is_lost = True
    page.wait("return document.querySelector('#status').textContent.includes('GPU is lost')", 30)
    assert page.run("return document.querySelector('#status').classList.contains('bad')")
    source.is_lost = False
    page.wait("return document.querySelector('#status').textContent.startsWith('scripted, read')", 60)


def test_sorting_and_filtering(page: Browser) -> None:
    def order() -> Any:
        return page.run(
            "return [...document.querySelectorAll('#processes tbody tr')].map(row => row.cells[1].textContent)"
        )

    assert order() == ["12", "10", "11"]
    page.click("#processes th:nth-child(2) button")
    assert order() == ["10", "11", "12"]
    assert (
        page.run("return document.querySelector('#processes th:nth-child(2)').getAttribute('aria-sort')") == "ascending"
    )
    page.click("#processes th:nth-child(2) button")
    assert order() == ["12", "11", "10"]
    page.run(
        "const filter = document.getElementById('filter'); filter.value = 'train.py'; filter.dispatchEvent(new Event('input'))"
    )
    assert order() == ["12", "10"]
    page.run(
        "const filter = document.getElementById('filter'); filter.value = ''; filter.dispatchEvent(new Event('input'))"
    )


def test_the_cursor_moves_by_keys(page: Browser) -> None:
    page.run("document.getElementById('chart').focus()")
    page.press("Left")
    assert page.run("return document.querySelectorAll('#chart .cursor').length") == 1
    assert "GiB" in text(page, "#reading")
    page.press("Escape")
    assert text(page, "#reading") == ""


def test_spans_and_themes(page: Browser) -> None:
    page.click("#spans button:nth-child(3)")
    page.wait("return document.querySelector('#spans button:nth-child(3)').getAttribute('aria-pressed') === 'true'")
    background = "return getComputedStyle(document.body).backgroundColor"
    page.click("#theme")
    assert page.run(background) == "rgb(255, 255, 255)"
    page.click("#theme")
    assert page.run(background) == "rgb(20, 23, 26)"
    page.click("#theme")
    assert page.run("return document.documentElement.dataset.theme ?? null") is None


def test_advice_about_a_job(page: Browser) -> None:
    for size, words in (("60GiB", "does not fit now"), ("1GiB", "fits now"), ("much", "'much' is not a size")):
        page.run("document.getElementById('job').value = arguments[0]", size)
        page.click("#ask")
        page.wait(f"return document.querySelector('#advice').textContent.includes({words!r})", 30)


def test_it_fits_a_narrow_window(page: Browser, tmp_path: Path) -> None:
    page.devtools("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
    try:
        page.wait("return document.documentElement.scrollWidth <= 391")
    finally:
        page.devtools("Emulation.clearDeviceMetricsOverride")
    page.picture(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000
