"""One workload with each combination of some values: parameters of a generator function, options of a Hugging Face config or of a script.

Each combination is traced apart, since other values are another program. One that cannot be traced is an answer too, with its reason.
"""

import ast
import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tightfit.allocator.settings import AllocatorSettings
from tightfit.capture.targets.script_options import option_of, with_option
from tightfit.capture.targets.target_kinds import GeneratorFunction, HuggingFaceConfig, Target
from tightfit.capture.trace_settings import AS_USUAL, TraceSettings
from tightfit.devices.calibration import Calibration
from tightfit.devices.device import Device
from tightfit.errors import TightfitError, UsageError
from tightfit.fit import capture, cost
from tightfit.fit.available import Used
from tightfit.reports.results import Estimate

MAX_COMBINATIONS = 256
_BOOLEANS = {"true": True, "false": False}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One name and the values that it takes, as they were written."""

    name: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Axis":
        """The axis of `NAME=VALUE,VALUE,...`; commas inside of brackets and quotes belong to a value.

        Raises:
            UsageError: it is not of that form, or a value stands twice.
        """
        name, equals, rest = text.partition("=")
        name = name.strip().lstrip("-")
        values = tuple(value.strip() for value in _split(rest))
        if not equals or not re.fullmatch(r"[A-Za-z_][\w-]*", name) or not all(values):
            raise UsageError(f"--sweep {text}: write NAME=VALUE,VALUE, such as batch_size=8,16,32")
        if len(set(values)) < len(values):
            raise UsageError(f"--sweep {text}: a value stands there twice")
        return cls(name=name, values=values)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """One combination on one GPU: its estimate, or why there is none."""

    values: Mapping[str, str]
    device: str
    estimate: Estimate | None
    error: TightfitError | None

    @property
    def exit_code(self) -> int:
        """That of `tightfit estimate` for this combination alone."""
        if self.estimate is not None:
            return 0 if self.estimate.fits else 1
        return TightfitError.exit_code if self.error is None else self.error.exit_code

    @property
    def reason(self) -> str:
        """Why there is no estimate; empty if there is one."""
        return "" if self.error is None else str(self.error)

    def to_json(self) -> dict[str, Any]:
        """The estimate's object with the values under `sweep`; without an estimate `fits` is null, and `error` says why."""
        values = {"sweep": {name: _literal(value) for name, value in self.values.items()}}
        if self.estimate is not None:
            return self.estimate.to_json() | values
        failed = {"schema": 1, "device": {"name": self.device}, "fits": None}
        return failed | values | {"error": str(self.error), "exit_code": self.exit_code}


def combinations(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """Every combination, the last axis changing first.

    Raises:
        UsageError: a name stands twice, or there are more than `MAX_COMBINATIONS`.
    """
    names = [axis.name.replace("-", "_") for axis in axes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"--sweep {twice}: it is given twice; write all its values after one --sweep")
    found = [
        dict(zip([axis.name for axis in axes], values, strict=True))
        for values in itertools.islice(itertools.product(*(axis.values for axis in axes)), MAX_COMBINATIONS + 1)
    ]
    if len(found) > MAX_COMBINATIONS:
        raise UsageError(
            f"--sweep: more than {MAX_COMBINATIONS} combinations, each of which is traced; give fewer values"
        )
    return found


def sweep(
    label: str,
    target: Target,
    cards: Sequence[tuple[str, Device]],
    each: Sequence[Mapping[str, str]],
    settings: AllocatorSettings,
    calibration: Calibration | None,
    *,
    used: Used = None,
    margin: str = "likely",
    tracing: TraceSettings = AS_USUAL,
) -> Iterator[SweepRow]:
    """The rows of `target`, which `label` names, for each combination and, inside of it, each card (with the name that it was given)."""
    for values in each:
        try:
            tape = capture(label, device=cards[0][0], used=used, **with_values(target, values), tracing=tracing)
            estimates = [cost(tape, card, settings, calibration, used=used, margin=margin) for _, card in cards]
        except TightfitError as error:
            for _, card in cards:
                yield SweepRow(values=values, device=card.name, estimate=None, error=error)
            continue
        for estimate in estimates:
            yield SweepRow(values=values, device=estimate.device, estimate=estimate, error=None)


def with_values(target: Target, values: Mapping[str, str]) -> dict[str, Any]:
    """What `tightfit.fit.capture` is given for `target` with these values: arguments of a script, parameters or options."""
    if isinstance(target, HuggingFaceConfig):
        options = {name.replace("-", "_"): _literal(value) for name, value in values.items()}
        return {"options": {**target.options, **options}}
    if isinstance(target, GeneratorFunction):
        given = {**target.parameters, **{name.replace("-", "_"): _literal(value) for name, value in values.items()}}
        return {"parameters": [f"{name}={value!r}" for name, value in given.items()]}
    arguments = list(target.arguments)
    for name, value in values.items():
        arguments = with_option(arguments, option_of(target, name), value)
    return {"arguments": arguments}


def _literal(value: str) -> Any:
    if value.lower() in _BOOLEANS:
        return _BOOLEANS[value.lower()]
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def _split(text: str) -> list[str]:
    """The parts between the commas that are in no bracket and no quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
        if character == "," and not quote and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
