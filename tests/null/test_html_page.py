"""The HTML report without a browser: no peak is lost, what is embedded is exact, bounded and harmless."""

import dataclasses
import html.parser
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.histories import MIB, STACKS, nothing, training, with_a_predicted_step

from tightfit.allocator.settings import AllocatorSettings
from tightfit.devices.catalogue import find
from tightfit.reports.blocks_by_site import largest_blocks, places
from tightfit.reports.downsampled_timeline import Detail, category_timelines, timeline
from tightfit.reports.html.history_page import html_page
from tightfit.reports.html.page_data import page_json
from tightfit.reports.html.treemap import peak_tree
from tightfit.reports.summary import fit_of_recording, settings_words, summarize
from tightfit.simulate.history import CATEGORIES, History, HistorySpan
from tightfit.tape import Column

ATTACK = "</script><script>alert(1)</script><!--\u2028&quot;"
COARSE = Detail(num_even=20, num_in_step=10, num_around_peak=8, num_around_step_peaks=4, num_steps=2)


def data_of(history: History, **limits: int) -> dict[str, Any]:
    return json.loads(page_json(history, summarize(history), **limits))


def column(differences: list[int], unit: int = 1) -> Column:
    return np.cumsum(differences) * unit


class TestTheTimeline:
    def test_a_short_run_is_kept_whole(self) -> None:
        history = training()
        cut = timeline(history, Detail())
        assert np.array_equal(cut.at, np.arange(history.num_events))
        assert np.array_equal(sum(cut.by_category), history.allocated)

    @given(num_steps=st.integers(1, 5), num_layers=st.integers(1, 120), seed=st.integers(0, 100))
    def test_no_peak_is_lost_however_coarse(self, num_steps: int, num_layers: int, seed: int) -> None:
        history = training(num_steps, num_layers, seed=seed)
        cut = timeline(history, COARSE)
        total = sum(cut.by_category)
        assert history.peak_event in cut.at.tolist()
        assert total.max() == history.allocated.max()
        assert np.array_equal(total, history.allocated[cut.at])
        for begin, end, high, low in zip(cut.edges, cut.edges[1:], total, cut.low, strict=False):
            assert (low, high) == (history.allocated[begin:end].min(), history.allocated[begin:end].max())
        assert cut.reserved.max() == history.reserved.max()
        assert (cut.edges[0], cut.edges[-1]) == (0, history.num_events)

    def test_around_the_peak_every_event_is_there(self) -> None:
        history = training(num_layers=300)
        edges = timeline(history, COARSE).edges.tolist()
        assert set(range(history.peak_event - 4, history.peak_event + 5)) <= set(edges)

    def test_steps_begin_at_an_edge_and_their_peaks_are_kept(self) -> None:
        history = training(num_layers=300)
        cut = timeline(history, COARSE)
        for span in history.spans:
            assert span.begin in cut.edges
        highest = sorted(int(history.allocated[s.begin : s.end].max()) for s in history.spans)
        assert set(highest[-2:]) <= set(sum(cut.by_category).tolist())

    def test_what_no_block_explains_is_of_no_known_category(self) -> None:
        history = training()
        more = dataclasses.replace(history, allocated=history.allocated + 3 * MIB)
        cut = timeline(more, Detail())
        assert set(cut.by_category[CATEGORIES.index("unknown")].tolist()) == {3 * MIB}
        assert summarize(more).at_peak["unknown"] == 3 * MIB

    def test_levels_at_an_event_are_those_of_the_blocks_alive(self) -> None:
        history = training(num_layers=40)
        for event in (0, 7, history.peak_event, history.num_events - 1):
            alive = history.alive_at(event)
            expected = [
                int(history.blocks.block_bytes[alive & (history.blocks.category == category)].sum())
                for category in range(len(CATEGORIES))
            ]
            assert [int(level[0]) for level in category_timelines(history, np.array([event]))] == expected


class TestTheData:
    def test_numbers_come_back_as_they_were(self) -> None:
        history = training()
        data = data_of(history)["timeline"]
        unit = data["unit"]
        assert unit % 512 == 0
        assert column(data["reserved"], unit).max() == history.reserved.max()
        total = sum(column(level, unit) for level in data["levels"].values())
        assert np.array_equal(total, history.allocated)
        assert np.array_equal(column(data["edges"]), np.arange(history.num_events + 1))
        assert column(data["time_us"])[5] == history.time_us[5]

    def test_says_who_asked_at_each_moment(self) -> None:
        data = data_of(training())
        said = [data["texts"][i] for i in column(data["timeline"]["places"])]
        assert said[0] == "model.py:8 forward, net.layers.0.linear"
        assert said[399] == ""

    @pytest.mark.parametrize("max_bytes", [300_000, 60_000, 15_000])
    def test_is_cut_until_it_is_within_its_budget_and_keeps_the_peak(self, max_bytes: int) -> None:
        history = training(num_layers=3000)
        text = page_json(history, summarize(history), max_bytes=max_bytes)
        assert len(text) <= max_bytes
        data = json.loads(text)["timeline"]
        assert sum(column(level, data["unit"]) for level in data["levels"].values()).max() == history.allocated.max()

    def test_very_long_names_and_a_great_many_of_them_stay_within_it(self) -> None:
        stacks = tuple((f"{'x' * 5000}{i}.py:1 f", *STACKS[1]) for i in range(3000))
        history = training(num_layers=3000, stacks=stacks)
        assert len(page_json(history, summarize(history))) < 2_600_000

    def test_of_very_many_steps_the_highest_are_kept(self) -> None:
        history = training(num_steps=3, num_layers=1000)
        spans = tuple(HistorySpan(name=f"step {i}", kind="step", begin=2 * i, end=2 * i + 2) for i in range(3000))
        data = data_of(dataclasses.replace(history, spans=spans))["summary"]
        assert data["num_spans"] == 3000
        assert len(data["spans"]) == 1500
        assert max(s["peak_allocated_bytes"] for s in data["spans"]) == history.allocated.max()

    def test_a_run_of_nothing(self) -> None:
        data = data_of(nothing())
        assert data["timeline"]["edges"] == [0]
        assert data["places"] == data["blocks"] == []


class TestThePlaces:
    def test_blocks_of_one_line_in_layers_of_one_kind_are_one_place(self) -> None:
        found = places(training(), 100)
        assert {place.module for place in found} == {"", "net.layers.*.linear", "net.layers.*.act"}
        assert sum(place.peak_bytes for place in found) == training().allocated.max()
        assert sum(place.num_in_total for place in found) == 601
        assert max(place.largest_bytes for place in found) == 64 * MIB

    def test_those_that_hold_most_at_the_peak_and_those_that_asked_for_most(self) -> None:
        few = places(training(), 2)
        assert len(few) == 2
        assert few[0].peak_bytes == max(place.peak_bytes for place in places(training(), 100))

    def test_the_largest_single_blocks(self) -> None:
        first, second, *_ = largest_blocks(training(), 10)
        assert (first.block_bytes, first.allocated_at, first.freed_at) == (64 * MIB, -1, 1200)
        assert second.block_bytes - second.requested_bytes == 8


class TestTheTree:
    def test_is_by_module_and_adds_up(self) -> None:
        root = peak_tree(training(), 0.0001)
        assert root.num_bytes == training().allocated.max()
        assert [part.name for part in root.parts.values()] == ["net.layers", "outside of modules"]
        for part in root.parts.values():
            assert part.num_bytes == sum(inner.num_bytes for inner in part.parts.values())

    def test_modules_have_their_class_where_it_is_known_and_do_not_repeat_it(self) -> None:
        classes = {
            "net.layers": "ModuleList",
            "net.layers.0": "Block",
            "net.layers.0.linear": "linear",
            "net.layers.1": "Block",
        }
        root = peak_tree(dataclasses.replace(training(), module_classes=classes), 0.0001)
        layers, outside = root.parts.values()
        assert (layers.label, outside.label) == ("net.layers: ModuleList", "outside of modules")
        assert {part.label for part in layers.parts.values()} == {"0: Block", "1: Block"}
        assert {inner.label for part in layers.parts.values() for inner in part.parts.values()} == {"linear", "act"}
        data = data_of(dataclasses.replace(training(), module_classes=classes))
        assert "net.layers: ModuleList" in data["texts"]

    def test_without_modules_is_by_the_users_calls(self) -> None:
        root = peak_tree(training(modules=("", "")), 0.0001)
        names = {part.name for part in root.parts.values()}
        assert names == {"train.py:41 main", "train.py:3 build"}

    def test_what_is_small_is_taken_together(self) -> None:
        root = peak_tree(training(modules=("", "a", "b", "c", "d")), 0.215)
        assert [(part.name, len(part.parts)) for part in root.parts.values()] == [
            ("4 smaller parts", 0),
            ("outside of modules", 1),
        ]
        assert sum(part.num_bytes for part in root.parts.values()) == root.num_bytes

    def test_one_small_part_keeps_its_name(self) -> None:
        root = peak_tree(training(), 0.25)
        assert [part.name for part in root.parts.values()] == ["net.layers", "outside of modules"]


class TestTheSummary:
    def test_steps_and_cards_and_what_the_peak_was_for(self) -> None:
        history = training()
        summary = summarize(history, cards=[fit_of_recording(history, find("RTX 4090"))])
        assert sum(summary.at_peak.values()) == summary.peak_reserved_bytes == history.reserved.max()
        assert [span.peak_allocated_bytes for span in summary.spans] == [
            int(history.allocated[s.begin : s.end].max()) for s in history.spans
        ]
        assert summary.peak_span == "step 2"
        assert (summary.peak_line, summary.peak_function) in (("model.py:8", "forward"), ("model.py:9", "forward"))
        assert summary.to_json()["cards"][0]["fits"] is True

    def test_the_recorded_card_keeps_its_recorded_context(self) -> None:
        history = training()
        own, other = (fit_of_recording(history, find(name)) for name in ("RTX 4090", "RTX 4080"))
        assert own.device_low_bytes == own.device_bytes == history.reserved.max() + 300 * MIB
        assert other.device_low_bytes < other.device_high_bytes

    def test_pieces_of_an_interrupted_step_are_taken_together(self) -> None:
        spans = (
            HistorySpan(name="step 1", kind="step", begin=0, end=10),
            HistorySpan(name="evaluation", kind="aside", begin=10, end=20),
            HistorySpan(name="step 1", kind="step", begin=20, end=5000),
        )
        found = summarize(dataclasses.replace(training(), spans=spans)).spans
        assert [(span.name, span.begin, span.end) for span in found] == [("step 1", 0, 1200), ("evaluation", 10, 20)]

    def test_settings_that_are_not_torchs_own(self) -> None:
        assert settings_words(AllocatorSettings()) == ""
        assert settings_words(AllocatorSettings(expandable_segments=True)) == "expandable_segments True"


class _Tags(html.parser.HTMLParser):
    """Which tags a page has, and the text in its scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts.append(data)


class TestThePage:
    def test_what_a_stranger_recorded_stays_data(self) -> None:
        stacks = ((f"{ATTACK}:1 {ATTACK}",), (f"{ATTACK}:2 f", ATTACK), ("z.py:1 z",))
        history = training(stacks=stacks, modules=("", ATTACK, ATTACK))
        page = html_page(
            dataclasses.replace(history, label=ATTACK), summarize(dataclasses.replace(history, label=ATTACK))
        )
        tags = _Tags()
        tags.feed(page)
        assert [tag for tag, _ in tags.tags].count("script") == 2
        assert ATTACK in json.loads(tags.scripts[0])["texts"]
        assert "alert(1)</script>" not in page

    def test_shows_what_runs_when_in_a_predicted_step(self) -> None:
        history = with_a_predicted_step()
        summary = summarize(history)
        page = html_page(history, summary)
        assert "Time of the last step, predicted: 258.0 ms" in page
        # Two kernels after one another are one bar; the copy is not waited for.
        assert page.count('class="critical"') == 2
        assert "2 operators, most in other kernels" in page
        assert [part["work"] for part in summary.to_json()["step"]["critical_path"]] == [
            "the host reads values back",
            "other kernels",
        ]
        assert "Time of the last step" not in html_page(training(), summarize(training()))

    def test_may_load_nothing_and_run_only_its_own_script(self) -> None:
        tags = _Tags()
        tags.feed(html_page(training(), summarize(training())))
        (policy,) = (a["content"] for tag, a in tags.tags if a.get("http-equiv") == "Content-Security-Policy")
        assert policy is not None
        assert policy.startswith("default-src 'none'; style-src 'sha256-")
        assert "unsafe" not in policy
        assert [
            (tag, a) for tag, a in tags.tags if {"src", "href", "srcset"} & set(a) and a.get("href") != "#timeline"
        ] == []
