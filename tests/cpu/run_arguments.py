"""What traced runs are made of where a test cares for the workload alone."""

from typing import Any

from tightfit.capture.targets.target_kinds import Target
from tightfit.capture.trace_settings import TraceSettings
from tightfit.fit.card_settings import CardSettings
from tightfit.fit.planning_progress import ProgressLog

CARD = "RTX 4090"


def run_arguments(target: Target, label: str) -> dict[str, Any]:
    """The arguments of `TracedRuns` for two steps of `target` on `CARD`, with torch's own settings of the allocator."""
    return {
        "target": target,
        "label": label,
        "on": CardSettings.of(CARD, alloc_conf=""),
        "tracing": TraceSettings(steps=2),
        "log": ProgressLog(),
    }
