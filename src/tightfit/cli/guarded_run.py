"""`tightfit run --guard`: runs a user's unmodified script with its training steps guarded, with a plan or without one."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.cli.arguments.programs import exit_code_of
from tightfit.errors import UsageError
from tightfit.planner.plan import Plan

if TYPE_CHECKING:
    from tightfit.guarding.loops.guarded_script import GuardedScript


def run_guarded(
    script: str,
    arguments: tuple[str, ...],
    *,
    plans: Sequence[Plan],
    has_plan: bool,
    check_steps: int,
    disk_folder: Path | None,
    post_mortems: Path,
    others: Mapping[str, Any],
) -> int:
    """Runs the script, and says on stderr what the guard has done. `plans`, the first of which is applied from the start if `has_plan`.

    Raises:
        UsageError: an option of `others`, which are for a run that makes its plan, was given.
    """
    given = [name for name, value in others.items() if value]
    if given:
        raise UsageError(f"--guard makes no plan, and takes no {given[0]}: make the plan with tightfit plan, and give it by --plan")
    if not post_mortems.is_dir():
        raise UsageError(f"--post-mortems {post_mortems}: there is no such folder")
    return exit_code_of(
        lambda: _run(script, arguments, plans, has_plan, check_steps, disk_folder, post_mortems), script
    )


def _run(
    script: str,
    arguments: tuple[str, ...],
    plans: Sequence[Plan],
    has_plan: bool,
    check_steps: int,
    disk_folder: Path | None,
    post_mortems: Path,
) -> None:
    from tightfit.capture.targets import Script, run_script
    from tightfit.runtime.run_script import run
    from tightfit.torch_hooks import manifest

    parsed = Script(path=script, arguments=arguments)
    found: list[GuardedScript] = []

    def running() -> Any:
        # Imports torch, which reads the allocator's settings of the plan.
        manifest.check()
        from tightfit.guarding.loops.guarded_script import GuardedScript

        found.append(GuardedScript(script, plans, has_first=has_plan, folder=post_mortems))
        return found[0].running()

    try:
        if has_plan:
            folder = None if disk_folder is None else str(disk_folder)
            run(plans[0], parsed, say, check_steps=check_steps, disk_folder=folder, around=running)
        else:
            with running() as compiled:
                run_script(parsed, compiled=compiled)
    finally:
        for guarded in found:
            _tell(guarded, say)


def _tell(guarded: "GuardedScript", tell: Callable[[str], None]) -> None:
    counts = guarded.statistics
    if not guarded.num_loops:
        tell("guard: found no training loop in the script that could be guarded; it ran without")
    elif counts["out of memory"] or counts["retried operators"]:
        tell(
            f"guard: {counts['steps']} steps, {counts['out of memory']} out of memory, {counts['replays']} replayed, {counts['retried operators']} operators of updates run again"
        )


def say(line: str) -> None:
    """Writes a line to stderr."""
    sys.stderr.write(f"tightfit: {line}\n")
