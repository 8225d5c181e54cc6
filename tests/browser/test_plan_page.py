"""The page of a plan in a real browser: it loads nothing, complains of nothing, and is as wide as its window by day and by night."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.browser.driver import Browser, browser
from tests.plans import a_plan

from tightfit.reports.html.plan_page import plan_page


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
