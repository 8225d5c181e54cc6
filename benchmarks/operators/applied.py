"""Every operator and module in a block of a small net, trained three steps plainly and with techniques applied, to the bit."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from tests.attacks.harness import run
from tests.attacks.models import Block, Net, train
from tests.attacks.registry import Attack
from tests.attacks.trial import Trial
from torch import nn
from torch.utils._pytree import tree_map

from benchmarks.operators.listed import Call, calls, operators, tensors_of

TECHNIQUES = (
    "checkpointing",
    "offloaded checkpointing, selective",
    "activation offload",
    "trained weight streaming",
    "update in backward",
)
_NUM_CALLS, _NUM_STEPS = 2, 3
Row = tuple[str, str, str, str]


class _OperatorBlock(Block):
    """A block whose parameters are what the operator is given, scaled by the block's input."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call
        self.given = nn.ParameterList(
            nn.Parameter(t.detach().clone(), requires_grad=_is_trained(t)) for t in call.tensors
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens of the same shape."""
        scale = 1 + 0.01 * x.mean()
        return (
            x
            + self.inner(x)
            + _number(self.call.run([t * scale if t.requires_grad else t.clone() for t in self.given]))
        )


class _ModuleBlock(Block):
    """A block with a module, whose inputs are scaled by the block's."""

    def __init__(self, kind: Any, sample: Any) -> None:
        super().__init__()
        made, self.sample = sample.constructor_input, sample.forward_input
        self.inside = kind.module_cls(*made.args, **made.kwargs).double()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens of the same shape."""
        scale = self.gain * (1 + 0.01 * x.mean())

        def given(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            return value.detach().double() * scale if value.is_floating_point() else value.clone()

        args, kwargs = tree_map(given, (tuple(self.sample.args), dict(self.sample.kwargs)))
        return x + self.inner(x) + _number(self.inside(*args, **kwargs))


def _is_trained(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.is_floating_point() and bool(tensor.numel())


def _number(result: Any) -> torch.Tensor:
    """A number of all that was computed, small whatever it is."""
    parts = [torch.zeros((), dtype=torch.float64)]
    for each in tensors_of(result):
        if each.requires_grad:
            dense = each if each.layout is torch.strided else each.to_dense()
            real = torch.view_as_real(dense) if dense.is_complex() else dense
            parts.append(0.1 * torch.tanh(0.1 * torch.nan_to_num(real)).double().mean())
    return torch.stack(parts).sum()


def found_of_operator(name: str) -> list[Row]:
    """For each call and technique: the name, the technique, how it ended, and why."""
    operator = dict(operators())[name]
    if not operator.supports_autograd:
        return []
    given = calls(name, operator, _NUM_CALLS, torch.float64, grad=True)
    return [
        row for call in given if any(map(_is_trained, call.tensors)) for row in _tried(name, [_OperatorBlock, call])
    ]


def modules() -> dict[str, Any]:
    """Names, and what torch knows of them."""
    from torch.testing._internal.common_modules import module_db

    return {each.name: each for each in module_db}


def found_of_module(name: str) -> list[Row]:
    """Likewise."""
    kind = modules()[name]
    samples = list(kind.module_inputs_func(kind, device="cpu", dtype=torch.float64, requires_grad=False, training=True))
    few = itertools.islice(samples[:: max(1, len(samples) // _NUM_CALLS)], _NUM_CALLS)
    return [row for sample in few for row in _tried(name, [_ModuleBlock, kind, sample])]


def _tried(name: str, block: Sequence[Any]) -> list[Row]:
    kind, *args = block

    def program(trial: Trial) -> None:
        torch.manual_seed(5)
        train(trial, Net([kind(*args), Block(), kind(*args)]), num_steps=_NUM_STEPS)

    rows = []
    for technique in TECHNIQUES:
        try:
            verdict = run(Attack(name=name, kind="changes", what=name, program=program), technique)
        except AssertionError:
            # It does not train plainly either.
            break
        rows.append((name, technique, str(verdict.outcome), verdict.reason))
    return rows
