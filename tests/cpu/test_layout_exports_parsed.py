"""Exported layouts, read by the parsers of Accelerate, torch and YAML that are installed here, and the command that writes them."""

import json
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.exported_layouts import ACCEPTED, accepts, layouts, run_of
from torch.distributed.run import get_args_parser

from tightfit.cli.main import run as tightfit_run
from tightfit.layouts.exports.export_tools import TOOLS
from tightfit.layouts.layout import Layout
from tightfit.units import parse_bytes

HOSTILE = ("my train.py", "a: b'c\"\n- #x", "\U0001f600\x7f\u2028", "no", "1e3")


def test_accelerate_loads_the_file_and_sets_what_the_layout_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils.launch import prepare_multi_gpu_env

    path = tmp_path / "layout.yaml"
    for layout in layouts("accelerate"):
        run = run_of(layout)
        path.write_text(TOOLS["accelerate"].export(run).text)
        args = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
        args, _, _ = _validate_launch_command(args)
        assert (args.num_processes, args.num_machines) == (layout.num_gpus, run.num_nodes)
        assert args.mixed_precision == "bf16"
        is_sharded = layout.zero_stage >= 2 and layout.sharded_over > 1
        assert args.use_fsdp is is_sharded
        if not is_sharded:
            continue
        environment = prepare_multi_gpu_env(args)
        assert environment["FSDP_VERSION"] == "2"
        assert environment["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "Block"
        assert (environment["FSDP_RESHARD_AFTER_FORWARD"] == "true") is (layout.zero_stage == 3)
        assert (environment["FSDP_ACTIVATION_CHECKPOINTING"] == "true") is (layout.num_recomputed > 0)
        if args.use_parallelism_config:
            for name, value in environment.items():
                if name.startswith("PARALLELISM_CONFIG_"):
                    monkeypatch.setenv(name, value)
            mesh = ParallelismConfig()
            assert mesh.total_size == layout.num_gpus
            assert mesh.dp_shard_size * mesh.cp_size == layout.sharded_over
        else:
            assert (layout.cp, layout.num_replicas) == (1, 1)


def test_torchrun_reads_the_line() -> None:
    for layout in (Layout(dp=8, sharded_over=8), Layout(dp=64, sharded_over=64)):
        run = run_of(layout, command=HOSTILE)
        text = TOOLS["torchrun"].export(run).text.replace(" \\\n", " ")
        words = shlex.split(text, comments=True)
        assert words[0] == "torchrun"
        found = get_args_parser().parse_args(words[1:])
        assert (found.nnodes, found.nproc_per_node) in ((str(run.num_nodes), "8"), ("1:1", "8"))
        assert found.standalone is (run.num_nodes == 1)
        assert (found.training_script, *found.training_script_args) == HOSTILE


def members(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, each in value.items() for k, v in members(each, f"{path}.{key}").items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {k: v for each in value for k, v in members(each, path).items()}
    return {path.removeprefix("."): value}


def test_a_pytorch_job_has_the_fields_of_its_schema_and_a_pod_for_each_node() -> None:
    for layout in (Layout(dp=4, sharded_over=4), Layout(dp=64, sharded_over=64)):
        run = run_of(layout, command=HOSTILE)
        job = yaml.safe_load(TOOLS["kubernetes"].export(run).text)
        assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
        for path, value in members(job["spec"], "spec").items():
            key = path.replace(".Master.", ".*.").replace(".Worker.", ".*.")
            assert accepts(ACCEPTED["kubernetes"][key], value), path
        replicas = job["spec"]["pytorchReplicaSpecs"]
        assert sum(each["replicas"] for each in replicas.values()) == run.num_nodes
        for each in replicas.values():
            assert each["template"]["spec"]["containers"][0]["command"] == ["torchrun", *HOSTILE]


SCRIPT = """
import torch
from torch import nn

model = nn.Sequential(nn.Embedding(128, 64), nn.Linear(64, 64), nn.Linear(64, 128)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    tokens = torch.randint(0, 128, (4, 16), device="cuda")
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_command_writes_the_file_of_the_layout_that_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = tmp_path / "train.py", tmp_path / "layout.toml"
    script.write_text(SCRIPT)
    asked = ["plan", str(script), "--device", "H100", "--gpus", "8", "--global-batch", "64", "--export", "torchtitan"]
    assert tightfit_run([*asked, "-o", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert out.read_text() == found["exports"]["torchtitan"]["text"]
    degrees = tomllib.loads(out.read_text())["parallelism"]
    assert degrees["data_parallel_replicate_degree"] * degrees["data_parallel_shard_degree"] == found["layout"]["dp"]
    assert any("torchtitan" in text for text in found["assumptions"])
    assert parse_bytes("1GiB") > max(rank["total_bytes"] for rank in found["ranks"]) > 0


@pytest.mark.parametrize(
    "given", [["--export", "slurm"], ["--gpus", "8", "--export", "horovod"], ["--gpus", "8", "-o", "x.json"]]
)
def test_exports_without_cards_or_of_nothing_are_usage_errors(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert tightfit_run(["plan", str(script), "--device", "H100", *given]) == 2
    assert capsys.readouterr().err.startswith("tightfit: ")
