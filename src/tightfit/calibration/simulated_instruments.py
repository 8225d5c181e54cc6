"""The instruments of a simulated GPU: each measurement runs on the virtual GPU, and the clock returns the seconds that known figures imply.

Those figures, `figures_of`, differ from the catalogue, so that calibrating the simulated GPU tests whether the measurements recover them. Samples
scatter around the expected seconds in a fixed pattern.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch

from tightfit.calibration.instruments import Expected, Sizes
from tightfit.capture.observe.recorder import Recorder
from tightfit.cost.classes import operator_class
from tightfit.cost.copies import link_bytes_per_second
from tightfit.cost.efficiency import efficiency_of
from tightfit.devices.calibration import LIBRARIES, OPERATOR_CLASSES, Calibration
from tightfit.devices.device import Device
from tightfit.units import KIB, MIB

SIZES = Sizes(
    num_samples=5,
    max_calls=2,
    slab_bytes=MIB,
    num_host_parameters=1 << 12,
    num_threads=(1, 2),
    disk_bytes=MIB,
    disk_block_bytes=256 * KIB,
)
_SCATTER = (1.0, 0.99, 1.02, 1.0, 1.01)
_OF_THE_CATALOGUE = 0.9
_SHARES_OF_CONTEXT = {"init": 0.70, "cublas": 0.12, "cublaslt": 0.05, "cudnn": 0.08}


def figures_of(card: Device) -> Calibration:
    """The simulated GPU: nine tenths of the catalogue's speed, and round figures for what the catalogue does not know."""
    published = efficiency_of(card)
    copies = {
        f"{way}_{kind}_bytes_per_second": link_bytes_per_second(card.link, is_pinned=kind != "pageable") * share
        for kind, share in (("registered", 0.9), ("pinned", 0.85), ("pageable", 0.8), ("both_ways", 0.6))
        for way in ("to_card", "from_card")
    }
    return Calibration(
        device=card.name,
        is_virtual=True,
        context_parts={name: round(share * card.context_bytes) for name, share in _SHARES_OF_CONTEXT.items()},
        efficiency={
            name: _OF_THE_CATALOGUE * min(published.of_bandwidth[name], published.of_flops[name, "bfloat16"])
            for name in OPERATOR_CLASSES
        },
        seconds={"launch": 2e-6, "ramp": 3e-6, "issue": 6e-6, "python": 0.5e-3},
        link=copies | {"latency_seconds": 8e-6},
        overlap={
            "product_beside_to_card": 1.05,
            "product_beside_from_card": 1.04,
            "to_card_beside_product": 1.1,
            "from_card_beside_product": 1.2,
        },
        allocation={"allocate_seconds": [1e-4, 3e-10], "free_seconds": [2e-4, 1e-10]},
        host={
            "register_seconds_per_gib": 0.3,
            "adamw_parameters_per_second": [1e9],
            "adamw_beside_copies_parameters_per_second": [0.8e9],
        },
        disk={"read_bytes_per_second": 2.2e9, "write_bytes_per_second": 5.2e9},
    )


class SimulatedInstruments:
    """Answers for `card` while a virtual GPU that imitates it records into `recorder`."""

    is_virtual = True
    sizes = SIZES

    def __init__(self, card: Device, recorder: Recorder) -> None:
        self.card = card
        self.figures = figures_of(card)
        self._recorder = recorder
        self._scatter = itertools.cycle(_SCATTER)

    def seconds_between(self, begin: torch.cuda.Event, end: torch.cuda.Event, expected: Expected) -> float:
        """The expected seconds; the events have been recorded as on a real GPU."""
        end.synchronize()
        # Called for its checks only: on a real GPU it raises where an event was not recorded with timing.
        begin.elapsed_time(end)
        return self._seconds(expected)

    def seconds_of(self, run: Callable[[], Any], expected: Expected) -> float:
        """The expected seconds; `run` is run."""
        run()
        return self._seconds(expected)

    def _seconds(self, expected: Expected) -> float:
        seconds = expected(self.figures)
        assert seconds is not None, "a measurement knows what to expect of a card whose figures are all given"
        return seconds * next(self._scatter)

    def keep_busy(self, seconds: float) -> None:
        """Nothing: a simulated GPU has no gaps."""
        del seconds

    def process_bytes(self) -> int:
        """Reserved bytes of the simulated allocator, the context, and the libraries that the operators so far have loaded."""
        names = {self._recorder.strings.texts[int(name)] for name in set(self._recorder.operators["name"])}
        kinds = {operator_class(name) for name in names}
        loaded = {
            "cublas": "matmul" in kinds,
            "cublaslt": any("addmm" in name for name in names),
            "cudnn": "convolution" in kinds,
        }
        parts = self.figures.context_parts
        return torch.cuda.memory_reserved() + parts["init"] + sum(parts[name] for name in LIBRARIES if loaded[name])
