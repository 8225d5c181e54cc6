"""What is moved of a layer, and what that costs: by GPU and length, all of a block, what hides, and the inputs of recomputed blocks; and plans that mix.

    python -m benchmarks.engine --storages
    python -m benchmarks.engine --budgets

Tapes on the virtual GPU, seconds from the timeline of a step. Nothing is run on a card.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import tightfit
from benchmarks.engine.traffic import write_rows
from tightfit.allocator.settings import AllocatorSettings
from tightfit.analysis.profile import Profile
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import Preparation, trace
from tightfit.devices.catalogue import find
from tightfit.planner.option import Option
from tightfit.planner.plan import Choice
from tightfit.simulate.step_work import priced
from tightfit.simulate.timeline import step_timeline
from tightfit.simulate.timeline_bytes import replay_timeline
from tightfit.tape import CopyDirection, Tape
from tightfit.techniques.registry import technique
from tightfit.units import format_bytes, format_seconds

CARDS = ("RTX 4090", "A100 80GB", "H200")
LENGTHS = (4096, 8192, 16384)
LAYERS = str(Path(__file__).with_name("traffic.py"))
# What computes the same without copies.
_BESIDE = {
    "all": "plain",
    "hidden": "plain",
    "recomputed, inputs moved": "recomputed",
    "cheap recomputed, hidden moved": "cheap recomputed",
}
_WITHOUT_HOST = ("activation_offload", "offloaded_checkpointing", "optimizer_offload")
_RECOMPUTING = (
    "checkpointing",
    "selective_checkpointing",
    "nested_checkpointing",
    "sequential_checkpointing",
    "offloaded_checkpointing",
)


def storages(num_layers: int) -> None:
    """Prints, for each GPU and length, what moves of a layer for each token, and what it adds to a step without copies."""
    print(
        f"{num_layers} layers of Llama-8B, bfloat16, one sequence; added: to the step that computes the same without copies"
    )
    print(
        f"{'':10} {'tokens':>6}  {'way':32} {'to the host':>15}  {'time':>9} {'added':>8} {'hidden':>7}  {'saves':>10}"
    )
    for tokens in LENGTHS:
        plain = traced(num_layers, tokens)
        for card in CARDS:
            rungs = _rungs(Profile(plain, find(card)))
            tapes = {name: traced(num_layers, tokens, chosen) for name, chosen in rungs.items() if chosen}
            tapes["plain"] = plain
            for name, tape in tapes.items():
                _print_row(card, tokens, name, tape, tapes[_BESIDE.get(name, name)], plain, len(rungs["all"]))


def _rungs(profile: Profile) -> dict[str, list[Option]]:
    """The options of whole layers by what they do."""
    offered = {
        name: [o for o in technique(name).options(profile) if o.where.rpartition(".")[2].isdigit()]
        for name in ("activation_offload", "offloaded_checkpointing", "checkpointing", "selective_checkpointing")
    }
    moved = offered["activation_offload"]
    inputs = [o for o in offered["offloaded_checkpointing"] if "keep" not in o.settings]
    products = [o for o in offered["offloaded_checkpointing"] if "keep" in o.settings]
    left = {option.where for option in inputs}
    plainly = offered["checkpointing"]
    return {
        "all": [o for o in moved if o.settings["share"] == 1.0],
        "hidden": [o for o in moved if o.settings["share"] < 1.0],
        "recomputed": plainly,
        "recomputed, inputs moved": [*inputs, *(o for o in plainly if o.where not in left)],
        "cheap recomputed": offered["selective_checkpointing"],
        "cheap recomputed, hidden moved": [
            *products,
            *(o for o in offered["selective_checkpointing"] if o.where not in {p.where for p in products}),
        ],
    }


def _print_row(card: str, tokens: int, name: str, tape: Tape, beside: Tape, plain: Tape, num_moved: int) -> None:
    step, before = (step_timeline(priced(each, find(card), None)) for each in (tape, beside))
    copied = sum(step.copy_seconds(way) for way in CopyDirection)
    hidden = sum(step.hidden_seconds(way) for way in CopyDirection)
    begin, end = tape.operators_of_steps[-1]
    copies = tape.copies
    inside = (copies.operator >= begin) & (copies.operator < end) & (copies.direction == CopyDirection.TO_HOST)
    kilobytes = int(copies.num_bytes[inside].sum()) / tokens / num_moved / 1e3
    share = f"{hidden / copied:7.1%}" if copied else f"{'':7}"
    print(
        f"{card:10} {tokens:6}  {name:32} {kilobytes:6.1f} KB/token  {format_seconds(step.seconds):>9} {step.seconds / before.seconds - 1:+8.2%} {share}  "
        f"{format_bytes(_peak(plain) - _peak(tape)):>10}"
    )


def budgets(num_layers: int, tokens: int, card: str, host: str, path: Path | None = None) -> None:
    """Prints, for three budgets, the predicted time per step of the joint plan, of recomputation alone and of moving alone, and writes them."""
    place = f"{LAYERS}:layers"
    parameters = [f"num_layers={num_layers}", f"num_tokens={tokens}"]
    plain = tightfit.estimate(place, card, parameters=parameters)
    ways = {
        "joint": {"host": host},
        "recomputed only": {"without": _WITHOUT_HOST},
        "moved only": {"host": host, "without": _RECOMPUTING},
    }
    print(
        f"{num_layers} layers of Llama-8B, {tokens:,} tokens, {card}, {host} of host memory: plain {format_bytes(plain.peak.device_bytes)}, {format_seconds(plain.seconds_per_step)}"
    )
    rows = []
    for share in (0.75, 0.6, 0.5):
        budget = int(plain.peak.device_bytes * share)
        for name, given in ways.items():
            plan = tightfit.plan(place, card, budget=budget, parameters=parameters, prove=False, **given)
            used = sorted({choice.technique for choice in plan.choices})
            print(
                f"budget {format_bytes(budget):>10}  {name:16} {'fits' if plan.fits else 'does not fit':12} {format_bytes(plan.run.peak.device_bytes):>10} "
                f"{format_seconds(plan.run.seconds_per_step):>9} {plan.run.seconds_per_step / plain.seconds_per_step - 1:+7.1%}  host {format_bytes(plan.host_bytes):>10}  {', '.join(used)}"
            )
            rows.append(
                {
                    "device": card,
                    "num_layers": num_layers,
                    "num_tokens": tokens,
                    "host": host,
                    "budget_bytes": budget,
                    "way": name,
                    "fits": plan.fits,
                    "device_bytes": plan.run.peak.device_bytes,
                    "seconds": plan.run.seconds_per_step,
                    "added_share": plan.run.seconds_per_step / plain.seconds_per_step - 1,
                    "host_bytes": plan.host_bytes,
                    "choices": " ".join(used),
                }
            )
    if path is not None:
        write_rows(path, rows)


def traced(num_layers: int, tokens: int, options: Sequence[Option] = ()) -> Tape:
    """The tape of two steps with `options` on them."""
    choices = [
        Choice(technique=o.technique, where=o.where, settings=o.settings, saves_bytes=0, adds_seconds=0.0, exact=True)
        for o in options
    ]
    preparation = Preparation(
        function="tightfit.runtime.attach:prepare",
        argument={"choices": [dataclasses.asdict(choice) for choice in choices]},
    )
    target = GeneratorFunction(
        location=LAYERS, function="layers", parameters={"num_layers": num_layers, "num_tokens": tokens}
    )
    return trace(target, label="layers", device=CARDS[-1], num_steps=2, preparation=preparation).tape


def _peak(tape: Tape) -> int:
    return int(replay_timeline(tape, AllocatorSettings()).allocated.max(initial=0))
