"""tightfit makes a PyTorch workload fit the GPU it is given, as fast as it can run there.

    import tightfit

    found = tightfit.estimate("train.py", "RTX 4090")
    print(found.explain())

Importing it is cheap: a name loads what it needs when it is first used, and only the process that traces imports torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tightfit.devices.catalogue import find as find_device
    from tightfit.devices.device import Device
    from tightfit.errors import TightfitError
    from tightfit.fit import estimate, replay
    from tightfit.fit.planning import plan
    from tightfit.guarding.guarded_steps import guard
    from tightfit.recordings.recording import record
    from tightfit.recordings.replayed import Replay
    from tightfit.reports.plans import Plan
    from tightfit.reports.results import Estimate
    from tightfit.runtime.apply import apply
    from tightfit.runtime.leaks.block import leaks
    from tightfit.tape import Tape
    from tightfit.techniques.session import Session

__version__ = "0.1.0"

__all__ = [
    "Device",
    "Estimate",
    "Plan",
    "Replay",
    "Session",
    "Tape",
    "TightfitError",
    "apply",
    "estimate",
    "find_device",
    "guard",
    "leaks",
    "plan",
    "record",
    "replay",
]

# Each public name is imported on first use (PEP 562): `import tightfit` costs milliseconds and loads neither numpy nor torch.
_HOMES = {
    "Device": ("tightfit.devices.device", "Device"),
    "Estimate": ("tightfit.reports.results", "Estimate"),
    "Plan": ("tightfit.reports.plans", "Plan"),
    "Replay": ("tightfit.recordings.replayed", "Replay"),
    "Session": ("tightfit.techniques.session", "Session"),
    "Tape": ("tightfit.tape", "Tape"),
    "TightfitError": ("tightfit.errors", "TightfitError"),
    "apply": ("tightfit.runtime.apply", "apply"),
    "estimate": ("tightfit.fit", "estimate"),
    "find_device": ("tightfit.devices.catalogue", "find"),
    "guard": ("tightfit.guarding.guarded_steps", "guard"),
    "leaks": ("tightfit.runtime.leaks.block", "leaks"),
    "plan": ("tightfit.fit.planning", "plan"),
    "record": ("tightfit.recordings.recording", "record"),
    "replay": ("tightfit.fit", "replay"),
    "load_ipython_extension": ("tightfit.integrations.jupyter", "load_ipython_extension"),
}
# Their modules take private names of torch at their heads, so the installed torch is looked at before they are loaded.
_BESIDE_TORCH = ("apply", "guard", "leaks", "Session")


def __getattr__(name: str) -> Any:
    # A module's __getattr__ is also asked for names such as __path__ and by hasattr, which expect an AttributeError.
    if name not in _HOMES:
        raise AttributeError(f"module 'tightfit' has no attribute '{name}'")
    if name in _BESIDE_TORCH:
        importlib.import_module("tightfit.torch_hooks.manifest").check()
    module, attribute = _HOMES[name]
    value = getattr(importlib.import_module(module), attribute)
    # Found without __getattr__ from now on.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
