"""Tuning: hand-computed cases, what is refused, and that nothing worse than the default is ever recommended."""

import dataclasses
import json
import math
import pickle
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.allocator.settings import NUM_INTERVALS, AllocatorSettings
from tightfit.cli.replay import replay as replay_command
from tightfit.errors import UsageError
from tightfit.recordings.read import read_recording
from tightfit.tuning.candidate_settings import (
    divisions_text,
    joined,
    keys_of,
    known_bad,
    spelled,
    split_thresholds_mib,
    thinned,
)
from tightfit.tuning.program import Program
from tightfit.tuning.search_settings import tune
from tightfit.tuning.settings_search import Trials
from tightfit.tuning.static_placement import place_statically
from tightfit.units import KIB, MIB

REAL = sorted((Path(__file__).parents[3] / "shared/data/snapshots").glob("*.pickle"))


class Script:
    """A program written by hand: requests and frees, without the segments that served them."""

    def __init__(self, conf=""):
        self.conf = conf
        self.events = []
        self.sizes = {}

    def malloc(self, *sizes, stream=0):
        """The addresses of new blocks of `sizes` bytes: each its own, since only the program counts."""
        found = []
        for size in sizes:
            address = (len(self.sizes) + 1) << 40
            self.sizes[address] = (size, stream)
            self.write("alloc", address)
            found.append(address)
        return found if len(found) > 1 else found[0]

    def free(self, *addresses):
        for address in addresses:
            self.request_free(address)
            self.write("free_completed", address)

    def request_free(self, address):
        self.write("free_requested", address)

    def empty_cache(self):
        self.events.append({"action": "segment_free", "addr": 1 << 60, "size": 2 * MIB, "stream": 0})

    def write(self, action, address):
        size, stream = self.sizes[address]
        self.events.append({"action": action, "addr": address, "size": size, "stream": stream})

    def recording(self):
        content = {
            "segments": [],
            "device_traces": [self.events],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": self.conf},
        }
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "script.pickle"
            path.write_bytes(pickle.dumps(content, protocol=4))
            return read_recording(path)

    def program(self):
        recording = self.recording()
        return Program.of(recording.devices[0], recording.settings)


def reserved(script, conf):
    return script.program().play(AllocatorSettings.parse(conf)).peak_reserved_bytes


def growing():
    """Requests of 30, 40, 50 and 60 MiB, each freed before the next."""
    script = Script()
    for size in (30, 40, 50, 60):
        script.free(script.malloc(size * MIB))
    return script


def fragmenting(seed=0, steps=40):
    """Sizes that vary from step to step, one block in three kept."""
    source = random.Random(seed)
    script, kept = Script(), []
    for _ in range(steps):
        blocks = script.malloc(*(source.randrange(2 * MIB, 60 * MIB) for _ in range(3)))
        kept.append(blocks.pop())
        script.free(*blocks)
        if len(kept) > 5:
            script.free(kept.pop(0))
    return script


class TestHandComputed:
    def test_growing_requests_leave_segments_that_are_too_small_unless_segments_expand(self):
        # Each request is larger than every cached segment, so the default maps 30 + 40 + 50 + 60 = 180 MiB.
        # Expandable segments map pages of 20 MiB and use the same ones again: 60 MiB is 3 pages, which hold all four.
        assert reserved(growing(), "") == 180 * MIB
        assert reserved(growing(), "expandable_segments:True") == 60 * MIB

    def test_pages_round_up_what_an_expandable_segment_maps(self):
        # 50 MiB is 3 pages of 20 MiB; a block behind it begins at 50 MiB, so 15 MiB more end at 65 MiB: 4 pages.
        # With pages of 11 MiB the ends are at 5 and 6 pages.
        script = Script()
        script.malloc(50 * MIB)
        assert reserved(script, "expandable_segments:True") == 60 * MIB
        assert reserved(script, "expandable_segments:True,large_segment_size_mb:11") == 55 * MIB
        script.malloc(15 * MIB)
        assert reserved(script, "expandable_segments:True") == 80 * MIB
        assert reserved(script, "expandable_segments:True,large_segment_size_mb:11") == 66 * MIB

    def test_rounding_lets_nearby_sizes_share_a_segment(self):
        # With 4 divisions the steps between 32 and 64 MiB are 8 MiB: 33, 37 and 40 MiB all become 40 MiB and share one segment.
        # Without, each needs a larger segment than the last; segments are multiples of 2 MiB: 34 + 38 + 40 = 112 MiB.
        script = Script()
        for size in (33, 37, 40):
            script.free(script.malloc(size * MIB))
        assert reserved(script, "") == 112 * MIB
        assert reserved(script, "roundup_power2_divisions:4") == 40 * MIB
        assert reserved(script, "roundup_power2_divisions:[16:1,32:4]") == 40 * MIB
        # The interval from 64 MiB up is not that of these sizes.
        assert reserved(script, "roundup_power2_divisions:[32:1,64:4]") == 112 * MIB

    def test_rounding_costs_what_it_adds(self):
        # 33 MiB rounded to the next of 2 divisions between 32 and 64 MiB is 48 MiB; five live at once.
        script = Script()
        script.malloc(*[33 * MIB] * 5)
        assert reserved(script, "") == 5 * 34 * MIB
        assert reserved(script, "roundup_power2_divisions:2") == 5 * 48 * MIB

    def test_a_split_limit_keeps_large_blocks_for_large_requests(self):
        # A block of 100 MiB is freed, one of 30 MiB is asked for and kept: it is cut from the 100, and the next request of 100 maps anew.
        # With blocks of 40 MiB and more never split, the 30 MiB get a segment of their own and the 100 are there again.
        script = Script()
        script.free(script.malloc(100 * MIB))
        script.malloc(30 * MIB, 100 * MIB)
        assert reserved(script, "") == 200 * MIB
        assert reserved(script, "max_split_size_mb:40") == 130 * MIB

    def test_larger_segments_hold_more_medium_requests(self):
        # A segment of 20 MiB holds two blocks of 9 MiB, one of 64 MiB seven: 7 blocks take 4 x 20 or 1 x 64 MiB.
        script = Script()
        script.malloc(*[9 * MIB] * 7)
        assert reserved(script, "") == 80 * MIB
        assert reserved(script, "large_segment_size_mb:64") == 64 * MIB

    def test_a_cache_that_was_given_back_is_empty_for_every_candidate(self):
        # As recorded, all is given back between the two requests.
        script = Script()
        script.free(script.malloc(30 * MIB))
        script.empty_cache()
        script.free(script.malloc(40 * MIB))
        assert reserved(script, "") == 40 * MIB
        assert reserved(script, "expandable_segments:True") == 40 * MIB

    def test_a_block_that_another_stream_uses_is_not_reused_before_it_is_done(self):
        script = Script()
        first = script.malloc(30 * MIB)
        script.request_free(first)
        second = script.malloc(30 * MIB)
        script.write("free_completed", first)
        script.free(second)
        assert reserved(script, "") == 60 * MIB
        assert script.program().peak_live_bytes() == 30 * MIB
        assert place_statically([script.program()], seconds=1).height_bytes == 60 * MIB

    def test_the_bound_rounds_each_request_to_512_bytes(self):
        script = Script()
        script.malloc(1, 513, 5 * MIB + 1)
        assert script.program().peak_live_bytes() == 512 + 1024 + 5 * MIB + 512


class TestWhatIsFound:
    def test_it_finds_expandable_segments_where_requests_grow(self):
        found = tune(growing().recording())
        assert found.recommended.settings == "expandable_segments:True"
        assert (found.default.peak_reserved_bytes, found.live_bytes) == (180 * MIB, 60 * MIB)
        assert (found.recommended.saved_bytes, found.recommended.recovered_share) == (120 * MIB, 1.0)
        assert found.reason == "66.7% less than the default"
        assert found.recommended.needs == ("Linux",)

    def test_elsewhere_it_finds_what_needs_no_expandable_segments(self):
        found = tune(growing().recording(), is_windows=True)
        assert not any("expandable" in row.settings for row in found.rows)
        assert [one.settings for one in found.refused] == ["expandable_segments:True"]
        assert found.recommended.peak_reserved_bytes <= found.default.peak_reserved_bytes

    def test_it_keeps_the_default_where_nothing_is_wasted(self):
        script = Script()
        script.malloc(*[20 * MIB] * 10)
        found = tune(script.recording())
        assert found.recommended.settings == ""
        assert found.reason == "nothing that was tried saves more than 1%: keep the default"
        assert found.default.recovered_share is None

    def test_a_setting_must_be_worth_its_key(self):
        # 25 blocks of 40 MiB, and one of 9 MiB in a segment of 20: 1,020 MiB. Segments of 12 MiB save 8 MiB of them, 0.8 %, which is no reason to
        # set anything; it is shown all the same.
        script = Script()
        script.malloc(*[40 * MIB] * 25, 9 * MIB)
        found = tune(script.recording())
        assert found.recommended == found.default
        assert found.default.peak_reserved_bytes == 1020 * MIB
        assert any(row.settings == "large_segment_size_mb:12" and row.saved_bytes == 8 * MIB for row in found.rows)

    def test_recorded_settings_are_a_row_and_a_baseline(self):
        script = growing()
        script.conf = "expandable_segments:True"
        found = tune(script.recording())
        assert found.as_recorded.settings == "expandable_segments:True"
        assert found.recommended == found.as_recorded
        assert found.reason.endswith("keep the recorded settings")

    def test_given_settings_are_a_row(self):
        found = tune(growing().recording(), alloc_conf=" max_split_size_mb:64 , garbage_collection_threshold:0.8")
        assert found.given.settings == "max_split_size_mb:64,garbage_collection_threshold:0.8"
        assert found.given in found.rows
        assert "memory limit" in found.given.note

    def test_less_memory_makes_it_choose_what_fits(self):
        # The default can give cached segments back, but not pieces of them: with 30 of 100 MiB kept, 170 MiB are too little for 100 more.
        script = Script()
        script.free(script.malloc(100 * MIB))
        script.malloc(30 * MIB, 100 * MIB)
        found = tune(script.recording(), capacity_bytes=170 * MIB)
        assert not found.default.fits
        assert found.recommended.fits
        assert found.recommended.peak_reserved_bytes <= 170 * MIB
        assert "runs out of memory" in found.reason

    def test_nothing_is_recommended_where_nothing_fits(self):
        found = tune(growing().recording(), capacity_bytes=50 * MIB)
        assert found.recommended is None
        assert found.default.saved_bytes is None

    def test_without_time_the_baselines_are_still_compared(self):
        found = tune(fragmenting().recording(), alloc_conf="roundup_power2_divisions:8", seconds=0)
        assert not found.is_complete
        assert {row.settings for row in found.rows} == {"", "roundup_power2_divisions:8"}

    def test_several_devices_are_counted_together(self):
        recording = growing().recording()
        device = recording.devices[0]
        twice = dataclasses.replace(recording, devices=(device, dataclasses.replace(device, device=1)))
        found = tune(twice)
        assert found.default.peak_reserved_bytes == 2 * 180 * MIB
        assert (found.live_bytes, found.static.height_bytes) == (2 * 60 * MIB, 2 * 60 * MIB)
        assert tune(twice, device=1).default.peak_reserved_bytes == 180 * MIB

    def test_a_recording_without_events_is_refused(self):
        with pytest.raises(UsageError, match="no events to tune for"):
            tune(Script().recording())


class TestNeverWorse:
    @settings(deadline=None, max_examples=20)
    @given(st.data())
    def test_what_is_recommended_is_no_worse_than_the_default_and_the_recorded(self, data):
        conf = data.draw(
            st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:2"])
        )
        script, live = Script(conf), []
        for size in data.draw(st.lists(st.integers(1, 40 * MIB), min_size=4, max_size=30)):
            live.append(script.malloc(size, stream=data.draw(st.sampled_from([0, 0, 0, 5]))))
            while live and data.draw(st.booleans()):
                script.free(live.pop(data.draw(st.integers(0, len(live) - 1))))
        found = tune(script.recording(), seconds=5)
        chosen = found.recommended.peak_reserved_bytes
        assert chosen <= found.default.peak_reserved_bytes
        assert found.as_recorded is None or chosen <= found.as_recorded.peak_reserved_bytes
        assert all(row.peak_reserved_bytes >= found.live_bytes for row in found.rows)
        assert found.live_bytes <= found.static.bound_bytes <= found.static.height_bytes
        program = script.program()
        assert program.play(AllocatorSettings.parse(found.recommended.settings)).peak_reserved_bytes == chosen
        assert known_bad(found.recommended.settings) is None

    @settings(deadline=None, max_examples=10)
    @given(seed=st.integers(0, 1000), spare_mib=st.integers(0, 60))
    def test_with_little_memory_too(self, seed, spare_mib):
        recording = fragmenting(seed, steps=15).recording()
        min_bytes = tune(recording, seconds=0).live_bytes
        found = tune(recording, capacity_bytes=min_bytes + spare_mib * MIB, seconds=5)
        if found.default.fits:
            chosen, default = found.recommended, found.default
            assert (chosen.alloc_retries, chosen.peak_reserved_bytes) <= (
                default.alloc_retries,
                default.peak_reserved_bytes,
            )
        elif found.recommended is not None:
            assert found.recommended.fits

    @pytest.mark.skipif(not REAL, reason="no recordings beside the checkout")
    @pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
    def test_real_recordings(self, path):
        found = tune(read_recording(path), seconds=2)
        assert found.recommended.peak_reserved_bytes <= found.default.peak_reserved_bytes
        assert found.live_bytes <= found.static.height_bytes <= found.default.peak_reserved_bytes


class TestOtherSizes:
    def test_a_copy_changes_large_sizes_alone_and_equal_ones_alike(self):
        script = Script()
        script.malloc(512 * KIB, 40 * MIB, 40 * MIB, 50 * MIB)
        program = script.program()
        sizes = program.with_other_sizes(3).num_bytes
        assert sizes[0] == 512 * KIB
        assert sizes[1] == sizes[2]
        assert all(
            0.8 * before <= after <= 1.2 * before for before, after in zip(program.num_bytes, sizes, strict=True)
        )
        assert sizes == program.with_other_sizes(3).num_bytes != program.with_other_sizes(4).num_bytes

    def test_what_fits_one_recording_only_does_not_last(self):
        # 30 blocks of 32 MiB lose nothing to rounding, and 33, 37 and 40 MiB then share one segment: 960 + 40 instead of 960 + 112 MiB.
        # With any other size than 32 MiB the 30 blocks are rounded up, which costs more than sharing saves.
        script = Script()
        script.malloc(*[32 * MIB] * 30)
        for size in (33, 37, 40):
            script.free(script.malloc(size * MIB))
        trials = Trials([script.program()], capacity_bytes=None, deadline=math.inf, allows_expandable=True)
        assert trials.try_always("").peak_reserved_bytes == 1072 * MIB
        assert trials.try_always("roundup_power2_divisions:4").peak_reserved_bytes == 1000 * MIB
        trials.try_always("expandable_segments:True")
        assert trials.num_copies_passed("roundup_power2_divisions:4", [""], until=math.inf) is None
        assert trials.num_copies_passed("expandable_segments:True", [""], until=math.inf) == 6
        assert trials.num_copies_passed("expandable_segments:True", [""], until=0.0) == 0
        assert "roundup" not in tune(script.recording(), is_windows=True).recommended.settings


class TestKnownBad:
    @pytest.mark.parametrize(
        ("conf", "word"),
        [
            ("max_split_size_mb:64,expandable_segments:True", "123548"),
            ("expandable_segments:True,garbage_collection_threshold:0.8", "never frees"),
            ("pinned_max_round_threshold_mb:64", "host heap"),
        ],
    )
    def test_it_is_refused_with_its_reason(self, conf, word):
        assert word in known_bad(conf)
        found = tune(growing().recording(), alloc_conf=conf)
        assert any(one.settings == conf and word in one.reason for one in found.refused)
        assert conf != found.recommended.settings

    def test_expandable_segments_are_refused_on_windows_alone(self):
        assert known_bad("expandable_segments:True") is None
        assert "Windows" in known_bad("expandable_segments:True", is_windows=True)
        assert known_bad("expandable_segments:False,max_split_size_mb:64") is None

    def test_a_pair_that_was_recorded_is_never_recommended(self):
        recording = growing().recording()
        bad = dataclasses.replace(recording.settings, expandable_segments=True, max_split_size_bytes=64 * MIB)
        found = tune(dataclasses.replace(recording, settings=bad))
        assert "123548" in found.refused[0].reason
        assert found.recommended.settings == "expandable_segments:True"

    def test_what_torch_does_not_know_stays_an_error(self):
        with pytest.raises(UsageError, match="max_split_size_mb"):
            tune(growing().recording(), alloc_conf="max_split_size:64")


class TestSpelling:
    @given(st.lists(st.sampled_from([0, 1, 2, 4, 8, 64]), min_size=NUM_INTERVALS, max_size=NUM_INTERVALS))
    def test_divisions_are_read_back(self, divisions):
        read = AllocatorSettings.parse(divisions_text(tuple(divisions))).roundup_power2_divisions
        assert [max(count, 1) for count in read] == [max(count, 1) for count in divisions]

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "expandable_segments:True",
            "large_segment_size_mb:64,max_split_size_mb:128,roundup_power2_divisions:4",
            "max_split_size_mb:128,max_non_split_rounding_mb:64,garbage_collection_threshold:0.8",
            "roundup_power2_divisions:[16:1,32:8,64:4],per_process_memory_fraction:0.5",
        ],
    )
    def test_settings_are_spelled_as_they_are_read(self, text):
        assert spelled(AllocatorSettings.parse(text)) == text
        assert joined(text) == text

    def test_lists_are_kept_whole(self):
        assert keys_of("a:[1:2,>:3], b:c") == {"a": "[1:2,>:3]", "b": "c"}

    def test_bad_and_impossible_combinations_are_not_made(self):
        assert joined("expandable_segments:True", "max_split_size_mb:64") is None
        assert joined("large_segment_size_mb:128", "max_split_size_mb:64") is None

    def test_thresholds_separate_the_sizes_asked_for(self):
        assert split_thresholds_mib({5 * MIB: 9, 30 * MIB: 1, 30 * MIB + 1: 2, 100 * MIB: 1}) == [21, 30, 31, 100]
        assert thinned(list(range(100)), 5) == [0, 25, 50, 74, 99]


class TestCommand:
    @pytest.fixture
    def path(self, tmp_path):
        path = tmp_path / "growing.pickle"
        content = {"segments": [], "device_traces": [growing().events], "allocator_settings": {}}
        path.write_bytes(pickle.dumps(content, protocol=4))
        return path

    def test_it_prints_settings_to_paste_and_the_bounds(self, path, capsys):
        assert replay_command(path, tune=True) == 0
        said = capsys.readouterr().out
        assert "Recommended: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in said
        assert (
            "Live at the peak: 60.0 MiB, the lower bound for every setting. The default reserves 120.0 MiB (66.7%) more."
            in said
        )
        assert "would reach 60.0 MiB; no placement is lower." in said

    def test_checks_that_the_time_ended_are_said_to_be_few(self, path, capsys, monkeypatch):
        for number, words in ((2, "Checked on 2 of 6 copies"), (0, "Checked on no copy")):
            monkeypatch.setattr(Trials, "num_copies_passed", lambda *_, **__: number)  # noqa: B023 - called in this turn
            assert replay_command(path, tune=True) == 0
            assert f" {words} with other sizes: time ran out" in capsys.readouterr().out

    def test_a_bad_pair_is_said_to_be_one(self, path, capsys):
        assert replay_command(path, tune=True, alloc_conf="max_split_size_mb:64,expandable_segments:True") == 0
        said = capsys.readouterr().out
        assert "Refused: max_split_size_mb:64,expandable_segments:True (" in said

    def test_the_json_has_one_more_key(self, path, capsys):
        replay_command(path, json=True)
        plain = json.loads(capsys.readouterr().out)
        replay_command(path, json=True, tune=True, alloc_conf="max_split_size_mb:64")
        tuned = json.loads(capsys.readouterr().out)
        found = tuned.pop("tune")
        assert tuned == plain
        assert found.keys() == {
            *("recommended", "reason", "live_bytes", "static", "default", "as_recorded", "given", "rows", "refused"),
            *("capacity_bytes", "trials", "copies_checked", "complete", "elapsed_seconds"),
        }
        assert found["recommended"] == "expandable_segments:True"
        assert found["given"]["settings"] == "max_split_size_mb:64"
        assert found["static"] == {
            "height_bytes": 60 * MIB,
            "bound_bytes": 60 * MIB,
            "is_optimal": True,
            "num_placed": 4,
            "num_blocks": 4,
        }

    def test_the_named_device_alone_is_tuned(self, path, capsys):
        content = {"segments": [], "device_traces": [growing().events] * 2, "allocator_settings": {}}
        path.write_bytes(pickle.dumps(content, protocol=4))
        replay_command(path, json=True, tune=True, device=1)
        found = json.loads(capsys.readouterr().out)
        assert found["tune"]["default"]["peak_reserved_bytes"] == found["peak_reserved_bytes"] == 180 * MIB

    def test_exit_1_where_nothing_fits(self, path, capsys):
        assert replay_command(path, tune=True, memory="50MiB") == 1
        assert "Recommended: none. No setting that was tried makes it fit." in capsys.readouterr().out


def test_small_blocks_do_not_count_as_more_than_they_are():
    # 2,048 blocks of 1 KiB fill one small segment of 2 MiB, and the bound says 2 MiB.
    script = Script()
    script.malloc(*[KIB] * 2048)
    assert script.program().peak_live_bytes() == reserved(script, "") == 2 * MIB
