"""What techniques do to real models: small ones of every type of breadth_models.toml, trained on the host with each technique on them.

    python -m benchmarks.applied_models [--only NAME ...] [--techniques NAME ...] [--timm | --autocast]

`--timm` takes the models of applied_timm.toml instead; timm is not among the dependencies. `--autocast` trains in bfloat16, and what is no farther from the plain run than
that is from one in float32 counts as close. A step of each is traced, and what a technique offers there is put on the same model on the host, twice: from the innermost modules outwards and from the
outermost inwards, as many as go together. Three steps of stochastic gradient descent with momentum are compared with the plain ones: losses, weights, buffers and the
random state, the largest difference of a tensor against what training changed of it. `forbidden` and `no place` is what a plan does not offer, `refused` what only the run
says; a plan is then made without it. Exits with 1 if anything differs, or ends in an error that is no refusal.
"""

import argparse
import dataclasses
import inspect
import math
import random
import sys
import tempfile
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

import benchmarks.workloads.torchvision_without_kernels  # noqa: F401 - timm and transformers import torchvision
from benchmarks.breadth import cases, write_config
from benchmarks.wrappers import choice_of
from tightfit.analysis.profile import Profile
from tightfit.capture.targets.target_kinds import GeneratorFunction, HuggingFaceConfig, generator_on
from tightfit.capture.trace import trace
from tightfit.devices.catalogue import find
from tightfit.errors import ApplyError
from tightfit.fit.searching.permitted import obstacle
from tightfit.planner.option import Option
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.registry import techniques

_CARD = "RTX 4090"
_NUM_STEPS = 3
_NUM_TOKENS = 128  # where a row is text; one with an image has as many as it needs
_OF_TEXT = ("text", "causal", "mixture_of_experts", "state_space", "seq2seq")
# The order of sums; three steps make more of it in a deep model with batch norms.
_CLOSE = 1e-2
Numbers = Mapping[str, torch.Tensor]
Target = GeneratorFunction | HuggingFaceConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Losses, weights and buffers before and after, and the random state after."""

    losses: torch.Tensor
    before: Numbers
    after: Numbers
    random_state: torch.Tensor


def subjects(folder: Path, only: Sequence[str], autocast: str | None) -> Iterator[tuple[str, Target]]:
    """Name and small config of the types of breadth_models.toml; configs are written into `folder`. All, if `only` names none."""
    for case in cases():
        if only and case.name not in only:
            continue
        settings = {
            "task": case.task,
            "batch_size": 4,
            "sequence_length": case.sequence_length or (_NUM_TOKENS if case.group in _OF_TEXT else None),
            "audio_seconds": 1.0,
            "optimizer": "sgd-momentum",
            "learning_rate": 1e-2,
            "autocast": autocast,
        }
        yield case.name, HuggingFaceConfig(source=str(write_config(case, "small", folder)), options=settings)


def timm_subjects(only: Sequence[str]) -> Iterator[tuple[str, Target]]:
    """The models of applied_timm.toml; all, if `only` names none."""
    table = tomllib.loads(Path(__file__).with_name("applied_timm.toml").read_text(encoding="utf-8"))
    for name, parameters in table.items():
        if only and name not in only:
            continue
        given = {"name": name, "settings": {}, **parameters}
        yield (
            name,
            GeneratorFunction(location="benchmarks.workloads.timm_training", function="train", parameters=given),
        )


def train(target: Target, options: Sequence[Option] = ()) -> Trained:
    """Some steps on the host, with options on the model after the first one."""
    _seed(0)
    if isinstance(target, GeneratorFunction):
        target = dataclasses.replace(target, parameters={**target.parameters, "device": "cpu"})
    steps = generator_on(target, device="cpu")
    next(steps)
    live = inspect.getgeneratorlocals(steps)
    model, optimizer = live["model"], live["optimizer"]
    before = _numbers(model)
    session = apply_choices([choice_of(option) for option in options], model, [optimizer])
    try:
        _seed(1)
        losses = torch.stack([next(steps).detach().double() for _ in range(_NUM_STEPS)])
    finally:
        session.undo()
    return Trained(losses=losses, before=before, after=_numbers(model), random_state=torch.get_rng_state())


def _seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def _numbers(model: torch.nn.Module) -> Numbers:
    return {name: tensor.detach().double() for name, tensor in model.state_dict().items() if tensor.dtype != torch.bool}


def difference(plain: Trained, other: Trained) -> float:
    """The largest difference of a tensor, against what training changed of it, and of a loss; infinite for another random state.

    Where training changes next to nothing, a thousandth of the largest change stands in its place: what is left there is rounding.
    """
    if not torch.equal(plain.random_state, other.random_state):
        return math.inf
    names = [name for name, tensor in plain.after.items() if tensor.numel()]
    changes = torch.stack([(plain.after[name] - plain.before[name]).abs().max() for name in names])
    off = torch.stack([(plain.after[name] - other.after[name]).abs().max() for name in names])
    of_weights = (off / changes.clamp_min(1e-3 * changes.max().item())).max()
    of_losses = ((plain.losses - other.losses).abs() / plain.losses.abs().clamp_min(1.0)).max()
    # As torch has it, what is not a number is the largest.
    return torch.maximum(of_weights, of_losses).item()


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


def rows(label: str, target: Target, names: Sequence[str]) -> Iterator[tuple[str, int, str, str]]:
    """Technique, number of places, verdict, and how far off it is or what it says."""
    plain = train(target)
    if difference(plain, train(target)):
        yield "plain", 0, "unlike itself", "two plain runs differ"
        return
    close = _CLOSE
    if isinstance(target, HuggingFaceConfig) and target.options["autocast"]:
        in_float32 = dataclasses.replace(target, options={**target.options, "autocast": None})
        close = max(close, difference(train(in_float32), plain))
    tape = trace(target, label=label, device=_CARD, num_steps=2, with_effects=True).tape
    profile = Profile(tape, find(_CARD))
    for name in names:
        technique = techniques()[name]
        found = [
            option
            for option in technique.options(profile)
            if option.exact and not option.is_of_the_allocator and not option.disk_bytes
        ]
        obstacles = [obstacle(tape, option, technique.needs) for option in found]
        options = [option for option, effect in zip(found, obstacles, strict=True) if effect is None]
        if not found and technique.exact and (reason := technique.reason(profile)):
            yield name, 0, "no place", reason
        for reason, number in Counter(effect.reason for effect in obstacles if effect is not None).items():
            yield name, number, "forbidden", reason
        for taken in put_together(options):
            try:
                off = difference(plain, train(target, taken))
            except ApplyError as error:
                yield name, len(taken), "refused", str(error)
            except Exception as error:  # noqa: BLE001 - any error of any model is a row
                yield name, len(taken), "crashed", f"{type(error).__name__}: {error}"
            else:
                verdict = "same" if not off else "close" if off <= close else "differs"
                yield name, len(taken), verdict, f"{off:.1e}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each model, technique and set of places, and the sums."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[])
    parser.add_argument("--techniques", nargs="+", metavar="NAME", default=list(techniques()))
    parser.add_argument("--timm", action="store_true", help="the models of applied_timm.toml")
    parser.add_argument("--autocast", action="store_const", const="bfloat16", help="train in bfloat16")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        found = timm_subjects(options.only) if options.timm else subjects(Path(folder), options.only, options.autocast)
        for label, target in found:
            try:
                for name, num_places, verdict, told in rows(label, target, options.techniques):
                    counts[verdict] += 1
                    print(
                        f"{label:24} {name:26} {num_places:4d} {verdict:10} {' '.join(told.split())[:300]}", flush=True
                    )
            except Exception as error:  # noqa: BLE001 - a model that does not run here is no row
                counts["not run"] += 1
                print(f"{label:24} not run: {type(error).__name__}: {str(error).strip()[:200]}", flush=True)
    print(", ".join(f"{number} {verdict}" for verdict, number in counts.items()))
    return 1 if counts["differs"] or counts["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
