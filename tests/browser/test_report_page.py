"""The HTML report in a real browser: what it loads, how it zooms, sorts and is used by keys, how it looks by night, what it withstands."""

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.browser.driver import Browser, browser
from tests.histories import STACKS, history_with, nothing, training, with_a_predicted_step
from tests.hostile_text import DIRECTION_CONTROLS, HOSTILE_TEXTS

from tightfit.devices.catalogue import find
from tightfit.reports.html.history_page import html_page
from tightfit.reports.html.inert_text import inert
from tightfit.reports.summary import fit_of_recording, summarize
from tightfit.simulate.history import History

ATTACK = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 2'>"
CARDS = ("RTX 4060", "RTX 4090")
MAX_BYTES = 3_000_000


def write_page(history: History, path: Path) -> Path:
    cards = [fit_of_recording(history, find(name)) for name in CARDS]
    path.write_text(html_page(history, summarize(history, cards=cards)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(training(), tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def report(chromium: Browser, page: Path) -> Browser:
    chromium.open(page)
    return chromium


def shown(report: Browser) -> tuple[float, float]:
    """The range of events in view, once it has been drawn."""
    report.run("return new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")
    begin, end = report.run("const {begin, end} = document.getElementById('chart').dataset; return [+begin, +end]")
    return begin, end


def focus(report: Browser, selector: str) -> None:
    report.run("document.querySelector(arguments[0]).focus()", selector)


class TestItOpens:
    def test_from_a_file_without_any_request_or_complaint(self, report: Browser, page: Path) -> None:
        assert report.requested() == [page.as_uri()]
        assert report.logs("browser") == []

    def test_with_the_figures_of_the_run(self, report: Browser) -> None:
        text = report.run("return document.body.innerText")
        assert "train.py" in text
        assert "step 2" in text
        assert "a value read back from the GPU is assumed to be 1.0 (train.py:44)" in text

    def test_without_any_card_to_compare(self, chromium: Browser, tmp_path: Path) -> None:
        path = tmp_path / "alone.html"
        path.write_text(html_page(training(), summarize(training())), encoding="utf-8")
        chromium.open(path)
        text = chromium.run("return document.body.innerText")
        assert "undefined" not in text
        assert "NaN" not in text
        assert chromium.run("return document.getElementById('cards').hidden")

    def test_something_is_drawn(self, report: Browser) -> None:
        colours = report.run(
            "const base = document.getElementById('chart-base');"
            "const {data} = base.getContext('2d').getImageData(0, 0, base.width, base.height);"
            "return new Set(new Uint32Array(data.buffer)).size"
        )
        assert colours > 5

    def test_a_run_of_nothing(self, chromium: Browser, tmp_path: Path) -> None:
        chromium.open(write_page(nothing(), tmp_path / "nothing.html"))
        assert chromium.logs("browser") == []
        assert "Peak: 0 B allocated" in chromium.run("return document.body.innerText")
        hidden = "return [...document.querySelectorAll('[hidden]')].map(e => e.id)"
        assert {"held", "timeline", "steps", "tree", "places"} <= set(chromium.run(hidden))


class TestTheTimelineZooms:
    def test_by_keys_and_back(self, report: Browser) -> None:
        focus(report, "#chart")
        assert shown(report) == (0, 1200)
        report.press("+", "+")
        begin, end = shown(report)
        assert end - begin == pytest.approx(300)
        report.press("Left")
        assert shown(report)[0] < begin
        report.press("Home")
        assert shown(report)[0] == 0
        report.press("End")
        assert shown(report)[1] == 1200
        report.press("-")
        assert shown(report)[1] - shown(report)[0] == pytest.approx(600)
        report.press("Escape")
        assert shown(report) == (0, 1200)

    def test_by_the_wheel_around_the_pointer(self, report: Browser) -> None:
        report.wheel("#chart", -240)
        begin, end = shown(report)
        assert 0 < begin < end < 1200

    def test_by_dragging_over_a_range(self, report: Browser) -> None:
        report.drag("#chart", -100, 100)
        begin, end = shown(report)
        width = report.run("return document.getElementById('chart').clientWidth")
        assert end - begin == pytest.approx(1200 * 200 / (width - 76), rel=0.05)
        report.click("#zoom-reset")
        assert shown(report) == (0, 1200)

    def test_by_pinching(self, report: Browser) -> None:
        report.pinch("#chart", 50, 150)
        begin, end = shown(report)
        assert end - begin == pytest.approx(400, rel=0.15)
        report.pinch("#chart", 150, 20)
        assert shown(report) == (0, 1200)

    def test_fits_the_height_and_says_that_it_does_not_begin_at_nothing(self, report: Browser) -> None:
        focus(report, "#chart")
        report.press("y")
        assert report.run("return document.getElementById('fit-height').getAttribute('aria-pressed')") == "true"
        report.wait("return document.getElementById('chart-status').textContent.includes('not at 0')")

    def test_by_buttons_and_to_a_step(self, report: Browser) -> None:
        report.click("#zoom-in")
        assert shown(report)[1] - shown(report)[0] == pytest.approx(600)
        report.click("#steps-table tbody tr:nth-child(3) button")
        assert shown(report) == (800, 1200)

    def test_to_the_peak_by_its_key(self, report: Browser) -> None:
        peak = training().peak_event
        focus(report, "#chart")
        report.press("Home", "p")
        begin, end = shown(report)
        assert begin < peak < end
        assert end - begin <= 120
        assert report.run("return +document.getElementById('chart').dataset.cursor") == peak
        report.press("Right", shift=True)
        assert report.run("return +document.getElementById('chart').dataset.cursor") == peak + 1

    def test_by_time_shows_the_same_range(self, report: Browser) -> None:
        report.click("#zoom-in")
        begin, end = shown(report)
        report.click("#by-time")
        assert shown(report) == pytest.approx((7 * begin, 7 * end), abs=14)

    def test_says_the_range_and_gives_it_as_a_table(self, report: Browser) -> None:
        report.click("#chart-table summary")
        focus(report, "#chart")
        report.press("p")
        report.wait("return document.querySelectorAll('#chart-table tbody tr').length > 20")
        assert "Peak in this range" in report.run("return document.getElementById('chart-status').textContent")
        events = report.run("return [...document.querySelectorAll('#chart-table tbody th')].map(c => c.textContent)")
        assert f"{training().peak_event:,}" in events

    def test_the_page_scrolls_past_the_chart(self, report: Browser) -> None:
        report.run("window.scrollTo(0, 60); document.dispatchEvent(new Event('scroll'))")
        report.wheel("#chart", 100)
        assert shown(report) == (0, 1200)


class TestTheTableSorts:
    def column(self, report: Browser, key: str) -> list[str]:
        place = report.run(
            "return [...document.querySelectorAll('#places-table th[data-key]')].findIndex(c => c.dataset.key === arguments[0])",
            key,
        )
        return report.run(
            "return [...document.querySelectorAll('#places-table tbody tr')].map(r => r.cells[arguments[0]].textContent)",
            place,
        )

    def sorted_by(self, report: Browser) -> list[list[str]]:
        script = "return [...document.querySelectorAll('#places-table th[data-key]')].map(c => [c.dataset.key, c.getAttribute('aria-sort')])"
        return [pair for pair in report.run(script) if pair[1] != "none"]

    def test_by_what_is_held_at_the_peak_first(self, report: Browser) -> None:
        assert self.sorted_by(report) == [["peak", "descending"]]
        assert self.column(report, "what")[0] == "activations"

    def test_what_holds_nothing_at_the_peak_is_shown_on_demand(self, chromium: Browser, tmp_path: Path) -> None:
        run = training(num_steps=1)
        allocated_at = np.where(run.blocks.stack == 2, run.peak_event + 1, run.blocks.allocated_at)
        later = dataclasses.replace(run, blocks=dataclasses.replace(run.blocks, allocated_at=allocated_at))
        chromium.open(write_page(later, tmp_path / "later.html"))
        assert len(self.column(chromium, "peak")) == 2
        assert "" not in self.column(chromium, "peak")
        chromium.click("#places-table .more")
        assert self.column(chromium, "peak")[2:] == ["", ""], "a cell without bytes is empty, and says no 0 B"
        chromium.open(tmp_path / "later.html")
        chromium.click("th[data-key=total] button")
        assert "" in self.column(chromium, "peak")

    def test_by_a_click_and_again_the_other_way(self, report: Browser) -> None:
        report.click("th[data-key=numTotal] button")
        assert self.sorted_by(report) == [["numTotal", "descending"]]
        counts = [int(count) for count in self.column(report, "numTotal")]
        assert counts == sorted(counts, reverse=True)
        report.click("th[data-key=numTotal] button")
        assert self.sorted_by(report) == [["numTotal", "ascending"]]
        assert [int(count) for count in self.column(report, "numTotal")] == sorted(counts)

    def test_by_enter(self, report: Browser) -> None:
        focus(report, "th[data-key=module] button")
        report.press("Enter")
        assert self.sorted_by(report) == [["module", "ascending"]]
        modules = self.column(report, "module")
        assert modules == sorted(modules)

    def test_filters_by_words(self, report: Browser) -> None:
        focus(report, "#filter")
        report.press(*"act temp")
        assert self.column(report, "what") == ["temporaries"]
        assert "1 of 1 allocation sites" in report.run("return document.getElementById('places-status').textContent")

    def test_shows_a_whole_stack_with_the_users_own_frames(self, report: Browser) -> None:
        report.click("#places-table tbody .plain")
        frames = report.run("return [...document.querySelectorAll('.stack li')].map(f => [f.textContent, f.className])")
        assert [text for text, _ in frames] == list(STACKS[1]) or [text for text, _ in frames] == list(STACKS[2])
        assert [kind for _, kind in frames] == ["", "own", "own"]

    def test_single_blocks_lead_to_their_event(self, report: Browser) -> None:
        report.click("[data-rows=blocks]")
        assert self.sorted_by(report) == [["size", "descending"]]
        assert self.column(report, "born")[0] == "before the first"
        event = int(self.column(report, "born")[1].replace(",", ""))
        report.click("#places-table tbody tr:nth-child(2) [aria-label^='Show event']")
        assert report.run("return +document.getElementById('chart').dataset.cursor") == event


class TestByKeysAlone:
    def test_tab_reaches_everything_and_leaves_again(self, report: Browser) -> None:
        reached = []
        for _ in range(60):
            report.press("Tab")
            reached.append(
                report.run(
                    "const e = document.activeElement;"
                    "return e.id || e.closest('[id]')?.id + '/' + (e.closest('th')?.dataset.key ?? e.tagName)"
                )
            )
        for stop in ("patterns", "theme", "chart", "go-peak", "steps-table", "treemap/BUTTON", "filter"):
            assert stop in reached, stop
        assert "places-table/peak" in reached

    def test_the_treemap_is_entered_and_left(self, report: Browser) -> None:
        focus(report, "#treemap button")
        path = "return document.getElementById('tree-path').innerText.replaceAll('\\n', ' ')"
        assert report.run(path).startswith("everything")
        report.press("Enter")
        assert "net.layers" in report.run(path)
        assert report.run("return document.activeElement.closest('#treemap') !== null")
        assert "of what is allocated" in report.run("return document.getElementById('tree-status').textContent")
        report.press("Escape")
        assert report.run(path).startswith("everything")
        assert report.run("return document.activeElement.getAttribute('aria-label')").startswith("net.layers")

    def test_a_click_goes_into_the_part_that_it_hits(self, report: Browser) -> None:
        report.click("#treemap .inner.open")
        crumbs = report.run("return [...document.querySelectorAll('#tree-path > :not([aria-hidden])')].length")
        assert crumbs >= 3

    def test_everything_that_is_used_has_a_name(self, report: Browser) -> None:
        nameless = report.run(
            "return [...document.querySelectorAll('button, input, [tabindex], [role=img], nav')]"
            ".filter(e => !(e.textContent.trim() || e.ariaLabel || e.labels?.length || e.getAttribute('aria-labelledby')))"
            ".map(e => e.outerHTML)"
        )
        assert nameless == []


CONTRAST = """
const parse = (text) => { const pen = document.createElement('canvas').getContext('2d'); pen.fillStyle = text; pen.fillRect(0, 0, 1, 1); return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3); };
const light = (text) => { const [r, g, b] = parse(text).map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const value = (name) => getComputedStyle(document.documentElement).getPropertyValue('--' + name).trim();
const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
const words = ['text', 'muted', 'link', 'good', 'bad', 'doubt'].flatMap(name => [['page', name], ['raised', name]]).map(([ground, name]) => [name + ' on ' + ground, ratio(value(ground), value(name))]);
const bands = ['gradients', 'optimizer_state', 'activations', 'temporaries', 'inputs', 'workspace', 'unknown'].map(name => ['dark on ' + name, ratio('#101214', value(name))]);
return [...words, ...bands, ['white on parameters', ratio('#fff', value('parameters'))]];
"""


class TestLightAndDark:
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_follows_the_system_with_contrast_enough_for_text(self, report: Browser, scheme: str) -> None:
        report.devtools(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}], media=""
        )
        ground = report.run("return getComputedStyle(document.body).backgroundColor")
        assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 26)"}[scheme]
        for what, ratio in report.run(CONTRAST):
            assert ratio >= 4.5, what

    def test_the_button_goes_through_system_light_and_dark(self, report: Browser) -> None:
        report.devtools(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}], media=""
        )
        grounds = []
        for _ in range(3):
            report.click("#theme")
            grounds.append(report.run("return getComputedStyle(document.body).backgroundColor"))
        assert grounds == ["rgb(255, 255, 255)", "rgb(20, 23, 26)", "rgb(255, 255, 255)"]

    def test_patterns_tell_categories_apart_without_colour(self, report: Browser) -> None:
        image = "return getComputedStyle(document.querySelector('.swatch[data-category=temporaries]')).backgroundImage"
        assert "gradient" in report.run(image)
        report.click("#patterns")
        assert report.run(image) == "none"

    @pytest.mark.parametrize("width", [360, 768, 1400])
    def test_fits_the_window(self, report: Browser, width: int) -> None:
        report.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=2, mobile=False
        )
        try:
            assert report.run("return document.documentElement.scrollWidth") <= width
            wide = "return [...document.querySelectorAll('.pair .scroll')].map(each => each.scrollWidth - each.clientWidth)"
            assert width < 768 or set(report.run(wide)) == {0}
            report.wait("const c = document.getElementById('chart-base'); return c.width === c.clientWidth * 2")
        finally:
            report.devtools("Emulation.clearDeviceMetricsOverride")

    @pytest.mark.parametrize("width", [360, 1280])
    def test_fits_the_window_with_long_names_of_what_comes_after_the_steps(
        self, chromium: Browser, tmp_path: Path, width: int
    ) -> None:
        history = training()
        names = [f"after the steps: without gradients at train_with_evaluation.py:{46 + at}" for at in range(3)]
        spans = tuple(dataclasses.replace(span, name=name) for span, name in zip(history.spans, names, strict=True))
        chromium.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False
        )
        try:
            chromium.open(write_page(dataclasses.replace(history, spans=spans), tmp_path / "long.html"))
            assert chromium.run("return document.documentElement.scrollWidth") <= width
            assert chromium.run("return document.getElementById('steps-table').textContent").count(names[0]) == 1
        finally:
            chromium.devtools("Emulation.clearDeviceMetricsOverride")

    @pytest.mark.parametrize("width", [360, 1400])
    def test_fits_the_window_with_a_predicted_step(self, chromium: Browser, tmp_path: Path, width: int) -> None:
        chromium.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False
        )
        try:
            chromium.open(write_page(with_a_predicted_step(), tmp_path / "step.html"))
            assert chromium.logs("browser") == []
            rows = chromium.run("return [...document.querySelectorAll('.step .name')].map(row => row.textContent)")
            assert rows == ["host", "stream 0", "copy engine to the GPU"]
            assert chromium.run("return document.documentElement.scrollWidth") <= width
            bars = chromium.run("return [...document.querySelectorAll('.step rect')].map(bar => bar.getBBox().width)")
            assert min(bars) > 0
        finally:
            chromium.devtools("Emulation.clearDeviceMetricsOverride")


class TestItWithstands:
    def test_a_recording_from_a_stranger(self, chromium: Browser, tmp_path: Path) -> None:
        stacks = ((f"{ATTACK}.py:1 {ATTACK}",), (f"{ATTACK}.py:2 x", f"y.py:3 {ATTACK}"), ("z.py:4 z",))
        history = training(stacks=stacks, modules=("", ATTACK, f"{ATTACK}.{ATTACK}"))
        chromium.open(write_page(history, tmp_path / "stranger.html"))
        assert chromium.run("return window.broken ?? null") is None
        assert chromium.run("return document.querySelectorAll('img').length") == 0
        assert chromium.logs("browser") == []
        assert ATTACK in chromium.run("return document.getElementById('places-table').textContent")

    @pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
    def test_names_that_would_harm_a_page_that_trusted_them(self, chromium: Browser, tmp_path: Path, text: str) -> None:
        chromium.open(write_page(history_with(text), tmp_path / "hostile.html"))
        assert chromium.run("return window.broken ?? null") is None
        assert chromium.logs("browser") == []
        assert chromium.requested() == [(tmp_path / "hostile.html").as_uri()]
        assert inert(text) in chromium.run("return document.getElementById('assumptions-list').textContent")
        assert inert(text) in chromium.run("return document.getElementById('places-table').textContent")
        assert not set(DIRECTION_CONTROLS) & set(chromium.run("return document.documentElement.outerHTML"))

    def test_two_million_events(self, chromium: Browser, tmp_path: Path) -> None:
        history = training(num_steps=20, num_layers=50_000)
        assert history.num_events == 2_000_000
        started = time.monotonic()
        path = write_page(history, tmp_path / "long.html")
        written = time.monotonic()
        chromium.open(path)
        opened = time.monotonic()
        print(
            f"written in {written - started:.1f} s, {path.stat().st_size:,} bytes, opened in {opened - written:.2f} s"
        )
        assert path.stat().st_size < MAX_BYTES
        assert opened - written < 10
        focus(chromium, "#chart")
        chromium.press("p")
        begin, end = shown(chromium)
        assert begin < history.peak_event < end
        assert chromium.run("return +document.getElementById('chart').dataset.cursor") == history.peak_event
