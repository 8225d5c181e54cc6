"""The block of `tightfit.leaks`: what grows is measured at the ends of steps, and holders are named when the block is left, while its names are there.

A step ends with `step()`, or else when the optimizers have stepped, or else with each outermost call of a module.
"""

import importlib
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from tightfit.errors import UsageError
from tightfit.errors.faults import internal_error
from tightfit.runtime.leaks.found_leaks import Leak, LeakReport
from tightfit.runtime.leaks.growing_containers import lengths
from tightfit.runtime.leaks.live_storages import LiveStorages
from tightfit.runtime.leaks.process_memory import malloc_use, resident_bytes
from tightfit.runtime.leaks.robust_growth import MIN_STEPS, NUM_WARM_UP
from tightfit.runtime.leaks.step_samples import StepEnd, StepEnds, beside_torch
from tightfit.runtime.leaks.verdict import leaks_of
from tightfit.runtime.step_counter import StepCounter
from tightfit.torch_hooks.calls import on_outermost_call
from tightfit.units import KIB

EndKind = Literal["marked", "optimizer", "call"]
# Growth of the process beside torch's tensors, from which on it is looked at what Python's containers hold.
_MIN_BESIDE_TORCH = 256 * KIB


class LeakWatch:
    """The context manager that `tightfit.leaks` returns. `leaks` is filled when the block has been left."""

    def __init__(self, *, quiet: bool) -> None:
        self.report = LeakReport(leaks=(), num_steps=0, note="the block has not been left")
        self._quiet = quiet
        self._was_entered = self._is_on = False
        self._storages = LiveStorages()
        self._ends: dict[EndKind, StepEnds] = {kind: StepEnds() for kind in ("marked", "optimizer", "call")}
        self._steps = StepCounter()
        self._leaves: list[Callable[[], object]] = []
        self._lengths: dict[int, int] = {}
        self._num_steps_at_lengths = 0

    @property
    def leaks(self) -> tuple[Leak, ...]:
        """What leaks, fastest first."""
        return self.report.leaks

    def step(self) -> None:
        """Marks the end of a step. Once it was called, no other steps count.

        Raises:
            UsageError: outside of the block.
        """
        if not self._is_on:
            raise UsageError(
                "step() was called outside of the block: write `with tightfit.leaks() as found:` around the loop"
            )
        self._end("marked")

    def explain(self) -> str:
        """The report as text."""
        return self.report.explain()

    __str__ = explain

    def __enter__(self) -> Self:
        if self._was_entered:
            raise UsageError("a block of leaks is entered once: call tightfit.leaks() again for another one")
        self._was_entered = True
        # Torch imports its compiler when a mode is first called. That would be in the first step, and Python's collector would run meanwhile.
        importlib.import_module("torch._dynamo")
        self._storages.see_existing()
        self._steps.begin()
        try:
            self._leaves.append(register_optimizer_step_post_hook(self._after_optimizer).remove)
            self._leaves.append(on_outermost_call(self))
            self._storages.__enter__()
            self._is_on = True
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_on = False
        self._storages.__exit__(None, None, None)
        self._leave()
        stepped = self._chosen()
        if len(stepped.ends) < MIN_STEPS:
            note = f"needs {MIN_STEPS} steps; this block has {stepped.num_steps} (call step() where one ends)"
            self.report = LeakReport(leaks=(), num_steps=stepped.num_steps, note=note)
        else:
            since = stepped.num_steps - self._num_steps_at_lengths
            self.report = self._searched(stepped, since)
        self._lengths = {}
        if not self._quiet and (self.report.leaks or self.report.note):
            sys.stderr.write(f"tightfit: {self.report.explain()}\n")

    def _searched(self, stepped: StepEnds, since: int) -> LeakReport:
        """The report of the search; a fault of ours in it is a note, as the program has nothing to do with it."""
        try:
            leaks = leaks_of(stepped, self._storages, self._lengths, since)
        except Exception as error:  # noqa: BLE001 - whatever it is, the program goes on
            own = internal_error(error, "the search for leaks")
            return LeakReport(leaks=(), num_steps=stepped.num_steps, note=str(own))
        return LeakReport(leaks=leaks, num_steps=stepped.num_steps, note="")

    def before_outermost_call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A turn of a loop without optimizers begins, and with it the last one has ended."""
        if not self._ends["marked"].num_steps and not self._ends["optimizer"].num_steps:
            self._end("call")

    def _after_optimizer(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._ends["marked"].num_steps:
            return
        before = self._steps.num_steps
        self._steps.count(optimizer)
        if self._steps.num_steps > before:
            self._end("optimizer")

    def _end(self, kind: EndKind) -> None:
        ends = self._ends[kind]
        ends.add(self._take)
        self._storages.step = ends.num_steps
        # Python's containers are gone through once, when there is a reason to.
        if not self._lengths and ends.num_steps > NUM_WARM_UP and beside_torch(ends.ends) > _MIN_BESIDE_TORCH:
            self._lengths, self._num_steps_at_lengths = lengths(), ends.num_steps

    def _chosen(self) -> StepEnds:
        return next((ends for ends in self._ends.values() if ends.num_steps), self._ends["call"])

    def _take(self) -> StepEnd:
        self._storages.work_off()
        allocated = reserved = outside = 0
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            figures = torch.cuda.memory_stats()
            # Active: what waits for another stream is not free yet.
            allocated = figures.get("active_bytes.all.current", 0)
            reserved = figures.get("reserved_bytes.all.current", 0)
            free, total = torch.cuda.mem_get_info()
            outside = total - free - reserved
        return StepEnd(
            bytes_by_site=+self._storages.bytes_by_site,
            bytes_by_device=+self._storages.bytes_by_device,
            card_allocated=allocated,
            card_reserved=reserved,
            card_outside=outside,
            resident=resident_bytes(),
            malloc=malloc_use(),
        )

    def _leave(self) -> None:
        for leave in self._leaves:
            leave()
        self._leaves.clear()
