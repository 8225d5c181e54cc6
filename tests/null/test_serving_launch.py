"""What starts a server: every argument is one of the engine's own options, with a value that it takes."""

import dataclasses
import shlex
from typing import Any

import pytest

from tightfit.cli.arguments.serving_arguments import cards_of
from tightfit.errors import UsageError
from tightfit.serving.launch.kubernetes import manifest
from tightfit.serving.launch.launch_arguments import (
    ENGINES,
    Launch,
    all_launches,
    commands,
    launch_arguments,
    shell_line,
)
from tightfit.serving.model.weight_formats import all_formats
from tightfit.serving.serve_settings import KV_DTYPES, ResolvedSettings

SETTINGS = ResolvedSettings(
    num_gpus=2,
    kv_dtype="auto",
    max_model_len=8192,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    gpu_memory_utilization=0.9,
    enforce_eager=False,
    is_chunked=True,
)
LAUNCH = Launch(
    model="some/model",
    dtype="bfloat16",
    settings=SETTINGS,
    quantization=None,
    static_share=0.8125,
    kv_tokens=123_456,
)


def check(engine: str, arguments: list[str]) -> dict[str, Any]:
    """The options of a command and their values; each is known to the engine's parser."""
    of = commands()[engine]
    assert arguments[: len(of["command"]) + 1] == [*of["command"], LAUNCH.model]
    given = arguments[len(of["command"]) + 1 :]
    found: dict[str, Any] = {}
    while given:
        option = given.pop(0)
        kind = of["known"][option]
        if kind == "flag":
            found[option] = True
            continue
        value = given.pop(0)
        if kind == "whole":
            assert int(value) > 0
        elif kind == "number":
            assert 0 < float(value) <= 1
        elif kind != "text":
            assert value in kind, (option, value)
        found[option] = value
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("quantization", [None, *all_formats()])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_every_argument_is_one_that_the_engine_knows(
    engine: str, quantization: str | None, kv_dtype: str, enforce_eager: bool
) -> None:
    settings = dataclasses.replace(SETTINGS, kv_dtype=kv_dtype, enforce_eager=enforce_eager)
    launch = dataclasses.replace(LAUNCH, settings=settings, quantization=quantization)
    of = commands()[engine]
    is_served = (quantization is None or quantization in of["weights"]) and kv_dtype in of["cache"]
    if not is_served:
        with pytest.raises(UsageError, match=f"{engine} serves no"):
            launch_arguments(engine, launch)
        assert engine not in all_launches(launch)
        return
    check(engine, launch_arguments(engine, launch))


def test_options_say_what_the_settings_are() -> None:
    found = {engine: check(engine, arguments) for engine, arguments in all_launches(LAUNCH).items()}
    assert found["vllm"]["--tensor-parallel-size"] == "2"
    assert found["vllm"]["--gpu-memory-utilization"] == "0.9"
    # SGLang counts weights and cache alone.
    assert found["sglang"]["--mem-fraction-static"] == "0.8125"
    assert found["tgi"]["--max-input-tokens"] == "8191"
    # TGI computes prompts whole.
    assert found["tgi"]["--max-batch-prefill-tokens"] == "8192"
    assert "--kv-cache-dtype" not in found["tgi"]
    eager = dataclasses.replace(LAUNCH, settings=dataclasses.replace(SETTINGS, enforce_eager=True))
    assert check("sglang", launch_arguments("sglang", eager))["--disable-cuda-graph"] is True
    assert check("tgi", launch_arguments("tgi", eager))["--cuda-graphs"] == "0"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_engines_own_parser_takes_them(engine: str) -> None:
    if engine == "vllm":
        parser = pytest.importorskip("vllm.utils.argparse_utils").FlexibleArgumentParser()
        pytest.importorskip("vllm.engine.arg_utils").EngineArgs.add_cli_args(parser)
        parser.parse_args(launch_arguments(engine, LAUNCH)[3:])
    else:
        arguments = pytest.importorskip("sglang.srt.server_args")
        arguments.prepare_server_args(launch_arguments(engine, LAUNCH)[3:])


def test_a_line_for_a_shell_reads_back_as_the_arguments() -> None:
    arguments = launch_arguments("vllm", dataclasses.replace(LAUNCH, model="my model/with $names"))
    assert shlex.split(shell_line(arguments)) == arguments


def test_a_manifest_runs_the_command_with_its_gpus() -> None:
    yaml = pytest.importorskip("yaml")
    arguments = launch_arguments("vllm", LAUNCH)
    deployment, service = yaml.safe_load_all(
        manifest("Some/Model_8B", "vllm/vllm-openai:v0.21.0", arguments, num_gpus=2)
    )
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["command"] == [*arguments, "--port", "8000"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert deployment["metadata"]["name"] == service["metadata"]["name"] == "some-model-8b"
    other = list(yaml.safe_load_all(manifest("01-ai/Yi-6B", "image", arguments, num_gpus=1)))[1]
    assert other["metadata"]["name"] == "model-01-ai-yi-6b"
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["containerPort"]


def test_cards_have_their_own_price_or_that_of_all() -> None:
    cards = cards_of(["L4", "H100"], 4, ["2", "L4=0.8"])
    assert [(card.device.name, card.price_per_hour) for card in cards] == [
        ("NVIDIA L4", 0.8),
        ("NVIDIA H100 80GB HBM3", 2.0),
    ]
    for wrong in ("free", "-1", "L4=", "inf", "nan"):
        with pytest.raises(UsageError, match="--price-per-hour"):
            cards_of(["L4"], 1, [wrong])
