"""What traced runs are made of where a test cares for the workload alone."""

from typing import Any

from tightfit.allocator.settings import AllocatorSettings
from tightfit.capture.targets import Target
from tightfit.devices.catalogue import find
from tightfit.fit.extent import Extent
from tightfit.fit.planning_progress import ProgressLog

CARD = "RTX 4090"


def run_arguments(target: Target, label: str) -> dict[str, Any]:
    """The arguments of `TracedRuns` for two steps of `target` on `CARD`, with torch's own settings of the allocator."""
    return {
        "target": target,
        "label": label,
        "device": CARD,
        "card": find(CARD),
        "settings": AllocatorSettings(),
        "calibration": None,
        "extent": Extent(num_steps=2),
        "show_output": False,
        "log": ProgressLog(),
    }
