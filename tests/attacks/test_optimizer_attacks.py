"""Programs that read, change, skip or interrupt what the optimizer's techniques take over: trained right, or refused; never otherwise.

Exact techniques give the weights of the plain run bit for bit; lossy ones stay near them. A refusal is an `ApplyError`, after which nothing is
trained any more: the weights are those of the plain run after some number of its steps.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.attacks.optimizer_programs import PROGRAMS

from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice
from tightfit.techniques.catalogue import technique
from tightfit.techniques.session import Session

torch.set_num_threads(1)

# Name, settings, and how far from the plain run the weights may be, as a part of the way that they went; 0 for bit for bit.
TECHNIQUES: dict[str, tuple[str, Mapping[str, Any], float]] = {
    "two passes": ("update_in_backward", {"kernel": "same"}, 0.0),
    "one pass": ("update_in_backward", {"kernel": "same", "one_pass": True}, 0.0),
    "zero_grad": ("zero_grad", {}, 0.0),
    "for-loop": ("optimizer_kernel", {"kernel": "for-loop"}, 0.0),
    "foreach": ("optimizer_kernel", {"kernel": "foreach"}, 0.0),
    "fused": ("optimizer_kernel", {"kernel": "fused"}, 1e-3),
    "8 bits": ("low_bit_states", {"bits": 8}, 0.15),
    "8 bits in two passes": ("low_bit_states", {"bits": 8, "in_backward": True}, 0.15),
    "8 bits in one pass": ("low_bit_states", {"bits": 8, "in_backward": True, "one_pass": True}, 0.15),
    "factored": ("factored_states", {}, 0.5),
    "bf16, stochastic": ("pure_bf16", {"rounding": "stochastic"}, 0.35),
    "bf16, compensated": ("pure_bf16", {"rounding": "compensated"}, 0.35),
}

# What is refused, and why that is right: the rest is trained right.
REFUSED: dict[tuple[str, str], str] = {}


def run(name: str, chosen: str | None) -> tuple[list[torch.Tensor], list[Any], list[torch.Tensor]]:
    """The weights that a program leaves, what it has seen, and the weights that it began with."""
    begun: list[torch.Tensor] = []
    sessions: list[Session] = []
    models: list[torch.nn.Module] = []

    def put(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> Session:
        if model in models:
            sessions.pop().undo()
        else:
            models.append(model)
            begun.extend(p.detach().clone() for p in model.parameters())
        session = Session(model=model, optimizers=optimizers)
        sessions.append(session)
        if chosen is not None:
            kind, settings, _ = TECHNIQUES[chosen]
            where = {"pure_bf16": "precision", "zero_grad": "gradients"}.get(kind, "optimizer")
            choice = Choice(
                technique=kind, where=where, settings=settings, saves_bytes=0, adds_seconds=0.0, exact=True
            )
            technique(kind).apply(session, [choice])
            session.guard()
        return session

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of such programs
        model, seen = PROGRAMS[name](put)
    for session in reversed(sessions):
        session.undo()
    return [p.detach().float() for p in model.parameters()], seen, begun


def far(found: list[torch.Tensor], plain: list[torch.Tensor], begun: list[torch.Tensor]) -> float:
    """How far the weights are from the plain run's, as a part of the way that those went."""
    away = sum((a - b).square().sum() for a, b in zip(found, plain, strict=True)).sqrt()
    way = sum((a - b).square().sum() for a, b in zip(plain[: len(begun)], begun, strict=True)).sqrt()
    return (away / way).item()


@pytest.fixture(scope="module")
def plain_runs() -> dict[str, Any]:
    """The plain runs, each made once."""
    return {name: run(name, None) for name in PROGRAMS}


@pytest.mark.parametrize("chosen", TECHNIQUES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_trained_right_or_refused(name: str, chosen: str, plain_runs: dict[str, Any]) -> None:
    plain, seen, begun = plain_runs[name]
    tolerance = TECHNIQUES[chosen][2]
    try:
        found, also_seen, _ = run(name, chosen)
    except ApplyError as error:
        assert (name, chosen) in REFUSED, error
        assert REFUSED[name, chosen] in str(error)
        return
    assert (name, chosen) not in REFUSED
    if tolerance:
        assert far(found, plain, begun) <= tolerance
    else:
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)), far(found, plain, begun)
        assert also_seen == seen
