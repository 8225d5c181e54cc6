"""`tightfit serve`: what a language model needs on a GPU to be served, how many requests that leaves room for, how fast; or which server is best.

Whatever computes is imported when the command runs, so that its `--help` is instant.
"""

import dataclasses
import json as jsonlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from tightfit.cli.arguments.options import CLOSED_IN, SEVERAL, Permissions
from tightfit.cli.arguments.serving_arguments import (
    EngineArguments,
    LoadArguments,
    PlanArguments,
    cards_of,
    level_of,
    load_of,
)
from tightfit.cli.shared.local_cards import own_card
from tightfit.cli.shared.progress import ProgressLine
from tightfit.cli.variants.served_scripts import ServedModel, is_script, served_model
from tightfit.errors import UsageError
from tightfit.output_files import check_outputs, write_text

if TYPE_CHECKING:
    from tightfit.serving.choices.candidate_servers import PricedCard
    from tightfit.serving.choices.serving_plan import ServingPlan
    from tightfit.serving.serve_settings import ResolvedSettings, ServeSettings
    from tightfit.serving.serving_estimate import ServingEstimate

_DEFAULTS = EngineArguments()
_NO_LOAD = LoadArguments()
_NO_PLAN = PlanArguments()


def serve(
    model: str,
    /,
    *script_arguments: Annotated[str, Parameter(show=False)],
    device: Annotated[tuple[str, ...], SEVERAL] = (),
    gpus: int = 1,
    lengths: str | None = None,
    engine: str = "vllm",
    engine_version: str | None = None,
    dtype: str | None = None,
    price_per_hour: Annotated[tuple[str, ...], SEVERAL] = (),
    launch: str | None = None,
    call: int | None = None,
    output: Annotated[Path | None, Parameter(alias="-o")] = None,
    json: bool = False,
    tracing: Permissions = CLOSED_IN,
    arguments: EngineArguments = _DEFAULTS,
    load: LoadArguments = _NO_LOAD,
    plan: PlanArguments = _NO_PLAN,
) -> int:
    """Estimate what a language model needs to be served, for how many requests there is room, and how fast they are.

    Weights, the cache of keys and values, the largest batch that the engine measures when it starts, and its steps.

    Parameters
    ----------
    model
        A Hugging Face config.json, its folder, a preset ("llama-3-8b") or a model type: no weights are needed. Or a script that calls generate of transformers (its own arguments after --), which is traced up to that call.
    device
        A GPU by name ("l4", "4090") or its TOML file; several with --plan. Default: the GPU of this machine.
    gpus
        GPUs that share each layer (tensor parallelism).
    lengths
        Prompt and output tokens of a request, 2000:300, or a .csv of past requests with a column for each. Default: what the script generates, or the longest request that is allowed.
    engine
        vllm, sglang, transformers (generate of a batch), or llama.cpp (its server).
    engine_version
        Version of the engine ("0.8.5"). Default: the newest known one.
    dtype
        Type of the weights: bfloat16 or float16; by default that of the config.
    price_per_hour
        What one GPU costs per hour, 0.8 or L4=0.8, for the cost of a million tokens; repeatable.
    launch
        Only print how to start the server: the command of vllm, sglang, tgi or llama.cpp, or a manifest for kubernetes.
    call
        Which call of generate of a script, 1 if not given.
    output
        A file.html to write: the memory as a bar, the room for requests by their length, the times by the load (with --lengths).
    json
        Print JSON.
    """
    from tightfit.serving.load.lengths import lengths_of
    from tightfit.serving.serve_settings import ServeSettings

    check_outputs({"--output": output}, inputs=(model, *device))
    cards = cards_of(device or [own_card()], gpus, price_per_hour)
    asked = ServeSettings(num_gpus=gpus, **dataclasses.asdict(arguments))
    requests = lengths_of(lengths) if lengths is not None else []
    _refuse_unused_requests(plan)
    if plan.beside and is_script(model):
        raise UsageError("--beside: give the configs of both models; a script is served alone")
    with served_model(
        model,
        script_arguments,
        call,
        tracing,
        device=(device or [own_card()])[0],
        engine=engine,
        dtype=dtype,
        lengths=requests,
        has_arrivals=load.arrivals is not None,
    ) as served:
        names: dict[str, Any] = {"engine": engine, "engine_version": engine_version, "dtype": served.dtype}
        if plan.beside or plan.is_asked:
            others = {"--output": output, "--gpus": gpus > 1}
            return _planned(served, cards, asked, plan, load, names, launch, others, as_json=json)
        return _estimated(served, (device or [own_card()])[0], cards, asked, load, names, launch, output, as_json=json)


def _estimated(
    served: ServedModel,
    device: str,
    cards: "list[PricedCard]",
    asked: "ServeSettings",
    load: LoadArguments,
    names: Mapping[str, Any],
    launch: str | None,
    output: Path | None,
    *,
    as_json: bool,
) -> int:
    """One server on one kind of card."""
    from tightfit.fit.serving import serve as estimated

    started = time.monotonic()
    if len(cards) > 1:
        raise UsageError("several --device: give --plan too, which chooses one of them")
    _refuse_what_nothing_uses(load, [card for card in cards if card.price_per_hour is not None], served.lengths)
    price = cards[0].price_per_hour
    with ProgressLine(f"serve {served.title}", timeout_seconds=None) as line:
        found = estimated(
            served.source,
            device,
            asked=asked,
            lengths=served.lengths,
            load=load_of(load, served.lengths),
            draws=output is not None,
            on_progress=line.report,
            **names,
        )
    found = served.answered(found)
    if output is not None:
        _write_page(output, found, price)
    return _answer_one(found, launch, price, as_json=as_json, started=started)


def _planned(
    served: ServedModel,
    cards: "list[PricedCard]",
    asked: "ServeSettings",
    plan: PlanArguments,
    load: LoadArguments,
    names: Mapping[str, Any],
    launch: str | None,
    others: Mapping[str, object],
    *,
    as_json: bool,
) -> int:
    """The best server, or several on one card; `others` are options, of which --output goes with neither."""
    started = time.monotonic()
    if plan.beside:
        others = {**others, "--plan": plan.is_asked, "--launch": launch, "--rate": load.rate}
        models = [served.source, *plan.beside]
        return _beside(models, cards, asked, plan, served.lengths, names, others, as_json=as_json)
    if others["--output"] is not None:
        raise UsageError("--output shows one server; leave out --plan, --for and --allow")
    chosen = served.answered(_chosen(served, cards, asked, plan, load, names))
    return _answer(chosen, launch, as_json=as_json, started=started)


def _beside(
    models: Sequence[str],
    cards: "list[PricedCard]",
    asked: "ServeSettings",
    plan: PlanArguments,
    lengths: Sequence[tuple[int, int]],
    names: Mapping[str, Any],
    others: Mapping[str, object],
    *,
    as_json: bool,
) -> int:
    """Several models on one card; `others` are options that do not go with that."""
    from tightfit.fit.serving_planning import share_card
    from tightfit.reports.text.shared_cards import write_shared_card
    from tightfit.serving.choices.choosing import Wanted

    refused = [name for name, value in others.items() if value]
    if refused or not lengths or len(cards) > 1 or plan.at_once < 1:
        words = f"leave out {', '.join(refused)}" if refused else "give --lengths and one --device"
        raise UsageError(f"--beside is for several models on one GPU: {words}")
    started = time.monotonic()
    wanted = Wanted(
        objective="memory", lengths=lengths, at_once=plan.at_once, level=level_of(LoadArguments()), load=None
    )
    with ProgressLine(f"serve {' and '.join(models)}", timeout_seconds=None) as line:
        found = share_card(models, cards[0], wanted, asked=asked, on_progress=line.report, **names)
    if as_json:
        print(jsonlib.dumps(found.to_json()))
    else:
        write_shared_card(found, elapsed_seconds=time.monotonic() - started)
    return 0 if found.fits else 1


def _write_page(output: Path, found: "ServingEstimate", price: float | None) -> None:
    from tightfit.reports.html.serving_page import serving_page

    write_text(output, serving_page(found, price_per_hour=price))


def _answer_one(
    found: "ServingEstimate", launch: str | None, price: float | None, *, as_json: bool, started: float
) -> int:
    from tightfit.reports.text.serving_estimates import write_serving

    if launch is not None and found.fits:
        print(_launched(launch, found.launch, found.settings, found.engine_version), end="")
    elif as_json:
        print(jsonlib.dumps(found.to_json(price)))
    else:
        write_serving(found, price_per_hour=price, elapsed_seconds=time.monotonic() - started)
    return 0 if found.fits else 1


def _refuse_unused_requests(plan: PlanArguments) -> None:
    if plan.at_once < 1:
        raise UsageError(f"--at-once {plan.at_once}: at least 1")
    if plan.at_once > 1 and plan.objective != "memory" and not plan.beside:
        raise UsageError("--at-once needs --for memory or --beside: give one of them, or leave it out")


def _refuse_what_nothing_uses(
    load: LoadArguments, prices: Sequence["PricedCard"], lengths: Sequence[tuple[int, int]]
) -> None:
    if prices and not lengths:
        raise UsageError("--price-per-hour: give what a GPU costs per hour, and --lengths")
    if level_of(load).is_set and load.rate is None and load.arrivals is None:
        raise UsageError("--slo-ttft and --slo-tpot: give --rate or --arrivals too")


def _chosen(
    served: ServedModel,
    cards: "list[PricedCard]",
    asked: "ServeSettings",
    plan: PlanArguments,
    load: LoadArguments,
    names: Mapping[str, Any],
) -> "ServingPlan":
    from tightfit.fit.serving_planning import plan_serving
    from tightfit.serving.choices.choosing import OBJECTIVES, Wanted

    objective = next((each for each in OBJECTIVES if each == (plan.objective or "throughput")), None)
    if objective is None:
        raise UsageError(f"--for {plan.objective}: one of {', '.join(OBJECTIVES)}")
    lengths = served.lengths
    asked_load = load_of(load, lengths)
    wanted = Wanted(objective=objective, lengths=lengths, at_once=plan.at_once, level=level_of(load), load=asked_load)
    with ProgressLine(f"serve {served.title}", timeout_seconds=None) as line:
        return plan_serving(
            served.source, cards, wanted, asked=asked, allow=plan.allow, on_progress=line.report, **names
        )


def _answer(chosen: "ServingPlan", launch: str | None, *, as_json: bool, started: float) -> int:
    from tightfit.reports.text.serving_plans import write_serving_plan

    if launch is not None and chosen.fits:
        best = chosen.offers[0].estimate
        print(_launched(launch, chosen.launch, best.settings, best.engine_version), end="")
    elif as_json:
        print(jsonlib.dumps(chosen.to_json()))
    else:
        write_serving_plan(chosen, elapsed_seconds=time.monotonic() - started)
    return 0 if chosen.fits else 1


def _launched(
    launch: str, commands: Mapping[str, Sequence[str]], settings: "ResolvedSettings", engine_version: str
) -> str:
    """What starts the server: a line for a shell, or a manifest."""
    from tightfit.serving.launch.kubernetes import manifest
    from tightfit.serving.launch.launch_arguments import shell_line

    if launch == "kubernetes" and "vllm" in commands:
        command = commands["vllm"]
        image = f"vllm/vllm-openai:v{engine_version}"
        return manifest(command[2], image, command, num_gpus=settings.num_gpus)
    if launch not in commands:
        known = ", ".join([*commands, "kubernetes"]) if commands else "none, as it does not start"
        raise UsageError(f"--launch {launch}: this server can be started by {known}")
    return f"{shell_line(commands[launch])}\n"
