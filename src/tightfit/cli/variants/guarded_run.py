"""`tightfit run --guard`: runs a user's unmodified script with its training steps guarded, with a plan or without one."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from tightfit.allocator.settings import add_to_environment
from tightfit.capture.targets.target_kinds import Script, run_script
from tightfit.cli.arguments.options import SEVERAL
from tightfit.cli.arguments.plan_files import plan_in
from tightfit.cli.arguments.programs import exit_code_of
from tightfit.cli.arguments.sizes import Size, with_unit
from tightfit.cli.shared.local_cards import LocalCard, seen_cards
from tightfit.devices.catalogue import find
from tightfit.errors import UsageError
from tightfit.errors.private_names import installed_torch
from tightfit.planner.plan import Plan
from tightfit.units import GIB, format_bytes, parse

if TYPE_CHECKING:
    from tightfit.guarding.loops.guarded_script import GuardedScript


@Parameter(name="*", group=Group("Guarded run", sort_key=3))
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Guarding:
    """How a run is guarded.

    Parameters
    ----------
    guard
        Undo a training step that runs out of memory, and run it again. No plan is made; --plan may name one.
    fallback
        A plan to switch to when memory does not suffice; repeatable, from the fastest to the one that uses the least memory.
    ballast
        GPU memory to reserve, such as 512MiB, and to release first when a step runs out of memory.
    post_mortems
        The folder for the file about a step that failed for good. Default: the current one.
    """

    guard: bool = False
    fallback: Annotated[tuple[Path, ...], SEVERAL] = ()
    ballast: Size | None = None
    post_mortems: Path = Path()


UNGUARDED = Guarding()
# What the CUDA context of a GPU that is not in the catalogue takes.
_CONTEXT_BYTES = GIB // 2


def run_guarded(
    script: Script,
    guarding: Guarding,
    plan: Path | None,
    budget: str | None,
    others: Mapping[str, Any],
    check_steps: int,
    disk_folder: Path | None,
) -> int:
    """Runs the script, with `plan` from the start if there is one, and says on stderr what the guard has done. Returns the exit code.

    `budget` is what the process may hold on this machine's GPU.

    Raises:
        UsageError: an option of `others`, which are for a run that makes its plan, was given; or there can be no folder for post-mortems.
    """
    given = [name for name, value in others.items() if value]
    if given:
        raise UsageError(
            f"--guard makes no plan, and takes no {given[0]}: make the plan with tightfit plan, and pass it with --plan"
        )
    try:
        guarding.post_mortems.mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"--post-mortems {guarding.post_mortems}: {error.strerror}") from error
    if budget is not None:
        _limit(with_unit("--budget", budget))
    plans = [plan_in(each) for each in ([] if plan is None else [plan]) + list(guarding.fallback)]
    folder = None if disk_folder is None else str(disk_folder)
    ballast_bytes = 0 if guarding.ballast is None else parse(with_unit("--ballast", guarding.ballast))
    found: list[GuardedScript] = []
    return exit_code_of(
        lambda: _run(
            script,
            plans,
            guarding,
            found,
            has_plan=plan is not None,
            check_steps=check_steps,
            disk_folder=folder,
            ballast_bytes=ballast_bytes,
        ),
        script.path,
        at_the_end=lambda: _tell_all(found),
    )


def _limit(budget: str) -> None:
    """Sets what the allocator of this process may hold, and says so.

    Raises:
        UsageError: there is no GPU, or the budget is not for it; or torch is too old.
    """
    from tightfit.guarding.memory.process_budget import allocator_setting

    cards = seen_cards()
    if not cards:
        raise UsageError("--budget limits the GPU memory of the process, and there is no GPU on this machine")
    if installed_torch() < (2, 10):
        raise UsageError(
            "--budget needs torch 2.10 or later: the allocator of earlier versions has no setting for the share of a process; leave it out"
        )
    card = cards[0]
    budget_bytes, outside_bytes = parse(budget, whole_bytes=card.total_bytes), _outside(card)
    setting = allocator_setting(budget_bytes, capacity_bytes=card.total_bytes, outside_bytes=outside_bytes)
    add_to_environment(setting)
    say(
        f"guard: at most {format_bytes(budget_bytes)} of {card.name}: {format_bytes(budget_bytes - outside_bytes)} for tensors, about {format_bytes(outside_bytes)} for the CUDA context"
    )
    if card.used_bytes > card.total_bytes - budget_bytes:
        say(
            f"guard: other processes hold {format_bytes(card.used_bytes)} of it: {format_bytes(card.total_bytes - card.used_bytes)} are free now, less than the budget"
        )


def _outside(card: LocalCard) -> int:
    return _CONTEXT_BYTES if card.known_as is None else find(card.known_as).context.num_bytes


def _run(
    script: Script,
    plans: Sequence[Plan],
    guarding: Guarding,
    found: "list[GuardedScript]",
    *,
    has_plan: bool,
    check_steps: int,
    disk_folder: str | None,
    ballast_bytes: int,
) -> None:
    """Runs the script; what guards it is put into `found`."""
    from tightfit.runtime.run_script import run
    from tightfit.torch_hooks import manifest

    def running() -> Any:
        # Imports torch, which reads the allocator's settings of the plan.
        manifest.check()
        from tightfit.guarding.loops.guarded_script import GuardedScript
        from tightfit.runtime.apply import apply

        put = functools.partial(apply, check_steps=check_steps, disk_folder=disk_folder)
        # Next to where the command was given, wherever the script goes.
        folder = guarding.post_mortems.resolve()
        found.append(
            GuardedScript(
                script.path,
                plans,
                has_first=has_plan,
                folder=folder,
                # As `python -m` does.
                imports_from=Path.cwd() if script.module else None,
                put=put,
                ballast_bytes=ballast_bytes,
            )
        )
        return found[0].running()

    try:
        if has_plan:
            run(plans[0], script, say, check_steps=check_steps, disk_folder=disk_folder, around=running)
        else:
            with running() as compiled:
                run_script(script, compiled=compiled)
    finally:
        _tell_all(found)


def _tell_all(found: "Sequence[GuardedScript]") -> None:
    for guarded in found:
        _tell(guarded, say)


def _tell(guarded: "GuardedScript", tell: Callable[[str], None]) -> None:
    counts = guarded.statistics
    if not guarded.num_loops:
        tell("guard: found no training loop in the script that could be guarded; it ran without")
    elif counts["out of memory"] or counts["retried operators"]:
        tell(
            f"guard: {counts['steps']} steps, {counts['out of memory']} out of memory, {counts['replays']} replayed, {counts['retried operators']} operators run again"
        )


def say(line: str) -> None:
    """Writes a line to stderr."""
    sys.stderr.write(f"tightfit: {line}\n")
