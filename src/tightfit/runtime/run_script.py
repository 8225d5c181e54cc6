"""Runs a user's script with a plan applied, in this process, on the device that the script picks.

The allocator's settings must be in the environment before torch is imported, so this module does not import torch at its head; the rest of the
plan waits for the script's model and optimizers (`tightfit.runtime.attach`).
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from types import CodeType
from typing import TYPE_CHECKING, Any

from tightfit.allocator.settings import add_to_environment
from tightfit.capture.targets.target_kinds import Script, run_script
from tightfit.errors import ApplyError, TightfitError, apply_error, forget_apply_errors
from tightfit.errors.faults import noted
from tightfit.planner.explain import groups, poor_trade, verdict
from tightfit.planner.plan import Plan
from tightfit.torch_hooks import manifest
from tightfit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tightfit.runtime.attach import Attachment
    from tightfit.techniques.session import Session

Compiled = Callable[[bytes, str], CodeType | None]


def run(
    plan: Plan,
    script: Script,
    say: Callable[[str], None],
    *,
    check_steps: int = 2,
    disk_folder: str | None = None,
    around: Callable[[], AbstractContextManager[Compiled | None]] = nullcontext,
) -> None:
    """Runs `script` to its end with `plan` applied. `say` is called with what was applied: three lines, and one more for each further model.
    `check_steps` and `disk_folder` are as in `tightfit.techniques.session.Session`. `around` is entered while the script runs, and gives what compiles it.

    Raises:
        ApplyError: the plan is for another model; the script is stopped before its first forward. Or the script ended without
            calling a model with gradients, or caught such an error and went on without the plan.
    """
    for choice in plan.choices:
        if "alloc_conf" in choice.settings:
            add_to_environment(choice.settings["alloc_conf"])
    manifest.check()
    # Only now: this imports torch, which reads the allocator's settings.
    from tightfit.runtime.attach import Attachment

    if others := other_versions(plan.versions):
        say(others)
    said: set[str] = set()

    def say_once(line: str) -> None:
        if line not in said:
            said.add(line)
            say(line)

    def applied(session: "Session") -> None:
        model = type(session.model).__name__
        for line in [*put_on(plan, [model]), *([] if said else figures(plan)), *session.notes]:
            say_once(line)
        # What the run shows later: gradients that are kept, proofs that are repeated.
        session.notes.tell = say_once

    roots = plan.model.get("roots", ())
    attachment = Attachment(
        plan.choices, roots, on_apply=applied, tell=say, check_steps=check_steps, disk_folder=disk_folder
    )
    forget_apply_errors()
    end = attachment.install()
    try:
        with around() as compiled:
            run_script(script, compiled=compiled)
        _raise_what_was_swallowed()
        _check(attachment, say)
    except TightfitError:
        raise
    # What the script raises after an error of ours, or the exit code it ends with, is a consequence of that.
    except (Exception, SystemExit):
        _raise_what_was_swallowed()
        raise
    finally:
        end()
    if not said:
        say(f"{script.path} called no model with gradients: the plan was applied to nothing")


def prepare(argument: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """Puts choices on the program that a child is about to run: `tightfit.runtime.attach.prepare`, once torch is known to have what that imports.

    Raises:
        UnsupportedTorch: it has not.
    """
    manifest.check()
    from tightfit.runtime.attach import prepare as prepare_

    return prepare_(argument)


def _raise_what_was_swallowed() -> None:
    """Raises an error of ours that the script has caught: it has run on without the plan, or without training."""
    swallowed = noted() or apply_error()
    if swallowed is not None:
        raise swallowed


def _check(attachment: "Attachment", say: Callable[[str], None]) -> None:
    """Reports choices of the plan that could not be applied; an error only if none could, as the plan is then for another program."""
    try:
        attachment.report()
    except ApplyError as error:
        if not attachment.roots:
            raise
        say(str(error))


def other_versions(versions: Mapping[str, str]) -> str:
    """A line about the libraries that are installed in other versions than the plan was made with; empty where there are none."""
    differing = []
    for package, version in versions.items():
        with suppress(PackageNotFoundError):
            here = installed_version(package)
            # Builds for the processor and for CUDA are of one version (2.13.0+cpu and 2.13.0+cu130).
            if here.partition("+")[0] != version.partition("+")[0]:
                differing.append(f"{package} {version} (here {here})")
    if not differing:
        return ""
    return f"the plan was made with {', '.join(differing)}: its peak is not known for what runs here; make it anew to know it"


def put_on(plan: Plan, models: list[str]) -> list[str]:
    """A line for each model with the techniques applied to it."""
    lines = []
    for model in models:
        inside = [c for c in plan.choices if c.where.partition(".")[0] == model or c.where.islower()]
        chosen = ", ".join(f"{group.technique} of {group.where}" for group in groups(inside))
        lines.append(
            f"on {model}: {chosen or ('no technique' if plan.choices else 'no technique, it fits without changes')}"
        )
    return lines


def figures(plan: Plan) -> list[str]:
    """The predicted memory and the predicted time per step of the planned run, and whether that is a poor trade; one line where it is not known."""
    if plan.is_changed:
        return [verdict(plan)]
    peak, plain = plan.run.peak, plan.baseline
    slower = plan.run.seconds_per_step / plain.seconds_per_step - 1 if plain.seconds_per_step else 0.0
    return [
        f"peak {format_bytes(peak.device_bytes)} (upper bound {format_bytes(peak.device_high_bytes)}) instead of {format_bytes(plain.peak.device_bytes)} on {plan.device}",
        f"estimated time per step {format_seconds(plan.run.seconds_per_step)} instead of {format_seconds(plain.seconds_per_step)} ({slower:+.1%})",
        *([poor] if (poor := poor_trade(plan)) else []),
    ]
