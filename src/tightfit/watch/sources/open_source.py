"""Opens what this machine has: NVML, AMD SMI, or the simulation that was asked for."""

from collections.abc import Callable, Mapping

from tightfit.errors import WatchError
from tightfit.watch.sources.abstract_source import AbstractSource, SourceLost
from tightfit.watch.sources.amd import AmdSource
from tightfit.watch.sources.nvml import NvmlSource

_DRIVERS: Mapping[str, Callable[[], AbstractSource]] = {
    "NVIDIA (pip install 'tightfit[watch]')": NvmlSource,
    "AMD (the package amdsmi of ROCm)": AmdSource,
}


def open_source(drivers: Mapping[str, Callable[[], AbstractSource]] | None = None) -> AbstractSource:
    """The first driver that answers.

    Raises:
        WatchError: none does; the message says of each why.
    """
    reasons = []
    for words, driver in (_DRIVERS if drivers is None else drivers).items():
        try:
            return driver()
        except ImportError:
            reasons.append(f"{words}: not installed")
        except SourceLost as error:
            reasons.append(str(error))
    raise WatchError(f"no GPU to watch on this machine ({'; '.join(reasons)}); --simulate shows one without")
