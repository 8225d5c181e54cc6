"""Alerts: rules from a file, episodes that are told once, and channels that never hold the agent up."""

import dataclasses
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.watch.machines import Bench, ScriptedSource, bench
from tests.watch.states import machine

from tightfit.errors import UsageError
from tightfit.units import GIB, MIB
from tightfit.watch.agent.agent import AgentSettings
from tightfit.watch.alerts.alert_rules import DEFAULT, AlertSettings, Rule, read_alerts
from tightfit.watch.alerts.episodes import Episodes, Notice
from tightfit.watch.alerts.notify import Command, LogFile, Webhook
from tightfit.watch.background import Background
from tightfit.watch.machine.machine_state import Episode
from tightfit.watch.outlook.planner import OutlookSettings
from tightfit.watch.store.stored_state import stored_state

FULL = Rule(name="full", kind="threshold", above_share=0.95, for_seconds=10.0)
NOTICE = Notice(
    event="fired",
    host="node-1",
    episode=Episode(rule="full", subject="GPU 0", message="79.0 GiB used", fired_at=5.0, resolved_at=None),
)


def settings(tmp_path: Path, *rules: Rule, share: float = 0.0) -> AgentSettings:
    return AgentSettings(
        outlooks=OutlookSettings(share=share), alerts=AlertSettings(rules=rules, log=tmp_path / "alerts.jsonl")
    )


def told(found: Bench) -> list[tuple[str, str, str]]:
    """What the log has, once the agent has ended."""
    found.agent.close()
    path = found.database.parent / "alerts.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(line["event"], line["rule"], line["subject"]) for line in lines]


class TestEpisodes:
    def test_one_is_told_once_when_it_begins_and_once_when_it_is_over(self, tmp_path: Path) -> None:
        source = ScriptedSource({1: 10 * GIB})
        found = bench(tmp_path, source, settings(tmp_path, FULL))
        for used, seconds in ((10, 30), (79, 5), (10, 30), (79, 100), (10, 5), (79, 30), (10, 60), (79, 60)):
            source.used[1] = used * GIB
            found.ticks(seconds)
        # Five seconds above fire nothing, and five seconds below end nothing.
        assert told(found) == [
            ("fired", "full", "GPU 0"),
            ("resolved", "full", "GPU 0"),
            ("fired", "full", "GPU 0"),
        ]

    def test_it_is_shown_stored_and_goes_on_after_a_restart(self, tmp_path: Path) -> None:
        source = ScriptedSource({1: 79 * GIB})
        first = bench(tmp_path, source, settings(tmp_path, FULL))
        first.ticks(20)
        state = first.agent.state()
        assert state is not None
        assert [each.message for each in state.episodes] == ["79.00 GiB of 80.00 GiB used"]
        assert stored_state(first.database).episodes == state.episodes
        second = bench(tmp_path, source, settings(tmp_path, FULL))
        second.clock.now = first.clock.now
        second.ticks(20)
        source.used[1] = GIB
        second.ticks(20)
        first.agent.close()
        assert told(second) == [("fired", "full", "GPU 0"), ("resolved", "full", "GPU 0")]
        assert stored_state(second.database).episodes[0].resolved_at is not None

    def test_while_the_driver_is_away_nobody_knows(self, tmp_path: Path) -> None:
        source = ScriptedSource({1: 79 * GIB})
        driver = Rule(name="driver", kind="driver", for_seconds=30.0)
        found = bench(tmp_path, source, settings(tmp_path, FULL, driver))
        found.ticks(20)
        source.is_lost = True
        found.ticks(100)
        source.is_lost = False
        found.ticks(80)
        assert told(found) == [
            ("fired", "full", "GPU 0"),
            ("fired", "driver", "scripted"),
            ("resolved", "driver", "scripted"),
        ]

    def test_a_rule_that_is_gone_ends_its_episodes(self) -> None:
        old = Episode(rule="of before", subject="GPU 0", message="", fired_at=1.0, resolved_at=None)
        found = Episodes((FULL,), [old])
        (notice,) = found.look(machine(), {}, 10.0, 10.0)
        assert (notice.event, notice.episode.resolved_at) == ("resolved", 10.0)

    def test_processes_by_size_user_command_and_card(self, tmp_path: Path) -> None:
        rule = Rule(
            name="large",
            kind="threshold",
            of="process",
            above_bytes=20 * GIB,
            for_seconds=0.0,
            filters={"user": "ada", "command": "eval", "gpu": 0},
        )
        source = ScriptedSource({1: 30 * GIB, 2: 25 * GIB, 3: GIB})
        source.commands = {1: "python eval.py", 2: "python train.py", 3: "python eval.py"}
        found = bench(tmp_path, source, settings(tmp_path, rule))
        found.ticks(2)
        del source.used[1]
        found.ticks(2)
        subject = "process 1 (ada, GPU 0): python eval.py"
        assert told(found) == [("fired", "large", subject), ("resolved", "large", subject)]

    def test_a_leak_is_told_before_the_card_is_full(self, tmp_path: Path) -> None:
        """A process that grows by a GiB every four minutes beside one of 50 GiB: growth is seen first, the full card half an hour ahead."""
        rules = (
            Rule(name="leak", kind="growth", of="process", above_bytes=GIB, for_seconds=0.0),
            Rule(name="soon", kind="forecast", above_share=1.0, within_seconds=1800.0, for_seconds=0.0),
        )
        source = ScriptedSource({1: 50 * GIB, 2: 5 * GIB})
        found = bench(tmp_path, source, settings(tmp_path, *rules, share=1e9))
        fired: dict[str, int] = {}
        for minute in range(85):
            source.used[2] = 5 * GIB + minute * 256 * MIB
            found.ticks(1, seconds=60.0)
            for episode in found.agent.state().episodes:  # type: ignore[union-attr]
                fired.setdefault(episode.rule, minute)
        # The card is full after 100 minutes.
        assert fired["leak"] <= 30
        assert 69 <= fired["soon"] <= 75
        assert ("fired", "leak", "process 2 (ada, GPU 0): python train.py") in told(found)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "alerts.toml"
    path.write_text(
        """
        [[rule]]
        name = "card almost full"
        kind = "threshold"
        above = "95%"
        for = "2min"

        [[rule]]
        name = "soon full"
        kind = "forecast"
        within = "30min"
        gpu = 0

        [[rule]]
        name = "leak"
        kind = "growth"
        of = "process"
        above = "1GiB"
        user = "ada"

        [[rule]]
        name = "driver"
        kind = "driver"
        for = "0s"

        [log]
        file = "/tmp/alerts.jsonl"

        [webhook]
        url = "https://alerts.example/hook"
        headers = { Authorization = "Bearer x" }

        [command]
        arguments = ["logger", "-t", "gpu", "{subject}: {message}"]
        """
    )
    return path


class TestFiles:
    def test_rules_and_channels_are_read(self, file: Path) -> None:
        found = read_alerts(file)
        assert [(rule.name, rule.kind, rule.of) for rule in found.rules] == [
            ("card almost full", "threshold", "card"),
            ("soon full", "forecast", "card"),
            ("leak", "growth", "process"),
            ("driver", "driver", "card"),
        ]
        assert (found.rules[0].above_share, found.rules[0].for_seconds) == (pytest.approx(0.95), 120.0)
        assert (found.rules[1].above_share, found.rules[1].within_seconds, found.rules[1].filters) == (
            1.0,
            1800.0,
            {"gpu": 0},
        )
        assert found.rules[2].above_bytes == GIB
        assert found.command[0] == "logger"
        assert found.webhook_headers == {"Authorization": "Bearer x"}

    @pytest.mark.parametrize(
        ("old", "new", "words"),
        [
            ('kind = "threshold"', 'kind = "treshold"', "rule 'card almost full': kind"),
            ('above = "95%"', "", "rule 'card almost full': above"),
            ('above = "95%"', "above = 95", "above is a text"),
            ('above = "95%"', 'above = "much"', "rule 'card almost full': above: 'much' is not a size"),
            ('for = "2min"', 'for = "2"', "for is a time"),
            ('for = "2min"', 'fro = "2min"', "rule 1: fro is not known"),
            ('for = "2min"', 'within = "2min"', "within is for kind forecast"),
            ('within = "30min"', 'of = "process"', "of = 'process'"),
            ("gpu = 0", 'gpu = "0"', "gpu is a number"),
            ("gpu = 0", 'user = "ada"', "user is for rules of processes"),
            ('name = "leak"', 'name = "driver"', "two rules have the same name"),
            ('name = "leak"', "", "rule 3: name is missing"),
            ('url = "https://alerts.example/hook"', 'url = "file:///etc/passwd"', "http://"),
            ('["logger", "-t", "gpu", "{subject}: {message}"]', '"logger -t gpu"', "there is no shell"),
            ("[log]", "[logs]", "the file: logs is not known"),
            ("[[rule]]", "[rule", "alerts.toml"),
            ('kind = "driver"', 'kind = "driver"\nabove = "1GiB"', "does not take"),
        ],
    )
    def test_what_is_wrong_is_said_with_its_place(self, file: Path, old: str, new: str, words: str) -> None:
        file.write_text(file.read_text().replace(old, new))
        with pytest.raises(UsageError) as error:
            read_alerts(file)
        assert words in str(error.value)
        assert str(file) in str(error.value)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="there is no file"):
            read_alerts(tmp_path / "none.toml")

    def test_without_a_file_there_are_rules_too(self) -> None:
        assert {rule.kind for rule in DEFAULT.rules} == {"threshold", "forecast", "driver"}


@contextmanager
def receiver(statuses: list[int]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A web server that answers with these statuses, one after the other, and keeps what it is sent."""
    received: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append({"path": self.path, "token": self.headers["Authorization"], **body})
            self.send_response(statuses[min(len(received), len(statuses)) - 1])
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/hook", received
        finally:
            server.shutdown()
            thread.join()


class TestChannels:
    def test_a_webhook_gets_json(self) -> None:
        with receiver([200]) as (url, received):
            Webhook(url, {"Authorization": "Bearer x"})(NOTICE)
        assert received == [
            {
                **{"path": "/hook", "token": "Bearer x", "schema": 1, "event": "fired", "host": "node-1"},
                **dataclasses.asdict(NOTICE.episode),
            }
        ]

    @pytest.mark.parametrize(
        ("statuses", "num_attempts", "words"),
        [
            ([503, 500, 200], 3, None),
            ([503], 4, "HTTP 503"),
            ([404], 1, "HTTP 404"),
            ([302], 1, "HTTP 302"),
            ([429, 204], 2, None),
        ],
    )
    def test_it_is_tried_again_where_that_may_help(
        self, statuses: list[int], num_attempts: int, words: str | None
    ) -> None:
        with receiver(statuses) as (url, received):
            hook = Webhook(url, {}, pauses=(0.0, 0.0, 0.0))
            if words is None:
                hook(NOTICE)
            else:
                with pytest.raises(OSError, match=words):
                    hook(NOTICE)
        assert len(received) == num_attempts
        assert {each["path"] for each in received} == {"/hook"}

    def test_nobody_at_the_other_end(self) -> None:
        with pytest.raises(OSError, match="refused"):
            Webhook("http://127.0.0.1:9/", {}, pauses=())(NOTICE)

    def test_a_command_gets_words_and_json_and_no_shell(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        code = "import sys; open(sys.argv[1], 'w').write('|'.join(sys.argv[2:]) + '|' + sys.stdin.read())"
        hostile = "$(touch /tmp/owned) {rule} `id`; {"
        notice = dataclasses.replace(NOTICE, episode=dataclasses.replace(NOTICE.episode, message=hostile))
        Command((sys.executable, "-c", code, str(out), "{event}", "{subject}: {message}", "{nothing}", "{"))(notice)
        first, second, third, fourth, sent = out.read_text().split("|")
        assert (first, second, third, fourth) == ("fired", f"GPU 0: {hostile}", "{nothing}", "{")
        assert json.loads(sent)["message"] == hostile

    def test_a_command_that_fails_or_does_not_end(self) -> None:
        with pytest.raises(OSError, match="ended with 3"):
            Command((sys.executable, "-c", "raise SystemExit(3)"))(NOTICE)
        with pytest.raises(OSError, match="No such file"):
            Command(("/no/such/program",))(NOTICE)
        begin = time.monotonic()
        with pytest.raises(OSError, match="was killed after 0 s"):
            Command((sys.executable, "-c", "import time; time.sleep(600)"), seconds=0.3)(NOTICE)
        assert time.monotonic() - begin < 60

    def test_a_log_that_cannot_be_written_is_said_by_the_agent(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="directory"):
            LogFile(tmp_path)(NOTICE)
        rules = AlertSettings(rules=(dataclasses.replace(FULL, for_seconds=0.0),), log=tmp_path)
        found = bench(
            tmp_path / "store",
            ScriptedSource({1: 79 * GIB}),
            AgentSettings(outlooks=OutlookSettings(share=0.0), alerts=rules),
        )
        deadline = time.monotonic() + 60
        while not found.agent.state() or not found.agent.state().notes:  # type: ignore[union-attr]
            assert time.monotonic() < deadline
            found.ticks(1)
        assert "alert log" in found.agent.state().notes[0]  # type: ignore[union-attr]
        found.agent.close()

    def test_a_channel_goes_on_after_an_error_of_any_class(self) -> None:
        seen = []

        def handle(item: int) -> None:
            if item == 0:
                raise RuntimeError("no such run")
            seen.append(item)

        channel = Background("a tool", handle, max_waiting=10)
        channel.put(0)
        deadline = time.monotonic() + 60
        while not channel.trouble:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert channel.trouble == "a tool: no such run"
        channel.put(1)
        channel.close()
        assert (seen, channel.trouble) == ([1], "")

    def test_a_channel_that_hangs_holds_nobody_up_and_keeps_the_newest(self) -> None:
        going, seen = threading.Event(), []

        def handle(item: int) -> None:
            going.wait(60)
            seen.append(item)

        channel = Background("slow", handle, max_waiting=10)
        for item in range(1000):
            channel.put(item)
        going.set()
        channel.close()
        assert seen[-1] == 999
        assert len(seen) + channel.num_dropped == 1000
        assert channel.num_dropped >= 988
