"""The commands and their options, the keys of their JSON, and what goes to which stream. A change here is a change for every user."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tightfit.cli.main import app
from tightfit.tape import Events, Operators, Spans, Storages, Tape

OPTIONS = {
    "estimate": [
        "--alloc-conf",
        "--allow-network",
        "--allow-writes",
        "--attention",
        "--autocast",
        "--batch-size",
        "--calibration",
        "--device",
        "--dtype",
        "--gpus",
        "--gradient-checkpointing",
        "--image-size",
        "--json",
        "--largest-batch",
        "--lora-rank",
        "--margin",
        "--node",
        "--nodes",
        "--optimizer",
        "--parameter",
        "--rank",
        "--redact",
        "--save-recording",
        "--save-tape",
        "--sequence-length",
        "--show-output",
        "--steps",
        "--sweep",
        "--task",
        "--timeout",
        "--used",
        "--until",
        "-p",
    ],
    "plan": [
        *(
            "--alloc-conf",
            "--allow",
            "--allow-network",
            "--allow-writes",
            "--as-code",
            "--attention",
            "--autocast",
            "--batch-size",
            "--budget",
            "--calibration",
        ),
        *(
            "--deadline",
            "--device",
            "--disk",
            "--dtype",
            "--export",
            "--global-batch",
            "--gpus",
            "--gradient-checkpointing",
            "--host",
            "--image-size",
            "--json",
        ),
        *(
            "--ladder",
            "--largest-batch",
            "--lora-rank",
            "--margin",
            "--no-prove",
            "--node",
            "--nodes",
            "--optimizer",
            "--output",
            "--parameter",
            "--price",
            "--redact",
            "--search",
        ),
        *(
            "--sequence-length",
            "--show-output",
            "--steps",
            "--task",
            "--timeout",
            "--total",
            "--until",
            "--used",
            "--without",
            "-o",
            "-p",
        ),
    ],
    "run": [
        *(
            "--allow",
            "--allow-network",
            "--allow-writes",
            "--ballast",
            "--budget",
            "--cache",
            "--check-steps",
            "--device",
        ),
        *(
            "--disk-folder",
            "--fallback",
            "--gpus",
            "--guard",
            "--on",
            "--plan",
            "--post-mortems",
            "--used",
            "--virtual",
        ),
    ],
    "replay": ["--alloc-conf", "--device", "--json", "--memory", "--tune"],
    "record": [
        *(
            "--allow-network",
            "--allow-writes",
            "--device",
            "--host",
            "--max-events",
            "--no-stacks",
            "--output",
            "--parameter",
            "--steps",
            "--timeout",
        ),
        *("-o", "-p"),
    ],
    "techniques": ["--json"],
    "devices": ["--json"],
    "diff": [
        *("--allow-network", "--allow-writes", "--device", "--json", "--largest-batch", "--show-output"),
        *("--steps", "--timeout", "--until"),
    ],
    "doctor": [
        *("--alloc-conf", "--allow-network", "--allow-writes", "--device", "--json", "--largest-batch"),
        *("--parameter", "--redact", "--seconds", "--show-output", "--steps", "--timeout", "--until", "-p"),
    ],
    "report": [
        *("--alloc-conf", "--allow-network", "--allow-writes", "--device", "--format", "--largest-batch"),
        *(
            "--merge",
            "--output",
            "--parameter",
            "--redact",
            "--show-output",
            "--steps",
            "--timeout",
            "--until",
            "-o",
            "-p",
        ),
    ],
    "forecast": ["--capacity", "--horizon", "--job", "--json", "--quantile"],
    "serve": [
        *("--allow", "--arrivals", "--at-once", "--device", "--cache", "--dtype", "--enforce-eager", "--engine"),
        *("--engine-version", "--for", "--gpu-memory-utilization", "--gpus", "--json", "--kv-dtype", "--launch"),
        *("--lengths", "--max-model-len", "--max-num-batched-tokens", "--max-num-seqs", "--plan"),
        *("--price-per-hour", "--quantization", "--rate", "--requests", "--seed", "--slo-tpot", "--slo-ttft"),
        *(
            "--allow-network",
            "--allow-writes",
            "--beside",
            "--call",
            "--draft",
            "--kv-offload",
            "--lora",
            "--output",
            "-o",
        ),
    ],
    "watch": [
        *("--agent", "--alerts", "--bind", "--interval", "--job", "--json", "--once", "--port", "--quantile"),
        *("--simulate", "--store", "--tensorboard", "--token", "--wandb", "--web"),
    ],
    "place": ["--alignment", "--capacity", "--json", "--output", "--seconds", "-o"],
    "calibrate": ["--device", "--disk", "--json", "--output", "--virtual", "-o"],
}
# The keys of the contract, then those that are said besides.
ESTIMATE_KEYS = {
    "schema": None,
    "target": None,
    "device": {"name", "capacity_bytes"},
    "peak": {"allocated_bytes", "reserved_bytes", "device_bytes", "device_low_bytes", "device_high_bytes"},
    "fits": None,
    "margin": None,
    "headroom_bytes": None,
    "at_peak": {
        *("parameters", "gradients", "optimizer_state", "activations", "temporaries", "inputs", "workspace"),
        *("cache", "context"),
    },
    "steps": {"peak_allocated_bytes", "peak_reserved_bytes", "end_allocated_bytes"},
    "host": {"peak_bytes", "pinned_bytes", "pinned_tensor_bytes"},
    "disk": {"peak_bytes"},
    "seconds_per_step": None,
    "idle_seconds_per_step": None,
    "seconds_low_per_step": None,
    "seconds_high_per_step": None,
    "seconds_band": {"cause", "less_seconds", "more_seconds"},
    "input_pipeline": None,
    "tokens_per_second": None,
    "samples_per_second": None,
    "examples_per_second": None,
    "flops_per_step": None,
    "model_flops_per_step": None,
    "model_flops_utilisation": None,
    "versions": None,
    "assumptions": {"where", "what"},
    "coverage": {"left_at", "stopped", "cuts", "last_turn", "last_call", "not_reached"},
    "elapsed_seconds": None,
    "moment": {"span", "phase", "operator", "module", "line"},
    "holders": {"category", "module", "operator", "line", "num_storages", "num_bytes"},
    "spans": {"name", "kind", "peak_allocated_bytes", "peak_reserved_bytes", "end_allocated_bytes"},
    "band": {"cause", "less_bytes", "more_bytes"},
}
DOCTOR_KEYS = {
    *(
        "schema",
        "label",
        "origin",
        "device",
        "capacity_bytes",
        "context_bytes",
        "communicator_bytes",
        "settings",
        "num_events",
        "moment",
    ),
    *("peak_allocated_bytes", "peak_reserved_bytes", "start_reserved_bytes", "at_peak", "holders", "steps", "growth"),
    *(
        "growth_note",
        "leaks",
        "fragmented_at",
        "fragmentation",
        "pinned_by",
        "oom",
        "settings_tried",
        "remedies",
        "assumptions",
    ),
}
DIFF_KEYS = {"schema", "a", "b", "changes", "steps", "partings", "matched_by"}
SIZE_BYTES = 9 << 30


def tightfit(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).with_name("tightfit"))
    return subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


@pytest.fixture(scope="module")
def tape(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run that holds one parameter of 9 GiB in its only step, on disk."""
    path = tmp_path_factory.mktemp("tape") / "run.npz"
    Tape(
        target="train.py",
        versions={"python": "3.11.7", "torch": "2.13.0"},
        traced_for="NVIDIA GeForce RTX 4060",
        strings=("", "step 1", "aten.empty", "net.0", "train.py:3", "float32"),
        operators=Operators.from_columns(
            {key: [0] for key in ("flops", "bytes_read", "bytes_written", "stream", "phase")}
            | {"name": [2], "module": [3], "line": [4], "dtype": [5]}
        ),
        storages=Storages.from_columns(
            {key: [SIZE_BYTES] for key in ("num_bytes", "low_bytes", "high_bytes")}
            | {"category": [0], "source": [0], "operator": [0], "stream": [0]}
        ),
        events=Events.from_columns({"kind": [0], "storage": [0], "operator": [1], "value": [0]}),
        spans=Spans.from_columns({"name": [1], "kind": [1], "begin": [0], "end": [1]}),
        assumptions=(),
        host_peak_bytes=0,
    ).save(path)
    assert np.load(path).files
    return str(path)


def estimate_of(tape: str, *devices: str) -> list[dict[str, Any]]:
    answer = tightfit("estimate", tape, *(word for device in devices for word in ("--device", device)), "--json")
    return [json.loads(line) for line in answer.stdout.splitlines()]


def test_the_commands() -> None:
    commands = [name for name in app if not name.startswith("-")]
    assert sorted(commands) == sorted(OPTIONS)


@pytest.mark.parametrize("command", OPTIONS)
def test_the_options_of_each_command(command: str) -> None:
    answer = tightfit(command, "--help", COLUMNS="200", NO_COLOR="1")
    listed = re.findall(r"^│ (?:\* +|   (?=-))?(.*?)(?:  |$)", answer.stdout, flags=re.MULTILINE)
    options = {word for line in listed for word in re.findall(r"(?<![\w-])--?[a-z][\w-]*", line)}
    # It shows tracebacks, whatever the command.
    assert "--debug" in answer.stdout
    assert sorted(options) == sorted(OPTIONS[command])


def test_the_keys_of_an_estimate(tape: str) -> None:
    (answer,) = estimate_of(tape, "4060")
    assert answer["schema"] == 1
    assert set(answer) == set(ESTIMATE_KEYS)
    for key, inner in ESTIMATE_KEYS.items():
        if inner is not None:
            for entry in answer[key] if isinstance(answer[key], list) else [answer[key]]:
                assert set(entry) == inner
    assert sum(answer["at_peak"].values()) == answer["peak"]["device_bytes"]
    assert answer["headroom_bytes"] == answer["device"]["capacity_bytes"] - answer["peak"]["device_bytes"]


def test_the_keys_of_a_diagnosis_and_of_a_difference(tape: str) -> None:
    diagnosis = json.loads(tightfit("doctor", tape, "--device", "4090", "--json").stdout)
    assert set(diagnosis) == DOCTOR_KEYS
    assert diagnosis["peak_allocated_bytes"] == SIZE_BYTES
    difference = json.loads(tightfit("diff", tape, tape, "--device", "4090", "--json").stdout)
    assert set(difference) == DIFF_KEYS
    assert difference["changes"] == []


def test_several_cards_are_a_line_each_in_the_order_given(tape: str) -> None:
    answers = estimate_of(tape, "4090", "4060", "a100-40gb")
    assert [answer["fits"] for answer in answers] == [True, False, True]
    assert [answer["device"]["name"].split()[-1] for answer in answers] == ["4090", "4060", "A100-SXM4-40GB"]


def test_says_so_where_the_kernels_were_chosen_for_another_card(tape: str) -> None:
    same, other = estimate_of(tape, "4090", "a100-40gb")
    assert same["assumptions"] == []
    assert other["assumptions"][0]["where"] == "NVIDIA A100-SXM4-40GB"
    assert "kernels were chosen for NVIDIA GeForce RTX 4060" in other["assumptions"][0]["what"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["estimate", "TAPE", "--device", "4090"], 0),
        (["estimate", "TAPE", "--device", "4060"], 1),
        (["estimate", "TAPE", "--device", "4090", "--device", "4060"], 1),
        (["estimate", "TAPE", "--device", "no such card"], 2),
        (["estimate", "TAPE", "--no-such-option"], 2),
        (["no-such-command"], 2),
        (["estimate", __file__, "--device", "4090"], 3),
    ],
)
def test_exit_codes(tape: str, arguments: list[str], code: int) -> None:
    answer = tightfit(*(tape if word == "TAPE" else word for word in arguments))
    assert answer.returncode == code
    if code < 2:
        assert answer.stdout
        assert answer.stderr == ""
    else:
        assert answer.stdout == ""
        # On a slow machine there are lines of progress before it.
        said = [line for line in answer.stderr.splitlines() if not re.match(r"tightfit: \d+:\d\d ", line)]
        assert len(said) == 1
        assert said[0].startswith("tightfit: ")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    program = Path(sys.executable).with_name("tightfit")
    answer = subprocess.run(
        f"'{program}' devices --json | head -n 1", shell=True, capture_output=True, text=True, check=True
    )
    assert (answer.stdout, answer.stderr) == ("{\n", "")


def test_text_that_is_piped_has_no_escapes_and_no_more_than_120_columns(tape: str) -> None:
    answer = tightfit("estimate", tape, "--device", "4060")
    assert answer.stdout.startswith("does not fit: 1.40 GiB too much\n")
    assert "\x1b" not in answer.stdout
    assert max(map(len, answer.stdout.splitlines())) <= 120


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_gets_colour_unless_no_color_is_set(tape: str) -> None:
    assert "\x1b[1;31mdoes not fit" in on_a_terminal(tape, TERM="xterm-256color", NO_COLOR="")
    plain = on_a_terminal(tape, TERM="xterm-256color", NO_COLOR="1")
    assert "does not fit" in plain
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", plain)


def on_a_terminal(tape: str, **environment: str) -> str:
    """What the command writes to a terminal."""
    import pty

    ours, theirs = pty.openpty()
    program = str(Path(sys.executable).with_name("tightfit"))
    cleared = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    with subprocess.Popen(
        [program, "estimate", tape, "--device", "4060"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**cleared, **{key: value for key, value in environment.items() if value}},
    ):
        os.close(theirs)
        said = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux: the other end is closed
                break
            if not piece:
                break
            said += piece
    os.close(ours)
    return said.decode()


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_streams_that_the_caller_has_closed_are_nothing(tmp_path: Path, closed: str) -> None:
    """The file that a command opens first has the number of the stream otherwise, and is written into."""
    command = f"{sys.executable} -m tightfit devices 4090 {closed}; echo $? > code; {sys.executable} -m tightfit devices nothing {closed}; echo $? >> code"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (tmp_path / "code").read_text() == "0\n2\n"
    assert ("RTX 4090" in done.stdout) == (not closed.startswith(">"))
    assert done.stderr.count("\n") == ("2>" not in closed)
