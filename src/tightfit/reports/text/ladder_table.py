"""The plans of a ladder as text: a line for each, and the command that runs the script with them."""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tightfit.planner.plan import Plan
from tightfit.units import format_bytes, format_seconds


def write_ladder(plans: Sequence[Plan], paths: Sequence[Path], *, target: str) -> None:
    """Writes them to stdout."""
    sys.stdout.write(ladder_text(plans, paths, target=target))


def ladder_text(plans: Sequence[Plan], paths: Sequence[Path], *, target: str) -> str:
    """The lines; `paths` are the files of the plans."""
    lines = [
        f"{target} on {plans[0].device}: {len(plans)} {'plan' if len(plans) == 1 else 'plans'}, from the fastest to the one that uses the least memory",
        "",
    ]
    width = max(len(str(path)) for path in paths)
    for plan, path in zip(plans, paths, strict=True):
        counts = Counter(choice.technique for choice in plan.choices)
        chosen = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())
        peak, seconds = format_bytes(plan.run.peak.device_bytes), format_seconds(plan.run.seconds_per_step)
        if plan.is_changed:
            peak = seconds = "not known"
        lines.append(f"  {path!s:{width}}  {peak:>10}  {seconds:>8} per step  {chosen or 'no changes'}")
    if target.endswith(".py"):
        first, *others = (str(path) for path in paths)
        fallbacks = "".join(f" --fallback {each}" for each in others)
        lines += ["", f"tightfit run --guard --plan {first}{fallbacks} {target}"]
    return "\n".join(lines) + "\n"
