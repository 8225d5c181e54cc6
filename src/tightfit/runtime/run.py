"""Runs a user's own script with a plan on it, in this process, on whatever device the script picks.

The allocator's settings must stand in the environment before torch is loaded, so this module does not import torch at its head; the rest of the
plan waits for the script's model and optimizers (`tightfit.runtime.attach`).
"""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from tightfit.capture.targets import Script, run_script
from tightfit.planner.explain import groups
from tightfit.planner.plan import Plan
from tightfit.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

ALLOC_CONF = "PYTORCH_CUDA_ALLOC_CONF"


def run(plan: Plan, script: Script, say: Callable[[str], None]) -> None:
    """Runs `script` to its end with `plan` on it. `say` is told, in three lines, what was done, when it is done.

    Raises:
        ApplyError: the plan is for another model or a smaller batch; the script is then where its first forward would have begun.
    """
    for choice in plan.choices:
        if "alloc_conf" in choice.settings:
            own = os.environ.get(ALLOC_CONF)
            os.environ[ALLOC_CONF] = ",".join(part for part in (own, choice.settings["alloc_conf"]) if part)
    from tightfit.runtime.attach import Attachment

    def applied(session: "Session") -> None:
        for line in what_was_done(plan, type(session.model).__name__):
            say(line)

    attachment = Attachment(plan.choices, plan.model.get("roots", ()), on_apply=applied)
    end = attachment.install()
    try:
        run_script(script)
        attachment.report()
    finally:
        end()


def what_was_done(plan: Plan, model: str) -> list[str]:
    """Three lines: what was put on which model, what it should hold, what it should cost."""
    chosen = (
        ", ".join(f"{group.technique} of {group.where}" for group in groups(plan.choices))
        or "nothing, it fits as it is"
    )
    peak, plain = plan.run.peak, plan.baseline
    slower = plan.run.seconds_per_step / plain.seconds_per_step - 1 if plain.seconds_per_step else 0.0
    return [
        f"on {model}: {chosen}",
        f"peak {format_bytes(peak.device_bytes)} (at most {format_bytes(peak.device_high_bytes)}) instead of {format_bytes(plain.peak.device_bytes)} on {plan.device}",
        f"a step {format_seconds(plan.run.seconds_per_step)} instead of {format_seconds(plain.seconds_per_step)} ({slower:+.1%}), by a roofline",
    ]
