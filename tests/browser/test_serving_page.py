"""The page of a server in a real browser: it loads nothing, complains of nothing, is no wider than its window, and its charts keep their words."""

from pathlib import Path

from tests.browser.driver import browser
from tests.null.test_serving_page import FOUND

from tightfit.reports.html.serving_page import serving_page


def test_it_opens_from_a_file_without_any_request_or_complaint(tmp_path: Path) -> None:
    path = tmp_path / "serving.html"
    path.write_text(serving_page(FOUND), encoding="utf-8")
    with browser(tmp_path) as chromium:
        colours = []
        for theme in ("light", "dark"):
            chromium.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
            chromium.logs("performance")
            chromium.send("url", {"url": path.as_uri()})
            assert chromium.requested() == [path.as_uri()]
            assert chromium.logs("browser") == []
            assert chromium.run("return document.documentElement.scrollWidth <= innerWidth")
            colours.append(chromium.run("return getComputedStyle(document.querySelector('.stack .unused')).fill"))
            outside = (
                "return [...document.querySelectorAll('svg.curve')].flatMap(svg => { const box = svg.getBoundingClientRect();"
                "return [...svg.querySelectorAll('text, path')].filter(part => { const own = part.getBoundingClientRect();"
                "return own.left < box.left - 1 || own.right > box.right + 1 || own.top < box.top - 1 || own.bottom > box.bottom + 1;"
                "}).map(part => part.textContent) })"
            )
            assert chromium.run(outside) == []
        assert colours[0] != colours[1]
