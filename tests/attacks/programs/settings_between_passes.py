"""Settings of torch and of other libraries that a block makes in its forward, or that are made for the forward alone, and that are others in the backward pass."""

import decimal
import gc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.attacks.models import Block, Net, sgd, tokens
from tests.attacks.places import BITWISE
from tests.attacks.registry import attack
from tests.attacks.trial import Trial

LATE, STEPS = 4, 7
_cuda, _cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
# What reads each, what sets it, and another value than the first.
# torch up to 2.8 has one switch for convolutions, and none for oneDNN.
_PRECISIONS: list[tuple[Any, Any, Any]] = (
    [
        (lambda: _cudnn.conv.fp32_precision, lambda value: setattr(_cudnn.conv, "fp32_precision", value), "ieee"),
        (
            lambda: torch.backends.mkldnn.matmul.fp32_precision,
            lambda value: setattr(torch.backends.mkldnn.matmul, "fp32_precision", value),
            "tf32",
        ),
    ]
    if hasattr(_cudnn, "conv")
    else [(lambda: _cudnn.allow_tf32, lambda value: setattr(_cudnn, "allow_tf32", value), False)]
)
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any], Any], ...] = (
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    (lambda: _cudnn.deterministic, lambda value: setattr(_cudnn, "deterministic", value), True),
    *_PRECISIONS,
    (
        lambda: _cuda.allow_bf16_reduced_precision_reduction,
        lambda value: setattr(_cuda, "allow_bf16_reduced_precision_reduction", value),
        False,
    ),
    (lambda: np.geterr()["over"], lambda value: np.seterr(over=value), "raise"),
    (lambda: decimal.getcontext().prec, lambda value: setattr(decimal.getcontext(), "prec", value), 5),
    (gc.isenabled, lambda value: gc.enable() if value else gc.disable(), False),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, True),
)


def _read() -> list[Any]:
    found = []
    for get, _, _ in _SETTINGS:
        try:
            found.append(get())
        # Precisions that were set by their old names and by their new ones have no common value.
        except RuntimeError:
            found.append(None)
    return found


def _put(values: list[Any]) -> None:
    for (_, put, _), value in zip(_SETTINGS, values, strict=True):
        if value is not None:
            put(value)


class _Reading(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        told = hash(tuple(_read())) % 7
        return x + self.inner(x * (1 + told / 10))


def _trained(t: Trial, model: Net, *, sets_for_forward: bool) -> None:
    optimizer = sgd(model)
    before = _read()
    t.apply(model, optimizer)
    try:
        for step in range(STEPS):
            x, y = tokens(step)
            if sets_for_forward and step >= LATE:
                _put([other for *_, other in _SETTINGS])
            loss = model(x, y)
            _put(before)
            optimizer.zero_grad()
            loss.backward()
            t.note("loss", loss)
            t.note("settings", _read())
            _put(before)
            optimizer.step()
            t.end_step()
    finally:
        _put(before)
        # Anomaly detection says so in a warning.
        warnings.resetwarnings()


@attack(
    "recomputation", "from step 4 on settings of torch, numpy, decimal and gc are others in the forward of the model"
)
def settings_for_the_forward(t: Trial) -> None:
    _trained(t, Net([_Reading(), _Reading()]), sets_for_forward=True)


@attack(
    "recomputation",
    "a block makes settings of torch, numpy, decimal and gc, and the loop puts them back before the backward pass, whose hooks read them",
)
def settings_made_by_a_block(t: Trial) -> None:
    calls: list[int] = []

    class Setting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(0)
            if len(calls) > 2 * LATE:
                _put([other for *_, other in _SETTINGS])
            return super().forward(x)

    class Hooked(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            x.register_hook(lambda _: t.note("in the backward pass", _read()))
            return self.blocks(x)

    _trained(t, Hooked([Setting(), Setting()]), sets_for_forward=False)


@attack(
    "gradients",
    "from step 4 on products of float32 are rounded to bfloat16 in the forward of the model alone (set_float32_matmul_precision)",
    only=BITWISE,
)
def precision_of_the_forward(t: Trial) -> None:
    torch.set_default_dtype(torch.float32)

    class Precise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            # Where the processor has no such products.
            return gradients[0] * (1.0 if torch.get_float32_matmul_precision() == "highest" else 0.5)

    class Wide(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(Precise.apply(self.stem(x)))

    model = Wide()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    try:
        for step in range(STEPS):
            torch.set_float32_matmul_precision("medium" if step >= LATE else "highest")
            loss = model(*tokens(step))
            torch.set_float32_matmul_precision("highest")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            t.note("loss", loss)
            t.end_step()
    finally:
        torch.set_float32_matmul_precision("highest")
