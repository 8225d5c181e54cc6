"""`tightfit report`: what it reads, what it writes and where, and what it refuses."""

import json
from pathlib import Path

import pytest
from tests.null.history_runs import FORWARD, Recorder, tape_of
from tests.plans import a_plan

from tightfit.cli.main import run

KEYS = {
    *("schema", "label", "origin", "device", "capacity_bytes", "context_bytes", "num_events", "peak_event", "settings"),
    *("peak_time_us", "peak_span", "peak_line", "peak_function", "peak_module", "peak_allocated_bytes", "versions"),
    *("peak_reserved_bytes", "reserved_at_peak_bytes", "requested_at_peak_bytes", "at_peak", "spans", "cards"),
    *("assumptions", "places", "not_seen", "step", "communicator_bytes"),
}
SPAN_KEYS = {"name", "kind", "begin", "end", "peak_event", "peak_allocated_bytes", "peak_reserved_bytes"}
PLACE_KEYS = {"category", "module", "line", "function", "peak_bytes", "num_at_peak", "largest_bytes", "total_bytes"}
CARD_KEYS = {"device", "capacity_bytes", "device_bytes", "device_low_bytes", "device_high_bytes", "seconds_per_step"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    tape_of([1 << 30, 2 << 30], [0, 1, -2, -1]).save("run.npz")
    recorder = Recorder()
    recorder.free(recorder.malloc(3 << 20, FORWARD), recorder.malloc(1 << 30, FORWARD))
    recorder.save(Path("run.pickle"))


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    assert run(arguments) == code
    answer = capsys.readouterr()
    return answer.out, answer.err


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    return json.loads(said(capsys, "report", *arguments, "--format", "json")[0])


class TestWhatItWrites:
    @pytest.mark.parametrize("target", ["run.npz", "run.pickle"])
    def test_a_page_beside_us_and_says_so(self, capsys: pytest.CaptureFixture[str], target: str) -> None:
        out, err = said(capsys, "report", target)
        assert out == ""
        assert err.startswith("wrote run.html (")
        assert err.endswith(" KiB)\n")
        assert Path("run.html").read_text().startswith("<!doctype html>")
        assert said(capsys, "report", target)[1].startswith("replaced run.html (")
        assert not list(Path().glob("*.partial"))

    def test_where_it_is_told(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert said(capsys, "report", "run.pickle", "-o", "x.htm")[1].startswith("wrote x.htm (")
        said(capsys, "report", "run.npz", "--format", "json", "-o", "x.json")
        assert set(json.loads(Path("x.json").read_text())) == KEYS

    @pytest.mark.parametrize("form", ["html", "json", "text", "perfetto"])
    @pytest.mark.parametrize("target", ["run.npz", "run.pickle"])
    def test_redacted_it_names_no_home_folder(self, target: str, form: str) -> None:
        home = "/home/jane"
        tape_of([1 << 30], [0], lines=[f"{home}/train.py:7"]).save("run.npz")
        recorder = Recorder()
        recorder.malloc(3 << 20, tuple(frame.replace("model.py", f"{home}/model.py") for frame in FORWARD))
        recorder.save(Path("run.pickle"))
        for options, named in (((), form != "text" or target == "run.npz"), (("--redact",), False)):
            assert run(["report", target, "--format", form, *options, "-o", "out"]) == 0
            assert (home in Path("out").read_text()) is named

    def test_tracks_for_perfetto(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert said(capsys, "report", "run.pickle", "--format", "perfetto")[1].startswith("wrote run.perfetto.json (")
        events = json.loads(Path("run.perfetto.json").read_text())["traceEvents"]
        assert max(e["args"]["allocated"] for e in events if e["name"] == "bytes") == (1 << 30) + (3 << 20)

    def test_text_is_what_estimate_and_replay_say(self, capsys: pytest.CaptureFixture[str]) -> None:
        out, _ = said(capsys, "report", "run.npz", "--format", "text")
        assert out.startswith("fits: ")
        assert "peak allocated" in said(capsys, "report", "run.pickle", "--format", "text")[0]
        two = said(capsys, "report", "run.npz", "--format", "text", "--device", "4090", "--device", "4060")[0]
        assert "RTX 4060" in two


class TestTheJson:
    @pytest.mark.parametrize("target", ["run.npz", "run.pickle"])
    def test_has_its_keys(self, capsys: pytest.CaptureFixture[str], target: str) -> None:
        answer = json_of(capsys, target)
        assert answer["schema"] == 1
        assert set(answer) == KEYS
        assert all(set(card) == CARD_KEYS | {"fits"} for card in answer["cards"])
        assert all(set(span) == SPAN_KEYS | {"end_allocated_bytes"} for span in answer["spans"])
        assert all(set(place) == PLACE_KEYS | {"num_in_total"} for place in answer["places"])
        assert sum(answer["at_peak"].values()) == answer["peak_reserved_bytes"]

    def test_of_an_estimate_agrees_with_estimate(self, capsys: pytest.CaptureFixture[str]) -> None:
        estimate = json.loads(said(capsys, "estimate", "run.npz", "--device", "4090", "--json")[0])
        answer = json_of(capsys, "run.npz", "--device", "4090")
        assert answer["peak_reserved_bytes"] == estimate["peak"]["reserved_bytes"]
        assert answer["peak_allocated_bytes"] == estimate["peak"]["allocated_bytes"]
        assert answer["cards"][0]["device_bytes"] == estimate["peak"]["device_bytes"]

    def test_of_a_recording_agrees_with_replay(self, capsys: pytest.CaptureFixture[str]) -> None:
        replay = json.loads(said(capsys, "replay", "run.pickle", "--json")[0])
        answer = json_of(capsys, "run.pickle")
        assert answer["peak_reserved_bytes"] == replay["peak_reserved_bytes"]
        assert answer["peak_allocated_bytes"] == replay["peak_allocated_bytes"]
        assert answer["places"][0]["line"] == "model.py:7"

    def test_of_a_recording_with_other_settings(self, capsys: pytest.CaptureFixture[str]) -> None:
        conf = ("--alloc-conf", "expandable_segments:True")
        replay = json.loads(said(capsys, "replay", "run.pickle", "--json", *conf)[0])
        answer = json_of(capsys, "run.pickle", *conf)
        assert answer["peak_reserved_bytes"] == replay["peak_reserved_bytes"]
        assert answer["settings"] == "expandable_segments True"

    def test_compares_the_cards_that_are_named_or_common_ones(self, capsys: pytest.CaptureFixture[str]) -> None:
        two = json_of(capsys, "run.npz", "--device", "4060", "--device", "a100-40gb")["cards"]
        assert [card["device"].split()[-1] for card in two] == ["4060", "A100-SXM4-40GB"]
        one = json_of(capsys, "run.npz", "--device", "T4")["cards"]
        assert one[0]["device"] == "Tesla T4"
        assert len(one) > 5
        common = json_of(capsys, "run.pickle")["cards"]
        assert [card["capacity_bytes"] for card in common] == sorted(card["capacity_bytes"] for card in common)


class TestWhatItRefuses:
    @pytest.mark.parametrize(
        ("arguments", "code", "words"),
        [
            (["run.pickle", "--merge", "p.json"], 2, "--merge needs --format perfetto"),
            (["run.npz", "--format", "perfetto", "--merge", "p.json"], 2, "a prediction has no timestamps to merge by"),
            (["run.pickle", "--format", "perfetto", "--merge", "none.json"], 3, "none.json is not a trace"),
            (["run.pickle", "-p", "x=1"], 2, "run.pickle is a finished run"),
            (["run.npz", "--", "--epochs", "1"], 2, "run.npz is a finished run"),
            (["run.npz", "--steps", "9"], 2, "it takes no --steps"),
            (["run.pickle", "--until", "5", "--timeout", "3"], 2, "it takes no --until, --timeout"),
            (["none.npz"], 2, "there is no file none.npz"),
            (["run.npz", "-o", "no/such/x.html"], 2, "there is no folder no/such"),
            (["run.npz", "--device", "no such card"], 2, "no GPU is called 'no such card'"),
        ],
    )
    def test_in_one_line(self, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str) -> None:
        out, err = said(capsys, "report", *arguments, code=code)
        assert out == ""
        assert words in err
        assert err.count("\n") == 1
        assert not Path("run.html").exists()

    def test_says_so_where_a_profile_is_of_another_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        Path("p.json").write_text('{"traceEvents": [{"ph": "X", "ts": 5e15, "dur": 1}]}')
        _, err = said(capsys, "report", "run.pickle", "--format", "perfetto", "--merge", "p.json")
        assert "p.json and run.pickle do not overlap in time" in err


def test_a_plan_is_known_by_its_content() -> None:
    a_plan().save("mine.plan")
    assert run(["report", "mine.plan", "-o", "mine.html"]) == 0
    assert "Techniques applied" in Path("mine.html").read_text()
