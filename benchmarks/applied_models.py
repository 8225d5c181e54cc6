"""What techniques do to real models: small ones of every type of breadth_models.toml, trained on the host with each technique on them.

    python -m benchmarks.applied_models [--only NAME ...] [--techniques NAME ...]

A step of each is traced, and what a technique offers there is put on the same model on the host, twice: from the innermost modules outwards and from the
outermost inwards, as many as go together. Three steps of stochastic gradient descent with momentum are compared with the plain ones: losses, weights and buffers, the
largest difference against the largest change that training made. `refused` is what the run says; a plan is then made without it. Exits with 1 if
anything differs, or ends in an error that is no refusal.
"""

import argparse
import dataclasses
import math
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.breadth import Case, cases, write_config
from benchmarks.wrappers import choice_of
from tightfit.analysis.profile import Profile
from tightfit.capture.targets.huggingface.target import HuggingFaceTarget, workload
from tightfit.capture.targets.target_kinds import HuggingFaceConfig
from tightfit.capture.trace import trace
from tightfit.devices.catalogue import find
from tightfit.errors import ApplyError
from tightfit.fit.searching.permitted import obstacle
from tightfit.planner.option import Option
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.registry import techniques

_CARD = "RTX 4090"
_NUM_STEPS = 3
# The order of sums; three steps make more of it in a deep model with batch norms.
_CLOSE = 1e-2
Numbers = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Losses, and weights and buffers before and after."""

    losses: list[float]
    before: Numbers
    after: Numbers


def train(target: HuggingFaceTarget, options: Sequence[Option] = ()) -> Trained:
    """Some steps on the host, with options on the model after the first one."""
    torch.manual_seed(0)
    steps = workload(target, device="cpu")
    next(steps)
    live = steps.gi_frame.f_locals
    model, optimizer = live["model"], live["optimizer"]
    before = _numbers(model)
    session = apply_choices([choice_of(option) for option in options], model, [optimizer])
    try:
        torch.manual_seed(1)
        losses = [next(steps).item() for _ in range(_NUM_STEPS)]
    finally:
        session.undo()
    return Trained(losses=losses, before=before, after=_numbers(model))


def _numbers(model: torch.nn.Module) -> Numbers:
    return {name: tensor.detach().double() for name, tensor in model.state_dict().items() if tensor.dtype != torch.bool}


def difference(plain: Trained, other: Trained) -> float:
    """The largest difference, against the largest change of the plain run."""
    change = max((plain.after[n] - plain.before[n]).abs().max().item() for n in plain.after if plain.after[n].numel())
    of_weights = [(plain.after[n] - other.after[n]).abs().max().item() for n in plain.after if plain.after[n].numel()]
    of_losses = [
        abs(a - b) / max(1.0, abs(a)) for a, b in zip(plain.losses, other.losses, strict=True) if not math.isnan(a)
    ]
    return max(max(of_weights) / max(change, 1e-12), *of_losses)


def put_together(options: Sequence[Option]) -> list[list[Option]]:
    """As many options as go together, from either end."""
    found: list[list[Option]] = []
    for order in (options[::-1], options):
        taken: list[Option] = []
        for option in order:
            if not any(option.slots & other.slots for other in taken):
                taken.append(option)
        if taken and {o.key for o in taken} not in [{o.key for o in each} for each in found]:
            found.append(taken)
    return found


def rows(case: Case, source: str, names: Sequence[str]) -> Iterator[tuple[str, int, str, str]]:
    """Technique, number of places, verdict, and how far off it is or what it says."""
    settings: dict[str, Any] = {
        "task": case.task,
        "batch_size": 4,
        "audio_seconds": 1.0,
        "optimizer": "sgd-momentum",
        "learning_rate": 1e-2,
    }
    target = HuggingFaceTarget(source=source, **settings)
    plain = train(target)
    if difference(plain, train(target)):
        yield "plain", 0, "unlike itself", "two plain runs differ"
        return
    config = HuggingFaceConfig(source=source, options=settings)
    tape = trace(config, label=case.name, device=_CARD, num_steps=2, with_effects=True).tape
    profile = Profile(tape, find(_CARD))
    for name in names:
        technique = techniques()[name]
        options = [
            option
            for option in technique.options(profile)
            if option.exact
            and not option.is_of_the_allocator
            and not option.disk_bytes
            and obstacle(tape, option, technique.needs) is None
        ]
        for taken in put_together(options):
            try:
                off = difference(plain, train(target, taken))
            except ApplyError as error:
                yield name, len(taken), "refused", str(error)
            except Exception as error:  # noqa: BLE001 - any error of any model is a row
                yield name, len(taken), "crashed", f"{type(error).__name__}: {error}"
            else:
                verdict = "same" if not off else "close" if off < _CLOSE else "differs"
                yield name, len(taken), verdict, f"{off:.1e}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each model, technique and set of places, and the sums."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--techniques", nargs="+", metavar="NAME", default=list(techniques()))
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            if options.only and case.name not in options.only:
                continue
            source = str(write_config(case, "small", Path(folder)))
            try:
                for name, num_places, verdict, told in rows(case, source, options.techniques):
                    counts[verdict] += 1
                    print(
                        f"{case.name:24} {name:26} {num_places:4d} {verdict:10} {' '.join(told.split())[:300]}",
                        flush=True,
                    )
            except Exception as error:  # noqa: BLE001 - a model that does not run here is no row
                counts["not run"] += 1
                print(f"{case.name:24} not run: {type(error).__name__}: {str(error).strip()[:200]}", flush=True)
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.items()))
    return 1 if counts["differs"] or counts["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
