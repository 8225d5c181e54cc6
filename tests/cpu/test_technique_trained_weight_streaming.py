"""Trained weights at the host between their uses, with gradients and optimizer states, on real numbers and on the virtual GPU: what is trained is what is trained
without it, whatever programs do to weights and gradients meanwhile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conformance.large_models import Decoder
from tests.cpu.training_loops import LOOPS, Optimizer, gradients, train
from torch import nn

from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.session import Session

NUM_BLOCKS = 4


def small() -> Decoder:
    torch.manual_seed(0)
    return Decoder(50, 16, NUM_BLOCKS, 2)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def choice(*numbers: int, **others: Any) -> Choice:
    settings = {
        "blocks": [f"blocks.{number}" for number in numbers or range(NUM_BLOCKS)],
        "smallest_bytes": 1,
        "host_bytes": 1 << 18,
    } | others
    return Choice(
        technique="trained_weight_streaming",
        where="Decoder",
        settings=settings,
        saves_bytes=0,
        adds_seconds=0.0,
        exact=True,
    )


def streamed(model: nn.Module, *optimizers: Optimizer, numbers: tuple[int, ...] = (), **others: Any) -> Session:
    return apply_choices([choice(*numbers, **others)], model, optimizers)


def same(ones: Any, others: Any) -> bool:
    ones, others = list(ones), list(others)
    return len(ones) == len(others) and all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(ones, others, strict=True)
    )


def is_away(parameter: torch.Tensor) -> bool:
    """On the host there is one device: what is away lies in memory of the slab, which has a size of its own."""
    return not parameter.untyped_storage().resizable()


def pair(make: Callable[[nn.Module], Optimizer] = adamw, **others: Any) -> tuple[Any, ...]:
    plain, model = small(), small()
    optimizers = make(plain), make(model)
    return plain, model, *optimizers, streamed(model, optimizers[1], **others)


def states(optimizer: Optimizer) -> list[torch.Tensor]:
    return [v for own in optimizer.state.values() for v in own.values() if isinstance(v, torch.Tensor)]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": adamw,
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
    "fused AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
}


@pytest.mark.parametrize(
    ("name", "numbers", "num_steps"),
    [("AdamW", (), 50), *((name, (), 4) for name in OPTIMIZERS), ("SGD", (0, 1), 4), ("fused AdamW", (1, 3), 4)],
)
def test_steps_are_those_of_the_plain_run_to_the_bit(name: str, numbers: tuple[int, ...], num_steps: int) -> None:
    plain, model, *optimizers, session = pair(OPTIMIZERS[name], numbers=numbers)
    for seed in range(num_steps):
        losses = [train(m, o, seed) for m, o in zip((plain, model), optimizers, strict=True)]
        assert torch.equal(*losses)
        assert same(gradients(plain), gradients(model))
    assert is_away(model.blocks[1].down.weight) and is_away(model.blocks[3].qkv.weight) is (numbers != (0, 1))
    assert same(plain.parameters(), model.parameters())
    assert same(*map(states, optimizers))
    session.undo()
    assert same(plain.parameters(), model.parameters()) and same(gradients(plain), gradients(model))
    assert not any(is_away(p) for p in model.parameters())
    # And on without it.
    assert torch.equal(train(plain, optimizers[0], 99), train(model, optimizers[1], 99))


def test_layers_are_streamed_inside_of_a_block_that_keeps_its_products_and_is_run_again() -> None:
    """Gradients of a later layer leave when a layer is used again, which the block's first run has not done."""
    layers = ["blocks.0.up", "blocks.1.up", "blocks.2.down"]
    plain, model = small(), small()
    optimizers = adamw(plain), adamw(model)
    kept = Choice(
        technique="selective_checkpointing",
        where="Decoder.blocks.0",
        settings={"keep": [0, 2]},
        saves_bytes=0,
        adds_seconds=0.0,
        exact=True,
    )
    apply_choices([kept, choice(blocks=layers)], model, [optimizers[1]])
    for seed in range(4):
        losses = [train(m, o, seed) for m, o in zip((plain, model), optimizers, strict=True)]
        assert torch.equal(*losses)
    assert same(plain.parameters(), model.parameters())


def test_each_weight_comes_twice_a_step_and_each_gradient_leaves_once() -> None:
    _, model, _, optimizer, session = pair()
    for seed in range(3):
        train(model, optimizer, seed)
    num_bytes = sum(p.nbytes for block in model.blocks for p in block.parameters())
    assert session.statistics == {
        "weight bytes to the card": 3 * 2 * num_bytes,
        "gradient bytes to the host": 3 * num_bytes,
    }


def test_the_fused_implementation_of_the_host_updates_as_a_fused_optimizer_there() -> None:
    plain, model = small(), small()
    optimizers = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True), adamw(model)
    session = streamed(model, optimizers[1], kernel="fused")
    for seed in range(10):
        for m, o in zip((plain, model), optimizers, strict=True):
            train(m, o, seed)
    for block, other in zip(plain.blocks, model.blocks, strict=True):
        expected, found = (
            # The loss does not depend on the bias of keys: its gradient is rounding alone.
            [p for name, p in each.named_parameters() if name != "qkv.bias"]
            for each in (block, other)
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    session.undo()


def test_a_block_that_is_left_out_at_first_is_updated_by_the_fused_implementation_too() -> None:
    plain, model = small(), small()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    session = streamed(model, optimizers[1], kernel="fused")
    for seed in range(4):
        for m, o in zip((plain, model), optimizers, strict=True):
            for parameter in m.blocks[2].parameters():
                parameter.requires_grad_(seed != 0)
            train(m, o, seed)
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()), rtol=1e-5, atol=1e-6)
    session.undo()


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("loop", LOOPS)
def test_loops_train_the_same_to_the_bit(loop: Callable[[Decoder, Optimizer], Any]) -> None:
    plain, model, *optimizers, session = pair()
    found = [loop(m, o) or [] for m, o in zip((plain, model), optimizers, strict=True)]
    assert same(*found)
    assert same(plain.parameters(), model.parameters()) and same(gradients(plain), gradients(model))
    assert torch.equal(train(plain, optimizers[0], 5), train(model, optimizers[1], 5))
    session.undo()
    assert same(plain.parameters(), model.parameters()) and same(gradients(plain), gradients(model))
    assert same(*map(states, optimizers))


def test_gradients_are_away_from_the_end_of_the_backward_pass_on_and_the_memory_is_used_again() -> None:
    _, model, _, optimizer, _ = pair()
    train(model, optimizer, 0)
    first = {p: p.grad.data_ptr() for p in model.blocks.parameters() if p.grad is not None}
    train(model, optimizer, 1)
    assert first == {p: p.grad.data_ptr() for p in model.blocks.parameters() if p.grad is not None}


def test_states_that_are_there_already_are_taken_along_and_come_back() -> None:
    plain, model = small(), small()
    optimizers = adamw(plain), adamw(model)
    for m, o in zip((plain, model), optimizers, strict=True):
        train(m, o, 0)
    session = streamed(model, optimizers[1])
    assert torch.equal(train(plain, optimizers[0], 1), train(model, optimizers[1], 1))
    session.undo()
    assert same(*map(states, optimizers)) and same(plain.parameters(), model.parameters())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda m: torch.optim.LBFGS(m.parameters()), "is not known to update each parameter independently"),
        (lambda m: torch.optim.Adam(m.parameters(), differentiable=True), "cannot be stepped one parameter at a time"),
    ],
)
def test_optimizers_that_look_at_all_parameters_together_are_refused(
    make: Callable[[nn.Module], Optimizer], why: str
) -> None:
    model = small()
    with pytest.raises(ApplyError, match=why):
        streamed(model, make(model))
    assert not any("forward" in vars(block) or is_away(block.qkv.weight) for block in model.blocks)


def test_a_model_without_such_blocks_and_more_memory_than_the_host_has_are_refused() -> None:
    model = small()
    with pytest.raises(ApplyError, match=r"blocks\.9"):
        streamed(model, adamw(model), numbers=(9,))
    with pytest.raises(ApplyError, match="the host has no"):
        streamed(model, adamw(model), host_bytes=1 << 60)
    assert not any("forward" in vars(block) or is_away(block.qkv.weight) for block in model.blocks)


def test_a_plan_is_put_on_again_while_the_program_holds_the_graph_of_its_last_loss() -> None:
    # A script that makes its optimizer anew: its session is undone, and put on with that one.
    plain, model = small(), small()
    for each in (plain, model):
        for lr in (0.01, 0.02):
            optimizer = torch.optim.AdamW(each.parameters(), lr=lr)
            session = streamed(each, optimizer) if each is model else None
            for step in range(2):
                optimizer.zero_grad()
                loss = each(torch.arange(8).reshape(2, 4) + step)
                loss.backward()
                optimizer.step()
            if session is not None:
                assert is_away(each.blocks[0].qkv.weight)
                session.undo()
    assert same(plain.parameters(), model.parameters())
