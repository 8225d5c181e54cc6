"""A script that calls transformers' `generate` as the model to serve: it is traced up to a call, whose model, type and lengths are served then."""

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tightfit.capture.targets.defined_only import hint_for
from tightfit.capture.targets.target_kinds import GeneratorFunction, Script, parse_target
from tightfit.capture.trace import Preparation, trace
from tightfit.capture.trace_settings import TraceSettings
from tightfit.errors import Generates, NoStep, UsageError
from tightfit.errors.faults import answering
from tightfit.fit.extent import policy_of
from tightfit.fit.planning_progress import OnProgress, ProgressLog
from tightfit.fit.traced_models import served_name
from tightfit.serving.choices.serving_plan import ServingPlan
from tightfit.serving.serving_estimate import ServingEstimate
from tightfit.units import format_bytes

_PREPARATION = "tightfit.runtime.generation.script_generation:prepare"
_NAMELESS = "MODEL"
_INSTEAD = "give the config.json of its model"
_DTYPES = ("float32", "bfloat16", "float16")
Answer = TypeVar("Answer", ServingEstimate, ServingPlan)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GeneratingCall:
    """A call of `generate` at the line `where`, of `rows` sequences with prompts of `prompt` tokens (None: of no tokens) and `new_tokens` more (None: not known).

    `changes` is what its model has otherwise than its config says, `others` are names and bytes of other models on the card.
    """

    where: str
    class_name: str
    config: Mapping[str, Any]
    name: str
    dtype: str
    prompt: int | None
    new_tokens: int | None
    rows: int
    changes: str
    others: Sequence[tuple[str, int]]

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Of its requests, empty where they are not known."""
        return [] if self.prompt is None or self.new_tokens is None else [(self.prompt, self.new_tokens)]

    def label(self, *, uses_lengths: bool) -> str:
        """The model, and where it is from."""
        words = [f"model of {self.where}", f"{self.class_name} in {self.dtype}"]
        if uses_lengths and self.lengths:
            words.append(f"{self.prompt}:{self.new_tokens} as the script generates")
        return ", ".join(words)

    def notes(self, number: int) -> Iterator[str]:
        """What the answer leaves out."""
        if self.rows > 1:
            yield f"the script generates {self.rows} sequences at once (its batch, its beams or the sequences that it returns)"
        if not self.lengths:
            yield "how long the script's requests are is not known: give --lengths"
        for name, size in self.others:
            yield f"the script has {name} on the GPU too, {format_bytes(size)} of weights: they are not counted"
        yield f"the script was traced up to its call {number} of generate, and what comes later is not looked at (--call chooses another one)"


def is_generating_target(model: str) -> bool:
    """Whether `model` names a script, or a function of one, and no config."""
    location, colon, _ = model.rpartition(":")
    return model.endswith(".py") or (bool(colon) and location.endswith(".py"))


@answering("the search for what a script generates with")
def generating_call(
    target: str,
    device: str,
    *,
    arguments: Sequence[str] = (),
    number: int = 1,
    tracing: TraceSettings,
    on_progress: OnProgress | None = None,
) -> GeneratingCall:
    """The call `number` of `generate` of the script `target`, or of a generator function.

    Raises:
        UsageError: no such script or call, or a model whose memory its config does not say.
        CaptureError: the script could not be run until then.
    """
    if number < 1:
        raise UsageError(f"--call {number}: calls of generate are counted from 1")
    parsed = parse_target(target, arguments=arguments)
    assert isinstance(parsed, Script | GeneratorFunction)
    log = ProgressLog(on_progress=on_progress)
    log.begin("tracing")
    try:
        traced = trace(
            parsed,
            label=target,
            device=device,
            timeout_seconds=tracing.timeout,
            policy=policy_of(tracing),
            on_progress=log.on_trace,
            preparation=Preparation(function=_PREPARATION, argument=number),
        )
    except Generates as found:
        return _checked(_call_of(found.call, target), target)
    except NoStep as error:
        hint = hint_for(parsed.path) if isinstance(parsed, Script) else None
        raise UsageError(hint or _no_call(target, number, 0)) from error
    raise UsageError(_no_call(target, number, int(traced.report["num_calls"])))


@contextmanager
def config_of(call: GeneratingCall) -> Iterator[str]:
    """A file with the config of the call's model, while it is served."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(call.config), encoding="utf-8")
        yield str(path)


def as_of_script(found: Answer, call: GeneratingCall, config: str, number: int, *, uses_lengths: bool) -> Answer:
    """The answer for the file `config`, as one for the script."""
    served, name = served_name(config), call.name or _NAMELESS
    launch = {
        engine: [name + each.removeprefix(served) if each.startswith(served) else each for each in arguments]
        for engine, arguments in found.launch.items()
    }
    notes = tuple(each.replace(config, call.class_name) for each in found.assumptions)
    return dataclasses.replace(
        found,
        model=call.label(uses_lengths=uses_lengths),
        launch=launch,
        assumptions=(*notes, *call.notes(number)),
    )


def refuse_what_is_beside(call: GeneratingCall, target: str, engine: str) -> None:
    """Refuses an answer for the script's own process where that holds models which it leaves out.

    Raises:
        UsageError: it does.
    """
    if engine == "transformers" and call.others:
        names = " and ".join(f"{name} ({format_bytes(size)} of weights)" for name, size in call.others)
        raise UsageError(
            f"--engine transformers: {target} has {names} on the GPU beside {call.class_name}, which is not counted; tightfit estimate {target} counts all of it"
        )


def _call_of(fields: Mapping[str, Any], target: str) -> GeneratingCall:
    of_call: dict[str, Any] = {**fields, "where": fields["where"] or target}
    return GeneratingCall(**of_call)


def _checked(call: GeneratingCall, target: str) -> GeneratingCall:
    if call.dtype not in _DTYPES:
        raise UsageError(
            f"{target}: the weights of {call.class_name} at {call.where} are in {call.dtype}, which is not served; {_INSTEAD}"
        )
    if call.changes:
        adapters = "lora" in call.changes.lower()
        instead = "for adapters give the config.json of their model, and --lora RANK:NUMBER" if adapters else _INSTEAD
        raise UsageError(
            f"{target}: {call.class_name} at {call.where} is not as its config says, it {call.changes}; {instead}"
        )
    return call


def _no_call(target: str, number: int, found: int) -> str:
    if found:
        return f"--call {number}: {target} was traced to its end, and calls generate of transformers {found} {'time' if found == 1 else 'times'}"
    return f"{target} calls no generate of transformers: {_INSTEAD}; tightfit estimate takes any script"
