"""A plan as plain data: the chosen options, peak and time of the traced run with them, and the alternatives."""

import dataclasses
import difflib
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tightfit.errors import PlanError
from tightfit.output_files import write_text
from tightfit.simulate.estimate import MARGINS, Peak, needed_bytes
from tightfit.tape import Assumption, Coverage

SCHEMA = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One chosen option. `saves_bytes` is its prediction by itself, at the peak of the plain run, `adds_seconds` its part of what all add together."""

    technique: str
    where: str
    settings: Mapping[str, Any]
    saves_bytes: int
    adds_seconds: float
    exact: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Peak and time per step of a traced run: the plain one, the planned one, or an alternative."""

    peak: Peak
    seconds_per_step: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """An alternative: `fits` is None where it was not traced. `why` says what it is, or why it was not taken."""

    name: str
    device_bytes: int | None
    seconds_per_step: float | None
    fits: bool | None
    exact: bool
    why: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """The time per step of the fastest combination within `device_bytes`, as the options predict it."""

    device_bytes: int
    seconds_per_step: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A lower bound of the predicted time per step of any choice within the budget, and whether it is proven."""

    seconds_per_step: float
    is_proven: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The evidence that the planned program computes the same as the plain one.

    "values": `steps` of both were run on the host, in `seconds`, with the same results. "structure": by the traced side effects of the program,
    by how the techniques work, and by their checks in the first steps of a run. `what` says it in words, and why it is not "values".
    """

    kind: str = "structure"
    steps: int = 0
    seconds: float = 0.0
    what: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The fastest combination of techniques within a budget. `promised_bytes` is the peak that the options predicted, `run.peak` the traced one.

    `budget_bytes` is the limit on the process's GPU memory, including a safety margin of `headroom_bytes`: `margin` is one of
    `tightfit.simulate.estimate.MARGINS`, and `uncertainty` names what the peak depends on. `model` identifies the model of the
    plan by the class of its root, the number of its parameters and the shapes of the inputs of its first step. `predicted_seconds` are those of
    a step as the options predict them (None in plans from before), `run.seconds_per_step` those of the traced run. `is_interrupted`: the best that was
    found before the search was interrupted. `coverage` says what of the program the planned run has shown. `is_changed`: choices were changed in its file, so
    that `run` is of others.
    """

    target: str
    device: str
    capacity_bytes: int
    budget_bytes: int
    headroom_bytes: int
    fits: bool
    run: Run
    baseline: Run
    promised_bytes: int
    choices: tuple[Choice, ...]
    bound: Bound
    alternatives: tuple[Alternative, ...]
    frontier: tuple[ParetoPoint, ...]
    advice: tuple[str, ...]
    model: Mapping[str, Any]
    host_bytes: int
    disk_bytes: int
    versions: Mapping[str, str]
    assumptions: tuple[Assumption, ...]
    proof: Proof = Proof()
    coverage: Coverage = Coverage()
    is_interrupted: bool = False
    predicted_seconds: float | None = None
    margin: str = "safe"
    uncertainty: tuple[str, ...] = ()
    is_changed: bool = False

    @property
    def has_planned_run(self) -> bool:
        """Whether `run` is of this plan, and not the plain one or that of other choices."""
        return bool(self.choices) and not self.is_changed

    @property
    def missing_bytes(self) -> int:
        """By how much the run exceeds the budget, at the end of its range that the margin names; negative if it fits."""
        return needed_bytes(self.run.peak, self.margin) - self.budget_bytes

    @property
    def exact(self) -> bool:
        """Whether every choice leaves the loss and the gradients unchanged."""
        return all(choice.exact for choice in self.choices)

    def to_json(self) -> dict[str, Any]:
        """The object that `tightfit plan --json` prints, without `elapsed_seconds`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        run = fields.pop("run")
        return (
            {
                "schema": SCHEMA,
                "fits": self.fits,
                "peak": dataclasses.asdict(run.peak),
                "seconds_per_step": run.seconds_per_step,
                "exact": self.exact,
                "target": self.target,
                "device": {"name": self.device, "capacity_bytes": self.capacity_bytes},
            }
            | {
                name: _plain(value)
                for name, value in fields.items()
                if name not in ("fits", "target", "device", "capacity_bytes")
            }
            | {"coverage": self.coverage.to_json(), _DIGEST: _digest(fields["choices"])}
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The plan that `to_json` wrote.

        Raises:
            PlanError: it is no plan, or one of another schema.
        """
        _check_schema(value)
        try:
            _check_names(value, "the plan", (*_TOP, _DIGEST, *(field.name for field in dataclasses.fields(cls))))
            plan = cls(
                run=_run(value),
                baseline=_run(value["baseline"]),
                device=value["device"]["name"],
                capacity_bytes=value["device"]["capacity_bytes"],
                choices=tuple(_choice(choice) for choice in value["choices"]),
                bound=Bound(**value["bound"]),
                alternatives=tuple(Alternative(**a) for a in value["alternatives"]),
                frontier=tuple(ParetoPoint(**p) for p in value["frontier"]),
                advice=tuple(value["advice"]),
                assumptions=tuple(Assumption(**a) for a in value["assumptions"]),
                # Plans of the same schema from before proofs and coverage have none.
                proof=Proof(**value.get("proof", {})),
                coverage=Coverage.from_json(value.get("coverage", {})),
                is_interrupted=bool(value.get("is_interrupted", False)),
                predicted_seconds=value.get("predicted_seconds"),
                margin=value.get("margin", "safe"),
                uncertainty=tuple(value.get("uncertainty", ())),
                is_changed=bool(value.get("is_changed", False)),
                **{name: value[name] for name in _AS_THEY_ARE},
            )
            # Dataclasses do not check types; a plan edited by hand must fail here and not in the middle of a run.
            for number, choice in enumerate(plan.choices):
                _check_choice(choice)
                if choice in plan.choices[:number]:
                    raise _OtherForm(f"{choice.technique}@{choice.where} is there twice")
            for name in ("model", "versions"):
                if not isinstance(value[name], Mapping):
                    raise _OtherForm(f"{name} is {value[name]!r}, not names with values")
            for part in (plan, *plan.choices, *plan.alternatives, *plan.frontier, plan.bound, plan.proof):
                _check(part)
            if plan.margin not in MARGINS:
                raise _OtherForm(f"margin is {plan.margin!r}, not one of {', '.join(MARGINS)}")
            for run in (plan.run, plan.baseline):
                _check(run)
                _check(run.peak)
            if not plan.choices and plan.run.peak.device_bytes < plan.baseline.peak.device_bytes:
                raise _OtherForm("it has no choices, and a lower peak than the plain run")
        except KeyError as error:
            raise PlanError(f"this plan lacks {error}; make it again with tightfit plan -o FILE") from error
        except _OtherForm as error:
            raise PlanError(f"this plan was changed: {error}; make it again with tightfit plan -o FILE") from error
        except (TypeError, AttributeError, ValueError) as error:
            # Of Python, about our classes: it says nothing to who reads it.
            raise PlanError(
                "this plan was changed, or another version of tightfit wrote it; make it again with tightfit plan -o FILE"
            ) from error
        is_same = value.get(_DIGEST) in (None, _digest(plan.choices))
        return plan if is_same else dataclasses.replace(plan, is_changed=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON, atomically: `tightfit run --plan` never reads half a plan.

        Raises:
            OutputError: the file cannot be written.
        """
        write_text(path, json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads what `save` wrote.

        Raises:
            PlanError: the file cannot be read or is no plan.
        """
        try:
            value = json.loads(Path(path).read_text())
        except OSError as error:
            raise PlanError(f"the plan {os.fspath(path)} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise PlanError(
                f"{os.fspath(path)} is not a plan (tightfit plan -o writes one): it is not JSON: {error}"
            ) from error
        try:
            return cls.from_json(value)
        except PlanError as error:
            raise PlanError(f"{os.fspath(path)}: {error}") from error


class _OtherForm(ValueError):
    """A field of a plan holds something else than it should."""


def _check_schema(value: Any) -> None:
    schema = value.get("schema") if isinstance(value, Mapping) else None
    if isinstance(schema, int) and schema > SCHEMA and "choices" in value:
        raise PlanError(
            f"this plan has schema {schema}, and this tightfit reads {SCHEMA}: a newer one wrote it; make it again with tightfit plan -o FILE"
        )
    if schema != SCHEMA or "choices" not in value:
        raise PlanError("this is no plan; make one with tightfit plan -o FILE")


_AS_THEY_ARE = (
    "target",
    "budget_bytes",
    "headroom_bytes",
    "fits",
    "promised_bytes",
    "model",
    "host_bytes",
    "disk_bytes",
    "versions",
)


_DIGEST = "choices_digest"
"""The field of a file that tells whether its choices are still those that were simulated; plans from before have none."""


def _digest(choices: Sequence[Choice]) -> str:
    """Of all that is applied."""
    # In the order and the form in which JSON has them.
    applied = sorted(json.dumps([c.technique, c.where, _plain(c.settings)], sort_keys=True) for c in choices)
    return hashlib.sha256("\n".join(applied).encode()).hexdigest()[:16]


# Beside the fields of `Plan`.
_TOP = ("schema", "peak", "seconds_per_step", "exact", "elapsed_seconds", "layout")
_ALIKE = 0.8  # of two names, as difflib counts


def _check_names(value: Mapping[str, Any], what: str, known: Sequence[str]) -> None:
    """Refuses a field that nearly has the name of another: it would be ignored. Those of a newer tightfit have names of their own."""
    for name in value:
        near = [] if name in known else difflib.get_close_matches(str(name), known, n=1, cutoff=_ALIKE)
        if near:
            raise _OtherForm(f"{what} has a field {name!r} (did you mean {near[0]}?)")


def _choice(value: Mapping[str, Any]) -> Choice:
    known = [field.name for field in dataclasses.fields(Choice)]
    where = f"{value.get('technique', 'a choice')}@{value.get('where', '')}"
    _check_names(value, where, known)
    unknown = [name for name in value if name not in known]
    if unknown:
        raise _OtherForm(f"{where} has a field {unknown[0]!r}, which no choice has")
    return Choice(**value)


def _check(part: Any) -> None:
    """Raises an error if a field of `part` whose name says bytes or seconds holds no such number."""
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        # The annotation is a string or a type, depending on the module; both name None where it is allowed.
        is_optional = "None" in str(field.type)
        if field.name.endswith("_bytes") and not (isinstance(value, int) or (is_optional and value is None)):
            raise _OtherForm(f"{field.name} is {value!r}, not a number of bytes")
        if "seconds" in field.name and not (
            (isinstance(value, int | float) and math.isfinite(value)) or (is_optional and value is None)
        ):
            raise _OtherForm(f"{field.name} is {value!r}, not a number of seconds")


def _check_choice(choice: Choice) -> None:
    for name in ("technique", "where"):
        if not isinstance(value := getattr(choice, name), str):
            raise _OtherForm(f"{name} of a choice is {value!r}, not text")
    if not isinstance(choice.settings, Mapping):
        raise _OtherForm(
            f"settings of {choice.technique}@{choice.where} are {choice.settings!r}, not names with values"
        )


def _run(value: Mapping[str, Any]) -> Run:
    return Run(peak=Peak(**value["peak"]), seconds_per_step=value["seconds_per_step"])


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return dict(value) if isinstance(value, Mapping) else value
