"""Prints, as JSON, the births and deaths of storages of each model: `worker.py real` on the CPU, `worker.py virtual` on the virtual GPU.

A birth is the number of bytes; a death is minus the number of the birth, counted from one.
"""

import gc
import json
import os
import sys
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# An optimizer's counter of steps is made by one of these, and stays on the host beside a card too.
COUNTERS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.zeros.default)


class RealTracker(TorchDispatchMode):
    """Notes every new storage on the host."""

    def __init__(self):
        super().__init__()
        self.events, self.num_born, self.alive = [], 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in COUNTERS and out.dim() == 0 and out.dtype == torch.float32:
            self.alive.setdefault(out.untyped_storage()._cdata, None)
            return out
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage.nbytes() and storage._cdata not in self.alive:
                    self.num_born += 1
                    self.events.append(storage.nbytes())
                    self.alive[storage._cdata] = weakref.ref(storage, self._death(storage._cdata, self.num_born))
        return out

    def _death(self, address, number):
        def gone(_reference):
            del self.alive[address]
            self.events.append(-number)

        return gone


def real(run):
    with RealTracker() as tracker:
        run("cpu")
        gc.collect()
    return tracker.events


def virtual():
    from tightfit.capture.dispatch.handlers import HANDLERS
    from tightfit.capture.dispatch.virtual import VirtualGpu
    from tightfit.capture.observe.recorder import Recorder
    from tightfit.capture.patches import eager, native, torch_api
    from tightfit.tape import EventKind

    class NoKernels:
        """The host's kernels take no memory from the device's allocator."""

        def add(self, operator, args, kwargs, outputs, remembered=None):
            pass

    eager.keep_compiler_out()
    native.pretend_cuda_is_built()
    torch.cuda._lazy_init = lambda: None
    recorder = Recorder()
    gpu = VirtualGpu(recorder, HANDLERS, NoKernels(), {})
    torch_api.install(gpu)

    def trace(run):
        begin, allocated_at = len(recorder.events["kind"]), len(recorder.storages["num_bytes"])
        with gpu:
            run("cuda")
        gc.collect()
        rows = zip(recorder.events["kind"][begin:], recorder.events["storage"][begin:], strict=True)
        return [
            recorder.storages["num_bytes"][s] if kind == EventKind.ALLOCATE else -(s - allocated_at + 1)
            for kind, s in rows
        ]

    return trace


if __name__ == "__main__":
    from models import MODELS

    trace = virtual() if sys.argv[1] == "virtual" else real
    torch.set_num_threads(1)
    gc.disable()
    print(json.dumps({name: trace(run) for name, run in MODELS.items()}), flush=True)
    os._exit(0)
