"""The model of `tightfit serve`: a config as it is, or what a script generates with, which is traced first."""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from tightfit.capture.trace_settings import TraceSettings
from tightfit.cli.arguments.options import Permissions
from tightfit.cli.shared.progress import ProgressLine
from tightfit.errors import UsageError

if TYPE_CHECKING:
    from tightfit.fit.generating_scripts import GeneratingCall

Answer = TypeVar("Answer", bound=Any)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What is served: a config, and the script's call that it is of (`scripted`), if it is of one."""

    source: str
    dtype: str | None
    lengths: Sequence[tuple[int, int]]
    scripted: "GeneratingCall | None" = None
    number: int = 1
    uses_lengths: bool = False

    @property
    def title(self) -> str:
        """The model in a line of progress."""
        return self.source if self.scripted is None else self.scripted.class_name

    def answered(self, found: Answer) -> Answer:
        """The answer under the name of the script."""
        if self.scripted is None:
            return found
        from tightfit.fit.generating_scripts import as_of_script

        return as_of_script(found, self.scripted, self.source, self.number, uses_lengths=self.uses_lengths)


def is_script(model: str) -> bool:
    """Whether `model` names a script, or a function of one, and no config."""
    from tightfit.fit.generating_scripts import is_generating_target

    return is_generating_target(model)


@contextmanager
def served_model(
    model: str,
    arguments: Sequence[str],
    call: int | None,
    permissions: Permissions,
    *,
    device: str,
    engine: str,
    dtype: str | None,
    lengths: Sequence[tuple[int, int]],
    has_arrivals: bool,
) -> Iterator[ServedModel]:
    """The model that `model` names; a script's has its type, and its lengths where the user names none.

    Raises:
        UsageError: options of a script with a config; or the script generates with no model that can be served.
        CaptureError: the script could not be run.
    """
    from tightfit.fit.generating_scripts import config_of, generating_call, refuse_what_is_beside

    if not is_script(model):
        if arguments:
            raise UsageError(f"{' '.join(arguments)}: one model is served, and {model} takes no arguments")
        if call is not None or permissions != Permissions():
            raise UsageError("--call, --allow-writes and --allow-network are for a script that calls generate")
        yield ServedModel(source=model, dtype=dtype, lengths=lengths)
        return
    number = 1 if call is None else call
    with ProgressLine(f"trace {model}", timeout_seconds=None) as line:
        found = generating_call(
            model,
            device,
            arguments=arguments,
            number=number,
            tracing=TraceSettings(allow_writes=permissions.allow_writes, allow_network=permissions.allow_network),
            on_progress=line.report,
        )
    refuse_what_is_beside(found, model, engine)
    uses_lengths = not lengths and not has_arrivals
    with config_of(found) as config:
        yield ServedModel(
            source=config,
            dtype=dtype or found.dtype,
            lengths=found.lengths if uses_lengths else lengths,
            scripted=found,
            number=number,
            uses_lengths=uses_lengths,
        )
