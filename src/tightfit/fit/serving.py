"""`serve`: the wiring from a Hugging Face config to the estimate of a server that runs it."""

import dataclasses
from collections.abc import Sequence

from tightfit.devices.catalogue import find
from tightfit.devices.device import Device
from tightfit.errors import UsageError
from tightfit.errors.faults import answering
from tightfit.fit.batch_serving import serve_batch
from tightfit.fit.planning_progress import OnProgress
from tightfit.fit.traced_models import positions_in_config, served_name, traced_model
from tightfit.serving.batches.batch_rules import BATCH_ENGINES
from tightfit.serving.engine_rules import EngineRules, rules_of
from tightfit.serving.launch.launch_arguments import all_launches, launch_of
from tightfit.serving.load.arrivals import limit_words, served_lengths
from tightfit.serving.model.adapters import AdapterSlots, with_draft
from tightfit.serving.model.checkpoint_format import checkpoint_format
from tightfit.serving.model.weight_formats import format_named
from tightfit.serving.serve_settings import ResolvedSettings, ServeSettings
from tightfit.serving.serving_curves import serving_curves
from tightfit.serving.serving_estimate import ServingEstimate
from tightfit.serving.traced_server import AskedLoad, Server, TracedModel
from tightfit.units import parse


@answering("the estimate of serving")
def serve(
    model: str,
    device: str,
    *,
    asked: ServeSettings | None = None,
    engine: str = "vllm",
    engine_version: str | None = None,
    dtype: str | None = None,
    lengths: Sequence[tuple[int, int]] = (),
    load: AskedLoad | None = None,
    draws: bool = False,
    on_progress: OnProgress | None = None,
) -> ServingEstimate:
    """What `model` (a Hugging Face config, its folder, a preset or a model type) needs on `device` to be served, and how fast it is for requests with
    `lengths` (tokens of prompt and answer of each; by default those of `load`), and under `load`; `draws`: with the points of its curves.

    Raises:
        UsageError: no such model, device, engine or setting, or one whose size is not known.
        CaptureError: the model could not be run.
    """
    asked = asked or ServeSettings()
    if engine in BATCH_ENGINES:
        if load is not None:
            raise UsageError(f"--rate and --arrivals: {engine} has no queue that is simulated; vllm has")
        if asked.lora or asked.draft or asked.kv_offload:
            raise UsageError(f"--lora, --draft and --kv-offload are of --engine vllm, and not of {engine}")
        return serve_batch(
            model,
            device,
            asked=asked,
            engine=engine,
            engine_version=engine_version,
            dtype=dtype,
            lengths=lengths,
            draws=draws,
            on_progress=on_progress,
        )
    _refuse_of_other_engines(asked)
    # Names that are not known are told before anything is traced.
    rules, card, _ = rules_of(engine, engine_version), find(device), format_named(asked.quantization)
    _refuse_of_such_cards(asked, card, engine, load)
    arrivals = None if load is None else load.arrivals
    named = asked.max_model_len or positions_in_config(model)
    served_lengths(lengths, arrivals, named, limit_words(asked.max_model_len))
    tokens = asked.max_num_batched_tokens
    traced = traced_model(
        model,
        device,
        rules=rules,
        asked=asked,
        dtype=dtype,
        batched_tokens=[tokens] if tokens else [],
        sampled_rows=[rules.profiled_rows(card, asked.num_gpus, asked.max_num_seqs or rules.max_sequences(card))],
        degrees=[asked.num_gpus],
        on_progress=on_progress,
    )
    if asked.draft is not None:
        return _with_draft(traced, device, rules, asked, dtype=dtype, lengths=lengths, on_progress=on_progress)
    server = server_of(traced, device, rules, asked)
    limit = server.settings.max_model_len
    lengths = served_lengths(lengths, arrivals, limit, limit_words(asked.max_model_len))
    found = server.estimate(lengths, load)
    if found.fits and draws:
        found = dataclasses.replace(found, curves=serving_curves(server, found, lengths))
    if not found.fits:
        return found
    launches = all_launches(launch_of(server, found, served_name(model)))
    # The share of another engine is another one than vLLM's.
    return dataclasses.replace(found, launch={each: launches[each] for each in launches if engine in (each, "vllm")})


def _with_draft(
    traced: TracedModel,
    device: str,
    rules: EngineRules,
    asked: ServeSettings,
    *,
    dtype: str | None,
    lengths: Sequence[tuple[int, int]],
    on_progress: OnProgress | None,
) -> ServingEstimate:
    """The memory of a server with a model that drafts tokens for it; how fast it is hangs on how many of them are right."""
    assert asked.draft is not None
    draft = traced_model(
        asked.draft,
        device,
        rules=rules,
        asked=asked,
        dtype=dtype,
        batched_tokens=[asked.max_num_batched_tokens] if asked.max_num_batched_tokens else [],
        sampled_rows=[asked.max_num_seqs or rules.max_sequences(find(device))],
        degrees=[asked.num_gpus],
        on_progress=on_progress,
    )
    if draft.facts.quantization:
        raise UsageError("--draft: its weights are quantised, and beside another model their size is not known here")
    # Engines run the draft as they run the model, cut over the same cards, and leave its weights as they are.
    own = server_of(draft, device, rules, dataclasses.replace(asked, quantization=None)).start_up()
    both = dataclasses.replace(traced, facts=with_draft(traced.facts, draft.facts))
    server = server_of(both, device, rules, asked)
    named = server.weight_format
    if named is not None:
        server = dataclasses.replace(
            server, weight_format=dataclasses.replace(named, left_out=(*named.left_out, "draft"))
        )
    found = server.start_up(lengths)
    words = "how fast a server with a draft is hangs on how many of its tokens are right, and is not estimated"
    return dataclasses.replace(found, draft_bytes=own.weights_bytes, assumptions=(*found.assumptions, words))


def _refuse_of_such_cards(asked: ServeSettings, card: Device, engine: str, load: AskedLoad | None) -> None:
    """What this engine or this card does not have, or is not simulated together."""
    if engine != "vllm" and (load is not None or asked.lora or asked.draft or asked.kv_offload):
        raise UsageError(
            f"--rate, --arrivals, --lora, --draft and --kv-offload are of --engine vllm, and not of {engine}"
        )
    if asked.num_gpus > 1 and card.shares_host_memory:
        raise UsageError(f"--gpus {asked.num_gpus}: {card.name} is a machine of its own, with one GPU")
    if asked.kv_offload is not None and card.shares_host_memory:
        raise UsageError(
            f"--kv-offload: {card.name} has the host's memory, where a cache takes the same bytes; leave it out"
        )
    if asked.draft is not None and load is not None:
        raise UsageError("--draft: its load is not simulated; leave out --rate and --arrivals")


def _refuse_of_other_engines(asked: ServeSettings) -> None:
    if asked.cache is not None:
        raise UsageError("--cache is of --engine transformers; servers have pages")
    if asked.kv_dtype in ("q8_0", "q4_0"):
        raise UsageError(f"--kv-dtype {asked.kv_dtype} is of --engine llama.cpp")
    if asked.lora is not None:
        AdapterSlots.parsed(asked.lora)
    if asked.kv_offload is not None:
        parse(asked.kv_offload)


def server_of(traced: TracedModel, device: str, rules: EngineRules, asked: ServeSettings) -> Server:
    """The server with those settings on `device`; without a `quantization` its weights are in the format of the checkpoint.

    Raises:
        UsageError: a setting cannot be, or a format's size is not known.
    """
    card, facts = find(device), traced.facts
    if rules.has_static_share and not facts.has_one_pool:
        raise UsageError(
            f"--engine {rules.engine}: a {facts.model_type} model has a cache of windows, states or an encoder, and how it is cut into pools is not known; --engine vllm takes it"
        )
    named = format_named(asked.quantization) if asked.quantization else checkpoint_format(facts.quantization)
    settings = ResolvedSettings.of(asked, rules, card, facts.max_positions)
    return Server(model=traced, device=card, rules=rules, settings=settings, weight_format=named)
