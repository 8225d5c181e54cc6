"""`tightfit run`: runs a user's unmodified script with a plan applied."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tightfit.capture.targets.target_kinds import Script, parse_script
from tightfit.cli.arguments.options import CLOSED_IN, SEVERAL, Permissions
from tightfit.cli.arguments.plan_files import plan_in
from tightfit.cli.arguments.programs import exit_code_of
from tightfit.cli.arguments.sizes import Size, budget_on
from tightfit.cli.arguments.used import used_now
from tightfit.cli.shared.local_cards import name_of, seen_cards
from tightfit.cli.variants.cached_generation import run_with_cache
from tightfit.cli.variants.guarded_run import UNGUARDED, Guarding, run_guarded
from tightfit.cli.variants.run_on_ranks import ONE_CARD, Ranks, run_on_ranks
from tightfit.errors import DoesNotFit, UsageError
from tightfit.planner.plan import Plan
from tightfit.simulate.estimate import needed_bytes, peak_of_limit, verdict_of
from tightfit.units import format_bytes


def run(
    script: str,
    /,
    *arguments: Annotated[str, Parameter(show=False)],
    plan: Path | None = None,
    budget: Size | None = None,
    used: Size | None = None,
    device: str | None = None,
    allow: Annotated[tuple[str, ...], SEVERAL] = (),
    virtual: bool = False,
    check_steps: int = 2,
    disk_folder: Path | None = None,
    cache: str | None = None,
    ranks: Ranks = ONE_CARD,
    guarding: Guarding = UNGUARDED,
    permissions: Permissions = CLOSED_IN,
) -> int:
    """Run a script with a plan applied. The script is not changed; its own arguments go after --.

    The exit code is the script's own; 1 if nothing makes it fit; 3 if the plan was refused, also where the script continued.

    Parameters
    ----------
    script
        A Python file, run as by python; or package.module, run as by python -m.
    plan
        The file that tightfit plan -o wrote. Without it, a plan is made first.
    budget
        GPU memory that the process may use, such as 22GiB or 80%: for the plan that is made; with --guard, a hard limit. Default: all of it.
    used
        GPU memory in use by other processes, such as 3GiB, if a plan is made. Default: what the driver reports for the GPU of this machine.
    device
        The GPU to plan for. Default: the GPU of this machine.
    allow
        A technique that changes results but may be used, or lossy for all of them; repeatable.
    virtual
        Without a GPU: run the first steps with the plan on a virtual one, and print their peak memory.
    check_steps
        Number of first steps, also after a change of shape, mode or module, in which results are compared with the plain ones. 0: none.
    disk_folder
        The folder for what the plan keeps on disk, in a file without a name. Default: the folder for temporary files (TMPDIR).
    cache
        For a script that calls generate of transformers, instead of a plan: the cache to use if the script names none (static, offloaded or fp8, which is lossy). The first tokens are compared with those of a plain run.
    """
    parsed = _checked(script, arguments, check_steps, disk_folder, guarding, ranks)
    _check_permissions(permissions, is_traced=virtual or not (plan or guarding.guard or cache or ranks.gpus))
    if cache is not None:
        others = (plan, budget, used, device, allow, virtual, guarding.guard, ranks.gpus)
        return run_with_cache(parsed, cache, _say, others, checks=check_steps > 0)
    if ranks.gpus is not None:
        others = {
            "--budget": budget,
            "--used": used,
            "--device": device,
            "--virtual": virtual,
            "--guard": guarding.guard,
        }
        return run_on_ranks(parsed, ranks, plan, allow, {**others, "--disk-folder": disk_folder}, check_steps)
    if guarding.guard:
        others = {"--used": used, "--device": device, "--allow": allow, "--virtual": virtual}
        return run_guarded(parsed, guarding, plan, budget, others, check_steps, disk_folder)
    # These are in the plan, and taking others silently would run something that was never verified.
    if plan is not None and (budget or device or allow or used):
        raise UsageError("--plan names a finished plan: it takes no --budget, --used, --device or --allow")
    card = device or (next(map(name_of, seen_cards()), None) if plan is None else None)
    if plan is None and card is None:
        raise UsageError(
            'there is no GPU on this machine to plan for: name one with --device "RTX 4090" (and --virtual to try it here), or give --plan FILE'
        )
    if plan is not None:
        chosen = plan_in(plan)
    else:
        others = used_now(used, card or "", is_own=device is None)
        limit = None if budget is None else budget_on(budget, card or "", others)
        chosen = _made(script, arguments, card or "", limit, allow, others, permissions)
    if not (chosen.fits or chosen.is_changed):
        raise _does_not_fit(chosen, script, plan)
    if virtual:
        return _run_virtually(chosen, script, arguments, permissions)
    return _run_really(chosen, parsed, script, check_steps, disk_folder)


def _run_really(chosen: Plan, parsed: Script, script: str, check_steps: int, disk_folder: Path | None) -> int:
    from tightfit.runtime.run_script import run as run_really

    return exit_code_of(
        lambda: run_really(
            chosen,
            parsed,
            _say,
            check_steps=check_steps,
            disk_folder=None if disk_folder is None else str(disk_folder),
        ),
        script,
        lowered_by=_lowered_by(chosen),
    )


def _lowered_by(chosen: Plan) -> str:
    """The technique that has weights in bfloat16."""
    names = (c.technique for c in chosen.choices if c.technique == "pure_bf16" or c.settings.get("master"))
    return next(names, "")


def _does_not_fit(chosen: Plan, script: str, file: Path | None) -> DoesNotFit:
    """The refusal of a plan before the script starts. One that comes from a `file` may have been made for another script."""
    subject = script if file is None else f"{file} is a plan with which {chosen.target}"
    limit, peak = f"{format_bytes(chosen.budget_bytes)} on {chosen.device}", chosen.run.peak
    needed = format_bytes(needed_bytes(peak, chosen.margin))
    if chosen.margin == "safe" and peak.device_bytes <= chosen.budget_bytes:
        return DoesNotFit(
            f"{subject} fits {limit} only without the safety margin: its likely peak is {format_bytes(peak.device_bytes)}, the upper bound {needed}; "
            "tightfit plan --margin likely -o plan.json makes a plan without that margin"
        )
    return DoesNotFit(f"{subject} does not fit {limit}: it needs {needed}; tightfit plan lists what would help")


def _checked(
    script: str,
    arguments: tuple[str, ...],
    check_steps: int,
    disk_folder: Path | None,
    guarding: Guarding,
    ranks: Ranks,
) -> Script:
    parsed = parse_script(script, arguments)
    if parsed is None:
        raise UsageError(f"there is no script {script}; run takes a Python file, and its own arguments after --")
    if disk_folder is not None and not disk_folder.is_dir():
        raise UsageError(f"--disk-folder {disk_folder}: there is no such folder")
    if check_steps < 0:
        raise UsageError(f"--check-steps is {check_steps}: give the number of steps to check, 0 for none")
    if ranks.on != "gpu" and ranks.gpus is None:
        raise UsageError("--on cpu goes with --gpus, the number of processes")
    if guarding.ballast is not None and not guarding.guard:
        raise UsageError("--ballast is for a guarded run: give --guard too")
    if guarding.fallback and not guarding.guard:
        raise UsageError("--fallback is for a guarded run: give --guard too")
    if guarding.post_mortems != UNGUARDED.post_mortems and not guarding.guard:
        raise UsageError("--post-mortems is for a guarded run: give --guard too")
    return parsed


def _check_permissions(permissions: Permissions, *, is_traced: bool) -> None:
    if permissions != CLOSED_IN and not is_traced:
        raise UsageError(
            "--allow-network and --allow-writes are for tracing, which isolates the program; this run is not isolated: leave them out"
        )


def _made(
    script: str,
    arguments: tuple[str, ...],
    device: str,
    budget: str | None,
    allow: tuple[str, ...],
    used: str | int | None,
    permissions: Permissions,
) -> Plan:
    from tightfit.fit.planning import plan as find_plan

    return find_plan(
        script,
        device,
        budget=budget,
        used=used,
        allow=allow,
        arguments=arguments,
        **dataclasses.asdict(permissions),
        say=_say if sys.stderr.isatty() else None,
    )


# In a child process; a real run happens in this one, as python would run the script.
def _run_virtually(plan: Plan, script: str, arguments: tuple[str, ...], permissions: Permissions) -> int:
    from tightfit.fit.planning import run_virtually
    from tightfit.runtime.run_script import figures, put_on

    estimate, models, told = run_virtually(plan, script, arguments, **dataclasses.asdict(permissions))
    for line in [*put_on(plan, list(dict.fromkeys(models))), *figures(plan), *told]:
        _say(line)
    steps = [span for span in estimate.spans if span.kind == "step"]
    peak = estimate.peak
    verdict = verdict_of(peak, plan.budget_bytes, plan.margin, is_whole=estimate.coverage.is_whole)
    print(
        f"{verdict}: {len(steps)} steps ran on a virtual {plan.device}: peak {peak_of_limit(peak, plan.budget_bytes)}"
    )
    return int(needed_bytes(peak, plan.margin) > plan.budget_bytes)


def _say(line: str) -> None:
    sys.stderr.write(f"tightfit: {line}\n")
