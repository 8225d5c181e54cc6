"""The process that traces are forked from begins early, and is the one that the trace then asks."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tightfit.capture.child_process import trace_server
from tightfit.capture.collectives.world import World
from tightfit.capture.processes import fork_server
from tightfit.capture.processes.containment.policy import Policy
from tightfit.capture.targets.huggingface import known_names

# Many traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)


@pytest.mark.parametrize(
    ("target", "names_model"),
    [
        ("gpt2", True),
        ("llama-3.1-8b", True),
        ("folder/config.json", True),
        ("train.py", False),
        ("train.py:workload", False),
        ("package.module", False),
        ("package.module:workload", False),
        ("train", False),
    ],
)
def test_models_are_told_from_programs(
    target: str, *, names_model: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    begun: list[tuple[str, ...]] = []
    monkeypatch.setattr(trace_server, "begin", lambda _, names, *, is_kept: begun.append(names))
    trace_server.begin_for(target, allow_writes=False, allow_network=False)
    assert begun == [trace_server.preloaded(is_huggingface=names_model)]


def test_the_one_that_was_begun_traces_a_rank_of_many_too() -> None:
    policy, rank = Policy(allow_writes=False, allow_network=False), World(num_ranks=8, num_nodes=2, rank=5)
    alone = trace_server.trace_environment(policy, None)
    of_rank = trace_server.trace_environment(policy, dataclasses.asdict(rank))
    changed = {name for name in of_rank if alone.get(name) != of_rank[name]}
    assert {"RANK", "TORCHELASTIC_RUN_ID"} <= changed
    assert not any(map(fork_server._READ_AT_START.match, changed))


def test_a_saved_trace_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(trace_server, "begin", lambda *_, **__: begun.append(""))
    trace_server.begin_for("run.npz", allow_writes=True, allow_network=True)
    assert not begun


_PROGRAM = """
import sys
from tightfit.capture.processes import fork_server
from tightfit.cli.main import run
started = []
made = fork_server._Server.__init__
def note(self, *args, **kwargs):
    started.append("tightfit.fit" in sys.modules)
    made(self, *args, **kwargs)
fork_server._Server.__init__ = note
try:
    run(["estimate", *sys.argv[1:], "--device", "RTX 4090", "--json"])
except SystemExit:
    pass
print(started, file=sys.stderr)
"""


@pytest.mark.parametrize("kind", ["model", "program", "library", "rank"])
def test_one_server_is_begun_before_what_computes_is_imported(tmp_path: Path, kind: str) -> None:
    if not fork_server._IS_SUPPORTED:
        pytest.skip("no forks here")
    arguments = ["gpt2"]
    if kind != "model":
        arguments = [str(tmp_path / "small.py") + ("" if kind == "rank" else ":workload")]
        arguments += ["--gpus", "2"] if kind == "rank" else []
        begin = {"library": "import accelerate\n", "rank": "from accelerate import Accelerator\n"}.get(kind, "")
        (tmp_path / "small.py").write_text(
            begin + "import torch\ndef workload():\n    w = torch.ones(8, device='cuda', requires_grad=True)\n"
            "    while True:\n        w.sum().backward()\n        yield\n"
        )
    found = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments], capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert found.stderr.splitlines()[-1] == "[False]", found.stderr


@pytest.mark.parametrize("name", sorted(known_names.presets()))
def test_the_code_of_each_preset_is_imported_before_forks(name: str) -> None:
    (module,) = known_names.modules_of(name)
    assert importlib.util.find_spec(module) is not None


def test_the_code_of_a_config_is_imported_before_forks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "xlm-roberta"}')
    assert known_names.modules_of(str(tmp_path)) == ("transformers.models.xlm_roberta.modeling_xlm_roberta",)
    (tmp_path / "config.json").write_text("[]")
    assert known_names.modules_of(str(tmp_path)) == ()


def test_code_that_may_ask_for_a_card_is_imported_by_each_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mamba_ssm.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert known_names.modules_of("gpt2") == ()
