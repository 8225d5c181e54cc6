"""Layouts as files of the tools that run them: only what their parsers accept, and the numbers of the layout."""

import dataclasses
import json
import shlex
import shutil
import subprocess
import tomllib
from typing import Any

import pytest
from tests.exported_layouts import ACCEPTED, BLOCKS, MIXED, accepts, layouts, run_of

from tightfit.errors import UsageError
from tightfit.layouts.exports.export_tools import TOOLS, tool_named
from tightfit.layouts.exports.layout_run import num_nodes_of
from tightfit.layouts.exports.text_formats import comments, plain, toml
from tightfit.layouts.exports.tool import with_master_weights
from tightfit.layouts.layout import Layout


def test_torchtitan_gets_its_own_options_and_the_batch_of_the_layout() -> None:
    for layout in layouts("torchtitan"):
        tables = tomllib.loads(TOOLS["torchtitan"].export(run_of(layout)).text)
        for table, values in tables.items():
            assert all(accepts(ACCEPTED["torchtitan"][table][key], value) for key, value in values.items())
        training, degrees = tables["training"], tables["parallelism"]
        ranks = degrees["data_parallel_replicate_degree"] * degrees["data_parallel_shard_degree"]
        assert ranks == layout.dp
        rounds = training["global_batch_size"] // (training["local_batch_size"] * ranks)
        per_call = degrees.get("pipeline_parallel_microbatch_size", training["local_batch_size"])
        assert per_call == layout.micro_batch
        assert rounds * training["local_batch_size"] // per_call == layout.accumulation
        if layout.pp > 1:
            parts = degrees["module_fqns_per_model_part"]
            assert len(parts) == layout.pp * layout.stages_per_rank
            assert [name for part in parts for name in part] == [
                "tok_embeddings",
                *(f"layers.{i}" for i in range(BLOCKS)),
                "norm",
                "output",
            ]


def test_deepspeed_gets_its_own_options_and_the_batch_of_the_layout() -> None:
    for layout in layouts("deepspeed"):
        config = json.loads(TOOLS["deepspeed"].export(run_of(layout)).text)
        assert all(accepts(ACCEPTED["deepspeed"][key], value) for key, value in config.items())
        zero = ACCEPTED["deepspeed"]["zero_optimization_keys"]
        assert all(accepts(zero[key], value) for key, value in config["zero_optimization"].items())
        whole = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * layout.dp
        assert config["train_batch_size"] == whole
        assert config["zero_optimization"]["stage"] == layout.zero_stage


def test_megatron_gets_its_own_arguments_and_stages_with_all_blocks() -> None:
    for layout in layouts("megatron"):
        text = TOOLS["megatron"].export(run_of(layout)).text
        words = shlex.split(text.partition("LAYOUT_ARGS=(")[2].rpartition(")")[0])
        given: dict[str, str] = {}
        while words:
            option = words.pop(0)
            expected = ACCEPTED["megatron"][option]
            given[option] = "" if expected == "flag" else words.pop(0)
            assert expected in ("flag", "str") or (
                given[option] in expected if isinstance(expected, list) else given[option].isdigit()
            )
        data = layout.num_gpus // (layout.tp * layout.pp * layout.cp)
        assert int(given["--global-batch-size"]) == int(given["--micro-batch-size"]) * data * layout.accumulation
        if layout.pp > 1:
            stages = given["--pipeline-model-parallel-layout"].split("|")
            assert len(stages) == layout.pp * layout.stages_per_rank
            assert sum(int(stage.strip("EL").removeprefix("t*")) for stage in stages) == BLOCKS
            assert stages[0][0] == "E" and stages[-1][-1] == "L"
        if layout.num_recomputed:
            each = int(given["--recompute-num-layers"])
            assert each * layout.stages_per_rank == layout.num_recomputed


def test_slurm_starts_a_process_for_each_gpu() -> None:
    for layout in layouts("slurm"):
        run = run_of(layout)
        text = TOOLS["slurm"].export(run).text
        given = dict(
            line.removeprefix("#SBATCH ").partition("=")[::2]
            for line in text.splitlines()
            if line.startswith("#SBATCH ")
        )
        assert all(accepts(ACCEPTED["slurm"][k], int(v) if v.isdigit() else v) for k, v in given.items() if v)
        assert int(given["--nodes"]) * int(given["--gpus-per-node"]) == layout.num_gpus
        assert f"--nproc-per-node={run.gpus_per_node}" in text


@pytest.mark.parametrize("name", ["torchrun", "slurm", "megatron"])
def test_shell_files_are_shell_whatever_the_arguments_are(name: str) -> None:
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("no bash here")
    hostile = ("my train.py", "--name", "a b'c\"$(touch x)`;\n#|&", "\u2028")
    for layout in (Layout(dp=8, zero_stage=1, sharded_over=8), Layout(dp=16, zero_stage=1, sharded_over=16)):
        text = TOOLS[name].export(run_of(layout, command=hostile)).text
        words = "printf '%s\\0' \"${LAYOUT_ARGS[@]}\"\n" if name == "megatron" else ""
        started = text.replace("srun \\\n    torchrun", "torchrun").replace("scontrol", "true").replace("set -eu", "")
        script = "torchrun() { printf '%s\\0' \"$@\"; }\n" + started + words
        out = subprocess.run([shell, "-c", script], capture_output=True, check=True).stdout.decode().split("\0")[:-1]
        assert out[-len(hostile) :] == list(hostile) or name == "megatron"
        assert len(out) > 3


def test_what_a_tool_cannot_run_is_refused_with_the_reason() -> None:
    for name, layout, word in (
        ("torchtitan", Layout(dp=8, zero_stage=1, sharded_over=8), "ZeRO-1"),
        ("torchtitan", Layout(tp=2, zero_stage=0), "mixed precision"),
        ("accelerate", Layout(pp=2, dp=2, sharded_over=2), "pipeline"),
        ("deepspeed", Layout(dp=8, tp=2, sharded_over=8), "tensor"),
        ("deepspeed", Layout(dp=8, sharded_over=4), "all ranks"),
        ("megatron", Layout(dp=8, zero_stage=3, sharded_over=8), "ZeRO-1"),
    ):
        assert word in TOOLS[name].refusal(layout, MIXED)
    with pytest.raises(UsageError, match="no such tool; one of torchtitan"):
        tool_named("horovod")


def test_master_weights_are_eighteen_bytes_of_a_parameter() -> None:
    @dataclasses.dataclass(frozen=True)
    class Model:
        stored_dtype: str
        computed_dtype: str
        stored_per_parameter: float = 1.0
        gathered_per_parameter: float = 0.5
        gradients_per_parameter: float = 1.0
        states_per_parameter: float = 2.0
        reduced_per_gathered: float = 2.0
        has_buckets: bool = True
        early_gradients: float = 0.0

    for stored, width in (("float32", 4), ("bfloat16", 2)):
        found = with_master_weights(Model(stored, "bfloat16"))  # type: ignore[arg-type]
        weight = width * found.stored_per_parameter
        assert weight == 2
        assert weight * (1 + found.gradients_per_parameter + found.states_per_parameter) == 18
    plain_model: Any = Model("float32", "float32")
    # Gradients of either are summed up in buffers of their own, which are reduced in place.
    assert with_master_weights(plain_model) == dataclasses.replace(plain_model, has_buckets=False, early_gradients=1.0)


def test_gpus_are_spread_evenly_over_the_nodes_that_there_are() -> None:
    assert [num_nodes_of(n, 8, 8) for n in (1, 8, 12, 64)] == [1, 1, 2, 8]
    with pytest.raises(UsageError, match="cannot be spread evenly"):
        num_nodes_of(9, 8, 2)


def test_strings_survive_and_comments_stay_comments() -> None:
    odd = "a\nb\x7f\u2028\U0001f600'\"\\"
    assert tomllib.loads(toml({"table": {"key": odd, "list": [odd]}}))["table"] == {"key": odd, "list": [odd]}
    assert json.loads(plain(odd)) == odd
    assert all(line.startswith("#") for line in comments(["rm -rf\nrm\u2028x " * 40]).splitlines())
