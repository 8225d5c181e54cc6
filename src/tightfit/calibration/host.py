"""Parameters per second of torch's fused AdamW on the CPU, by number of threads, alone and while copies to the GPU run.

An update of float32 parameters reads four elements for each parameter and writes three, 28 bytes, so it is bound by the host's memory bandwidth,
which copies to and from the GPU use too.
"""

import functools
import math

import torch

from tightfit.calibration.instruments import Findings, Instruments, summary
from tightfit.calibration.links import RegisteredSlab
from tightfit.devices.calibration import Calibration

_KEYS = ("adamw_parameters_per_second", "adamw_beside_copies_parameters_per_second")
_MAX_SAMPLES = 4


def host(instruments: Instruments) -> Findings:
    """Parameters per second of the fused AdamW on the host, by number of threads, alone and beside copies."""
    sizes = instruments.sizes
    parameter = torch.zeros(sizes.num_host_parameters)
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    # The first step allocates the states.
    optimizer.step()
    slab = RegisteredSlab(sizes.slab_bytes)
    card = torch.empty(sizes.slab_bytes, dtype=torch.uint8, device="cuda")
    stream, copy_seconds = torch.cuda.Stream(), sizes.slab_bytes / instruments.card.link.bytes_per_second
    before = torch.get_num_threads()
    rows, rates = [], {key: [] for key in _KEYS}
    for num_threads in sizes.num_threads:
        torch.set_num_threads(num_threads)
        # 0 makes the first key run without copies; its seconds then say how many copies the second one needs.
        step_seconds = 0.0
        for key in _KEYS:
            # As many copies are queued as outlast the update at the link's own limit.
            num_copies = math.ceil(2 * step_seconds / copy_seconds)
            samples = []
            for _ in range(min(_MAX_SAMPLES, sizes.num_samples)):
                with torch.cuda.stream(stream):
                    for _ in range(num_copies):
                        card.copy_(slab.tensor, non_blocking=True)
                expected = functools.partial(_expected, sizes.num_host_parameters, num_threads, key)
                samples.append(instruments.seconds_of(optimizer.step, expected))
                torch.cuda.synchronize()
            row = summary(
                f"AdamW on the host, threads: {num_threads}{', beside copies' if num_copies else ''}",
                "parameters/s",
                [sizes.num_host_parameters / seconds for seconds in samples],
            )
            rows.append(row)
            # The runtime reads these by position: one entry for each entry of `adamw_threads`.
            rates[key].append(row.median)
            step_seconds = sizes.num_host_parameters / row.median
    torch.set_num_threads(before)
    slab.close()
    threads = [float(count) for count in sizes.num_threads]
    return Findings(rows=rows, tables={"host": {"adamw_threads": threads, **rates}})


def _expected(num_parameters: int, num_threads: int, key: str, calibration: Calibration | None) -> float | None:
    return num_parameters / (num_threads * calibration.host[key][0]) if calibration else None
