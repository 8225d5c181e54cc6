"""A block begins at step 4 to take off the mean over all tokens, detached: no graph shows it, and what switches it on is in no snapshot of the model's state."""

import array
import ctypes
import decimal
import functools
import gc
import logging
import mmap
import os
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.attacks.models import WIDTH, Block, Net, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn

LATE, STEPS = 4, 6


def _shifted(x: torch.Tensor, late: bool) -> torch.Tensor:
    shift = torch.full([x.shape[-1]], 0.1, dtype=x.dtype)
    if late:
        shift = x.detach().mean(0).mean(0)
    return x - shift


def _switched(t: Trial, put: Callable[[int], Any], is_late: Callable[[], bool]) -> None:
    """Trains; `put` is given the number of each step, and the blocks ask `is_late`."""

    class Shifted(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.full((WIDTH,), 0.1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shift = self.shift
            if is_late():
                shift = x.detach().mean((0, 1))
            return super().forward(x - shift)

    put(0)
    try:
        train(t, Net([Shifted(), Shifted()]), num_steps=STEPS, before=put)
    finally:
        put(0)


@attack("parts", "switched on by an array of numpy's that a closure holds", only=EXACT)
def switched_by_numpy(t: Trial) -> None:
    phase = np.zeros(())
    _switched(t, functools.partial(phase.fill), lambda: float(phase) >= LATE)


@attack(
    "parts",
    "from step 4 on a detached mean over width is one over tokens: -1 and -2, whose hashes are the same",
    only=EXACT,
)
def another_dimension_by_numpy(t: Trial) -> None:
    phase = np.zeros(())

    class Centred(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            over = -2 if float(phase) >= LATE else -1
            rows = x.flatten(0, 1)
            return super().forward((rows - rows.detach().mean(over, keepdim=True)).view(x.shape))

    train(t, Net([Centred(), Centred()]), num_steps=STEPS, before=phase.fill)


@attack("parts", "switched on by a field of a structured array", only=EXACT)
def switched_by_field(t: Trial) -> None:
    table = np.zeros(3, dtype=[("step", "i4"), ("rate", "f8")])

    def put(step: int) -> None:
        table["step"][1] = step

    _switched(t, put, lambda: table["step"][1] >= LATE)


@attack("parts", "switched on by a number of C's", only=EXACT)
def switched_by_ctypes(t: Trial) -> None:
    number = ctypes.c_int(0)
    _switched(t, lambda step: setattr(number, "value", step), lambda: number.value >= LATE)


@attack("parts", "switched on by a byte of an array that is seen through a memoryview", only=EXACT)
def switched_by_memoryview(t: Trial) -> None:
    held, other = bytearray(2), array.array("i", [0])
    view = memoryview(held)

    def put(step: int) -> None:
        held[1] = other[0] = step

    _switched(t, put, lambda: view[1] >= LATE and other[0] >= LATE)


@attack("parts", "switched on by memory that is shared with other processes", only=EXACT)
def switched_by_shared_memory(t: Trial) -> None:
    shared = mmap.mmap(-1, 16)
    _switched(t, lambda step: shared.__setitem__(0, step), lambda: shared[0] >= LATE)


@attack("parts", "switched on by a level of logging", only=EXACT)
def switched_by_logging(t: Trial) -> None:
    log = logging.getLogger("attacks.phase")
    _switched(
        t,
        lambda step: log.setLevel(logging.DEBUG if step >= LATE else logging.ERROR),
        lambda: log.isEnabledFor(logging.DEBUG),
    )


@attack("parts", "switched on by a setting of torch's products", only=EXACT)
def switched_by_setting_of_torch(t: Trial) -> None:
    def put(step: int) -> None:
        torch.backends.cudnn.benchmark = step >= LATE

    _switched(t, put, lambda: torch.backends.cudnn.benchmark)


@attack("parts", "switched on by the seed that a generator was given", only=EXACT)
def switched_by_seed(t: Trial) -> None:
    chance = torch.Generator()
    _switched(t, chance.manual_seed, lambda: chance.initial_seed() >= LATE)


@attack("parts", "switched on by the default of a function's argument, which is replaced", only=EXACT)
def switched_by_default(t: Trial) -> None:
    def is_late(step: int = 0) -> bool:
        return step >= LATE

    _switched(t, lambda step: setattr(is_late, "__defaults__", (step,)), is_late)


@attack("parts", "switched on by an attribute of a metaclass", only=EXACT)
def switched_by_metaclass(t: Trial) -> None:
    class Phased(type):
        step = 0

    class Config(metaclass=Phased):
        pass

    _switched(t, lambda step: setattr(Phased, "step", step), lambda: Config.step >= LATE)


@attack("parts", "switched on by a generator of Python's that the loop sends the step to", only=EXACT)
def switched_by_coroutine(t: Trial) -> None:
    def phases() -> Any:
        step = 0
        while True:
            sent = yield step
            step = step if sent is None else sent

    phase = phases()
    next(phase)
    _switched(t, phase.send, lambda: next(phase) >= LATE)


@attack("parts", "switched on by a module that is looked up in sys.modules", only=EXACT)
def switched_by_module(t: Trial) -> None:
    sys.modules["attacks_phase"] = module = types.ModuleType("attacks_phase")
    _switched(t, lambda step: setattr(module, "step", step), lambda: vars(sys.modules["attacks_phase"])["step"] >= LATE)


@attack("parts", "switched on by an event that another thread sets", only=EXACT)
def switched_by_event(t: Trial) -> None:
    event = threading.Event()

    def put(step: int) -> None:
        thread = threading.Thread(target=event.set if step >= LATE else event.clear)
        thread.start()
        thread.join()

    _switched(t, put, event.is_set)


@attack(
    "parts",
    "switched on by the name of the thread, the precision of decimals and a threshold of the garbage collector",
    only=EXACT,
)
def switched_by_process_settings(t: Trial) -> None:
    begin = gc.get_threshold()

    def put(step: int) -> None:
        threading.current_thread().name = f"phase {step}"
        decimal.getcontext().prec = 28 + step
        gc.set_threshold(begin[0] + step, *begin[1:])

    def is_late() -> bool:
        told = [threading.current_thread().name[-1], decimal.getcontext().prec - 28, gc.get_threshold()[0] - begin[0]]
        return all(int(each) >= LATE for each in told)

    _switched(t, put, is_late)
    threading.current_thread().name = "MainThread"


@attack("parts", "switched on by a file that appears", only=EXACT)
def switched_by_file(t: Trial) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "late")

        def put(step: int) -> None:
            if step == LATE:
                open(path, "w").close()

        _switched(t, put, lambda: os.path.exists(path))


@attack("parts", "switched on by a filter of warnings", only=EXACT)
def switched_by_warnings(t: Trial) -> None:
    class Phase(UserWarning):
        pass

    def put(step: int) -> None:
        if step == LATE:
            warnings.simplefilter("ignore", Phase)

    _switched(t, put, lambda: any(each[2] is Phase for each in warnings.filters))


@attack(
    "parts",
    "an equation of einsum, an index and a dimension that an array of numpy's chooses, without gradients",
    only=EXACT,
)
def rows_chosen_by_numpy(t: Trial) -> None:
    phase = np.zeros((), dtype=np.int64)

    class Chosen(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            late = int(phase >= LATE)
            own = x.detach()
            own = torch.einsum(("bts->bts", "bts->bst")[late], own).transpose(1, 1 + late)
            own = own.roll(late, 0) if late else own.clone()
            return super().forward(x) * (1 + 0.1 * own.tanh())

    train(t, Net([Chosen(), Chosen()]), num_steps=STEPS, before=phase.fill)


@attack("clean", "a rate that an array of numpy's holds changes in each step", only=EXACT)
def rate_in_numpy(t: Trial) -> None:
    rate = np.zeros(())

    class Rated(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) * (1 + float(rate))

    train(t, Net([Rated(), Rated()]), num_steps=STEPS, before=lambda step: rate.fill(0.1 * step))


@attack(
    "parts",
    "a loss is divided by a constant, and from step 4 on by its own mean, as an array of numpy's says",
    only=EXACT,
)
def loss_switched_by_numpy(t: Trial) -> None:
    phase = np.zeros(())

    class Divided(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            each = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
            divisor = torch.tensor(1.5, dtype=each.dtype)
            if phase >= LATE:
                divisor = each.detach().mean()
            return (each / divisor).mean()

    train(t, Divided(), num_steps=STEPS, before=phase.fill)


@attack(
    "parts",
    "a scripted function is told by an array of numpy's to take off the mean over all tokens, detached",
    only=EXACT,
)
def switched_in_a_scripted_function(t: Trial) -> None:
    phase = np.zeros(())
    shifted = torch.jit.script(_shifted)

    class Scripted(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(shifted(x, bool(phase >= LATE)))

    train(t, Net([Scripted(), Scripted()]), num_steps=STEPS, before=phase.fill)


@attack("parts", "what begins late is called where torch's protocols are switched off", only=EXACT)
def switched_without_protocols(t: Trial) -> None:
    phase = np.zeros(())

    class Hidden(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch._C.DisableTorchFunction():
                shift = x.detach().mean((0, 1)) if phase >= LATE else torch.full((WIDTH,), 0.1, dtype=x.dtype)
                x = x - shift
            return super().forward(x)

    train(t, Net([Hidden(), Hidden()]), num_steps=STEPS, before=phase.fill)


@attack("parts", "a part of each block is compiled as one graph", only=EXACT)
def compiled_as_one_graph(t: Trial) -> None:
    torch._dynamo.reset()

    class Compiled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.mixed = torch.compile(lambda x: torch.tanh(x) * 2 + x.sin(), backend="eager", fullgraph=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.mixed(x))

    train(t, Net([Compiled(), Compiled()]), num_steps=4)
