"""Programs that read, change, skip or interrupt what the optimizer's techniques take over: trained right, or refused; never otherwise.

Exact techniques give the weights of the plain run bit for bit; lossy ones stay near them. A refusal is an `ApplyError`, after which nothing is
trained any more: the weights are those of the plain run after some number of its steps.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.attacks.check import one_in_three
from tests.attacks.optimizer_programs_of_others import PROGRAMS
from torch.optim.optimizer import register_optimizer_step_post_hook

from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice
from tightfit.techniques.registry import technique
from tightfit.techniques.session import Session

torch.set_num_threads(1)

# Name, settings, and how far from the plain run the weights may be, as a part of the way that they went; 0 for bit for bit.
TECHNIQUES: dict[str, tuple[str, Mapping[str, Any], float]] = {
    "two passes": ("update_in_backward", {"kernel": "same"}, 0.0),
    "a plan of one pass": ("update_in_backward", {"kernel": "same", "one_pass": True}, 0.0),
    "zero_grad": ("zero_grad", {}, 0.0),
    "for-loop": ("optimizer_kernel", {"kernel": "for-loop"}, 0.0),
    "foreach": ("optimizer_kernel", {"kernel": "foreach"}, 0.0),
    "fused": ("optimizer_kernel", {"kernel": "fused"}, 2e-2),
    "8 bits": ("low_bit_states", {"bits": 8}, 0.15),
    "8 bits in two passes": ("low_bit_states", {"bits": 8, "in_backward": True}, 0.15),
    "factored": ("factored_states", {}, 0.5),
    "bf16, stochastic": ("pure_bf16", {"rounding": "stochastic"}, 0.35),
    "bf16, compensated": ("pure_bf16", {"rounding": "compensated"}, 0.35),
}

IN_TWO = ("two passes", "a plan of one pass", "8 bits in two passes")
IN_BF16 = ("bf16, stochastic", "bf16, compensated")

# What is refused, and with which words; the rest is trained right. What is refused in two passes has trained nothing that a plain run would not.
REFUSED: dict[tuple[str, str], str] = {
    (name, chosen): words
    for names, techniques, words in (
        (("never_clears", "steps_twice"), IN_TWO, "consumed"),
        (("zeroes_through_an_alias",), IN_TWO[1:], "consumed"),
        (("weight_decay_by_hand_before_the_step",), IN_TWO, "was written to|was modified between"),
        (("weight_decay_through_data_before_the_step",), IN_TWO, "was written to|was modified between"),
        (
            (
                "goes_on_with_a_deepcopy",
                "goes_on_with_a_pickle",
                "goes_on_with_what_it_saved",
                "copies_between_backward_and_step",
            ),
            IN_BF16,
            "copy its state_dict",
        ),
    )
    for name in names
    for chosen in techniques
}
# These change weights themselves before the step that is refused.
CHANGED_BY_HAND = (
    "weight_decay_by_hand_before_the_step",
    "weight_decay_through_data_before_the_step",
)
# torch's own error: the script has tensors in float32 beside parameters that the plan has in bfloat16.
# `Tensor.grad_dtype` came with torch 2.9 or 2.10.
_OTHER_DTYPE = r"grad_dtype|a gradient with dtype"
REFUSED_BY_TORCH = {
    (name, chosen): words
    for name, words in (
        ("flat_buffer", _OTHER_DTYPE),
        ("flat_buffer_zeroed_by_the_optimizer", _OTHER_DTYPE),
        ("averages_before_the_step", "expected dtype"),
    )
    for chosen in IN_BF16
}


@dataclasses.dataclass(slots=True)
class Run:
    """What a program leaves: the weights, what it has seen, the weights that it began with and those after each of its optimizers' steps."""

    begun: list[torch.Tensor] = dataclasses.field(default_factory=list)
    weights: list[torch.Tensor] = dataclasses.field(default_factory=list)
    seen: list[Any] = dataclasses.field(default_factory=list)
    after_steps: list[list[torch.Tensor]] = dataclasses.field(default_factory=list)


def run(name: str, chosen: str | None, left: Run) -> None:
    """Fills `left` with what a program leaves, also where it does not come to its end."""
    sessions: list[Session] = []
    models: list[torch.nn.Module] = []

    def weights() -> list[torch.Tensor]:
        return [p.detach().float().clone() for model in models for p in model.parameters()]

    def put(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> Session:
        if model in models:
            sessions.pop().undo()
        else:
            models.append(model)
            left.begun = weights()
        session = Session(model=model, optimizers=optimizers)
        sessions.append(session)
        if chosen is not None:
            kind, settings, _ = TECHNIQUES[chosen]
            where = {"pure_bf16": "precision", "zero_grad": "gradients"}.get(kind, "optimizer")
            choice = Choice(technique=kind, where=where, settings=settings, saves_bytes=0, adds_seconds=0.0, exact=True)
            technique(kind).apply(session, [choice])
            session.guard()
        return session

    torch.default_generator.manual_seed(0)  # torch.manual_seed also notes the stack for each kind of card: 4 ms
    handle = register_optimizer_step_post_hook(lambda *_: left.after_steps.append(weights()))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch says of such programs
            model, left.seen = PROGRAMS[name](put)
        left.weights = [p.detach().float().clone() for p in model.parameters()]
        for session in reversed(sessions):
            session.undo()
        left.weights = [p.detach().float() for p in model.parameters()]
    except Exception:
        left.weights = weights()
        for session in reversed(sessions):
            with contextlib.suppress(ApplyError):
                session.undo()
        raise
    finally:
        handle.remove()


def far(found: list[torch.Tensor], plain: list[torch.Tensor], begun: list[torch.Tensor]) -> float:
    """How far the weights are from the plain run's, as a part of the way that those went."""
    away = sum((a - b).square().sum() for a, b in zip(found, plain, strict=True)).sqrt()
    way = sum((a - b).square().sum() for a, b in zip(plain[: len(begun)], begun, strict=True)).sqrt()
    return (away / way).item()


@functools.cache
def plain_run(name: str) -> Run:
    """The plain run of a program."""
    left = Run()
    run(name, None, left)
    return left


def is_one_of(weights: list[torch.Tensor], known: list[list[torch.Tensor]]) -> bool:
    """Whether a run stands where the plain one stood after one of its steps."""
    return any(all(torch.equal(a, b) for a, b in zip(weights, each, strict=True)) for each in known)


@pytest.mark.parametrize(("name", "chosen"), one_in_three(PROGRAMS, TECHNIQUES))
def test_it_is_trained_right_or_refused(name: str, chosen: str) -> None:
    plain, left = plain_run(name), Run()
    tolerance = TECHNIQUES[chosen][2]
    if (name, chosen) in REFUSED:
        with pytest.raises(ApplyError, match=REFUSED[name, chosen]):
            run(name, chosen, left)
        if chosen in ("two passes", "a plan of one pass"):
            assert is_one_of(left.weights, [plain.begun, *plain.after_steps]) or name in CHANGED_BY_HAND
        return
    if (name, chosen) in REFUSED_BY_TORCH:
        with pytest.raises(RuntimeError, match=REFUSED_BY_TORCH[name, chosen]):
            run(name, chosen, left)
        return
    run(name, chosen, left)
    if tolerance:
        assert far(left.weights, plain.weights, plain.begun) <= tolerance
    else:
        assert all(torch.equal(a, b) for a, b in zip(left.weights, plain.weights, strict=True))
        assert left.seen == plain.seen
