"""Where optimizer states at the host are updated, and what it costs: streamed through the card, ahead of the updates, in the backward pass, on the host.

`python -m benchmarks.engine optimizers`. Seconds of a step, idle seconds and hidden copies are those of the timeline of a traced run; the last column is
what the option has predicted. Nothing is run on a card.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import others
from benchmarks.engine.traffic import write_rows
from tightfit.analysis.profile import Profile
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import Preparation, trace
from tightfit.devices.catalogue import find
from tightfit.planner.option import Option
from tightfit.planner.plan import Choice
from tightfit.simulate.critical_path import ENGINES
from tightfit.simulate.step_work import priced
from tightfit.simulate.timeline import step_timeline
from tightfit.tape import CopyDirection, Tape
from tightfit.techniques.registry import technique
from tightfit.units import format_bytes, format_seconds

CARDS = ("RTX 4060", "RTX 4090", "A100 80GB", "H200")
NAME = "optimizer_offload"
MODELS = {"gpt2": "GPT-2 124M, batch 4 x 512, autocast", "llama": "2 layers of Llama-8B, 4,096 tokens, bfloat16"}
# States are made in the first step, and the second copies weights to the host.
_NUM_STEPS = 3


def gpt2(way: str = "") -> Iterator[Any]:
    """GPT-2 with AdamW, or with torchao's offload of it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config()).cuda()
    optimizer = _adamw(model, way)
    while True:
        ids = torch.randint(0, 50257, (4, 512), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def llama(way: str = "") -> Iterator[Any]:
    """Decoder layers of Llama-3-8B's widths with AdamW, or with torchao's offload of it."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=1024,
    )
    model = LlamaModel(config).to(torch.bfloat16).cuda()
    optimizer = _adamw(model, way)
    while True:
        ids = torch.randint(0, 1024, (1, 4096), device="cuda")
        loss = model(input_ids=ids, use_cache=False).last_hidden_state.float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def _adamw(model: torch.nn.Module, way: str) -> torch.optim.Optimizer:
    if way == others.TORCHAO:
        return others.torchao_optimizer(model.parameters(), lr=1e-4)
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def print_optimizers(path: Path | None = None) -> None:
    """Prints a row for each model, card and way, and writes them."""
    rows: list[dict[str, Any]] = []
    for name, title in MODELS.items():
        print(f"\n{title}: optimizer states at the host")
        tapes: dict[str, Tape] = {}

        def traced(
            settings: Mapping[str, Any] | None = None, name: str = name, tapes: dict[str, Tape] = tapes, way: str = ""
        ) -> Tape:
            key = f"{settings}{way}"
            if key not in tapes:
                tapes[key] = _traced(name, settings, way)
            return tapes[key]

        for card in CARDS:
            rows += [{"model": name, **row} for row in _card(card, traced)]
    if path is not None:
        write_rows(path, rows)


def _row(card: str, way: str, tape: Tape, seconds: float, base: float, **more: float) -> dict[str, Any]:
    peak = _allocated(Profile(tape, find(card)))
    found = {"device": card, "way": way, "seconds": seconds, "added_share": seconds / base - 1}
    found |= {"allocated_peak_bytes": peak, "host_peak_bytes": tape.host_peak_bytes}
    return found | {name: more.get(name, "") for name in ("predicted_seconds", "copied_seconds", "hidden_seconds")}


def _card(card: str, traced: Any) -> Iterator[dict[str, Any]]:
    device = find(card)
    plain = Profile(traced(), device)
    base = step_timeline(priced(traced(), device, None)).seconds
    print(f"{card:10} {'plain':40} {format_seconds(base):>10}           peak {format_bytes(_allocated(plain)):>10}")
    yield _row(card, "plain", plain.tape, base, base)
    for way, option in _ways(list(technique(NAME).options(plain))).items():
        settings = dict(option.settings)
        if way == "one by one":
            del settings["window_bytes"]
        tape = traced(settings)
        step = step_timeline(priced(tape, device, None))
        copied = sum(step.copy_seconds(direction) for direction in CopyDirection)
        hidden = sum(step.hidden_seconds(direction) for direction in CopyDirection)
        idle = ", ".join(
            f"{name} {format_seconds(step.idle_seconds.get(name, 0.0))}"
            for name in ("stream 0", ENGINES[CopyDirection.TO_CARD])
        )
        predicted = "" if way == "one by one" else f"predicted {format_seconds(base + option.seconds)}"
        print(
            f"{card:10} {way:40} {format_seconds(step.seconds):>10} {step.seconds / base - 1:+8.1%}  peak {format_bytes(_allocated(Profile(tape, device))):>10}, "
            f"{hidden / copied:6.1%} of {format_seconds(copied)} of copies hidden, idle: {idle}; host {format_bytes(tape.host_peak_bytes)}; {predicted}"
        )
        of_copies = {"copied_seconds": copied, "hidden_seconds": hidden}
        if predicted:
            of_copies["predicted_seconds"] = base + option.seconds
        yield _row(card, way, tape, step.seconds, base, **of_copies)

    if others.is_installed(others.TORCHAO):
        tape = traced(way=others.TORCHAO)
        step = step_timeline(priced(tape, device, None))
        way = f"torchao {others.version_of(others.TORCHAO)} CPUOffloadOptimizer"
        print(
            f"{card:10} {way:40} {format_seconds(step.seconds):>10} {step.seconds / base - 1:+8.1%}  peak {format_bytes(_allocated(Profile(tape, device))):>10}, "
            f"host {format_bytes(tape.host_peak_bytes)}"
        )
        yield _row(card, way, tape, step.seconds, base)


def _ways(options: list[Option]) -> dict[str, Option]:
    def widest(kernel: str, **wanted: Any) -> Option:
        fitting = [
            option
            for option in options
            if option.settings.get("kernel", "same") == kernel
            and not option.disk_bytes
            and all(option.settings.get(name) == wanted.get(name) for name in ("in_backward", "executor"))
        ]
        return max(fitting, key=lambda option: option.settings["window_bytes"])

    return {
        "one by one": widest("same"),
        "ahead of the updates": widest("same"),
        "ahead of the updates, fused": widest("fused"),
        "in the backward pass, fused": widest("fused", in_backward=True),
        "on the host": widest("same", executor="host"),
    }


def _traced(name: str, settings: Mapping[str, Any] | None, way: str = "") -> Tape:
    choices = []
    if settings is not None:
        choices = [
            Choice(technique=NAME, where="optimizer", settings=settings, saves_bytes=0, adds_seconds=0.0, exact=True)
        ]
    preparation = Preparation(
        function="tightfit.runtime.attach:prepare",
        argument={"choices": [dataclasses.asdict(choice) for choice in choices]},
    )
    target = GeneratorFunction(location=__file__, function=name, parameters={"way": way})
    return trace(target, label=name, device="H200", num_steps=_NUM_STEPS, preparation=preparation).tape


def _allocated(profile: Profile) -> int:
    return int(profile.optimizer.trained_parts.memory_timeline.max(initial=0))
