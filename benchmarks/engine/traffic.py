"""Traffic, host memory, disk and hidden copies of activation offload, beside torch's `save_on_cpu`: layers of Llama-8B on the virtual GPU.

    python -m benchmarks.engine [--layers 6] [--tokens 8192]

All figures are read from tapes: bytes from their copies between card and host, seconds from the timeline of a step. Nothing is run on a card.
"""

import contextlib
import csv
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.engine import others
from tightfit.analysis.profile import Profile
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import Preparation, trace
from tightfit.devices.catalogue import find
from tightfit.planner.option import Option
from tightfit.planner.plan import Choice
from tightfit.simulate.step_work import priced
from tightfit.simulate.timeline import step_timeline
from tightfit.tape import CopyDirection, Tape
from tightfit.techniques.registry import technique
from tightfit.units import format_bytes, format_seconds

CARDS = ("H200", "A100 80GB", "RTX 4090", "RTX 4060")
NAME = "activation_offload"


def layers(num_layers: int = 6, num_tokens: int = 8192, hooks: str = "") -> Iterator[Any]:
    """Decoder layers of Llama-3-8B's widths in bfloat16, trained on one sequence without an optimizer; `hooks` may be "save_on_cpu" or "torchtune"."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=1024,
        max_position_embeddings=num_tokens,
        attn_implementation="sdpa",
    )
    model = LlamaModel(config).to(torch.bfloat16).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    head = nn.Linear(4096, 1, bias=False).to(torch.bfloat16).cuda()
    while True:
        ids = torch.randint(0, 1024, (1, num_tokens), device="cuda")
        with _hooks(hooks):
            loss = head(model(input_ids=ids, use_cache=False).last_hidden_state).float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def _hooks(name: str) -> contextlib.AbstractContextManager[Any]:
    if name == others.TORCHTUNE:
        return others.torchtune_offload()
    return torch.autograd.graph.save_on_cpu(pin_memory=True) if name else contextlib.nullcontext()


def traffic(num_layers: int, num_tokens: int, path: Path | None = None) -> None:
    """Prints a row for each way and card, and writes them."""
    plain = _traced(num_layers, num_tokens, [])
    offered = list(technique(NAME).options(Profile(plain, find(CARDS[0]))))
    layers_of = [o for o in offered if o.where.rpartition(".")[2].isdigit() and o.settings["share"] == 1.0]
    whole = [o for o in layers_of if not o.disk_bytes]
    ways = {
        "plain": plain,
        "activation_offload": _traced(num_layers, num_tokens, whole),
        "the same, to disk": _traced(num_layers, num_tokens, [o for o in layers_of if o.disk_bytes]),
        "save_on_cpu": _traced(num_layers, num_tokens, [], hooks="save_on_cpu"),
    }
    if others.is_installed(others.TORCHTUNE):
        name = f"torchtune {others.version_of(others.TORCHTUNE)}"
        ways[name] = _traced(num_layers, num_tokens, [], hooks=others.TORCHTUNE)
    print(f"{num_layers} layers of Llama-8B, {num_tokens:,} tokens, bfloat16; {len(whole)} layers are offloaded")
    planned = sum(option.host_bytes for option in whole)
    print(f"the plan's host memory: {format_bytes(planned)}")
    for name, tape in ways.items():
        moved = _bytes_to_host(tape)
        layers_moved = len(whole) if name in ("activation_offload", "the same, to disk") else num_layers
        print(
            f"{name:20} to the host {format_bytes(moved):>10} in a step, {moved / num_tokens / layers_moved / 1e3:6.1f} KB per token and layer, "
            f"host peak {format_bytes(tape.host_peak_bytes):>10}, disk {format_bytes(tape.disk_peak_bytes):>10}, allocated peak {format_bytes(_allocated(tape)):>10}"
        )
    rows = []
    for card in CARDS:
        base = step_timeline(priced(plain, find(card), None)).seconds
        for name, tape in ways.items():
            step = step_timeline(priced(tape, find(card), None))
            copied = sum(step.copy_seconds(way) for way in CopyDirection)
            hidden = sum(step.hidden_seconds(way) for way in CopyDirection)
            share = (
                f"{hidden / copied:6.1%} of {format_seconds(copied)} of copies, those of the disk among them, hidden"
                if copied
                else ""
            )
            print(f"{card:12} {name:20} {format_seconds(step.seconds):>10} {step.seconds / base - 1:+8.1%}  {share}")
            rows.append(
                {
                    "num_layers": num_layers,
                    "num_tokens": num_tokens,
                    "device": card,
                    "way": name,
                    "to_host_bytes": _bytes_to_host(tape),
                    "planned_host_bytes": planned if name == NAME else "",
                    "host_peak_bytes": tape.host_peak_bytes,
                    "disk_peak_bytes": tape.disk_peak_bytes,
                    "allocated_peak_bytes": _allocated(tape),
                    "seconds": step.seconds,
                    "added_share": step.seconds / base - 1,
                    "copied_seconds": copied,
                    "hidden_seconds": hidden,
                }
            )
    if path is not None:
        write_rows(path, rows)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """As CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _traced(num_layers: int, num_tokens: int, options: list[Option], hooks: str = "") -> Tape:
    parameters = {"num_layers": num_layers, "num_tokens": num_tokens, "hooks": hooks}
    choices = [
        Choice(technique=NAME, where=o.where, settings=o.settings, saves_bytes=0, adds_seconds=0.0, exact=True)
        for o in options
    ]
    preparation = Preparation(
        function="tightfit.runtime.attach:prepare",
        argument={"choices": [dataclasses.asdict(choice) for choice in choices]},
    )
    target = GeneratorFunction(location=__file__, function="layers", parameters=parameters)
    return trace(target, label="layers", device=CARDS[0], num_steps=2, preparation=preparation).tape


def _bytes_to_host(tape: Tape) -> int:
    """The bytes that the copies of the last step take to the host."""
    begin, end = tape.operators_of_steps[-1]
    copies = tape.copies
    inside = (copies.operator >= begin) & (copies.operator < end) & (copies.direction == CopyDirection.TO_HOST)
    return int(copies.num_bytes[inside].sum())


def _allocated(tape: Tape) -> int:
    profile = Profile(tape, find(CARDS[0]))
    return int(profile.optimizer.trained_parts.memory_timeline.max(initial=0))
