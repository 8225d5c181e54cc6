"""Weight streaming: frozen weights that are at the host between their uses, on real numbers and on the virtual GPU, and what programs do to them meanwhile."""

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.conformance.large_models import Decoder
from tests.cpu import streaming_models
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tightfit
from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.registry import techniques
from tightfit.techniques.session import Session

NUM_BLOCKS = 4
MIB = 1 << 20


class Adapted(nn.Module):
    """A linear layer that is not trained, with two factors beside it that are."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.first, self.second = nn.Linear(linear.in_features, 2, bias=False), nn.Linear(2, linear.out_features)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) + self.second(self.first(inputs))


def small() -> Decoder:
    torch.manual_seed(0)
    model = Decoder(50, 16, NUM_BLOCKS, 2).requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(seed))


def streaming(number: int, **others: Any) -> Choice:
    settings = {
        "preceding": "-1" if number else "",
        "following": "+1" if number + 1 < NUM_BLOCKS else "",
        "smallest_bytes": 1,
        "host_bytes": 1 << 15,
    } | others
    where = f"Decoder.blocks.{number}"
    return Choice(
        technique="weight_streaming", where=where, settings=settings, saves_bytes=0, adds_seconds=0.0, exact=True
    )


def streamed(model: nn.Module, *numbers: int) -> Session:
    return apply_choices([streaming(n) for n in numbers or range(NUM_BLOCKS)], model, [])


def gradients(model: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(ones: Any, others: Any) -> bool:
    return len(ones) == len(others) and all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


def values(model: nn.Module) -> list[torch.Tensor]:
    return list(model.state_dict().values())


def is_away(parameter: torch.Tensor) -> bool:
    """On the host there is one device: what is away lies in memory of the slab, which has a size of its own."""
    return not parameter.untyped_storage().resizable()


def test_weights_come_for_the_forward_and_the_backward_pass_of_their_block_and_are_away_in_between() -> None:
    model, seen = small(), []

    def look(which: str) -> Callable[..., None]:
        return lambda *_: seen.append((which, [not is_away(b.qkv.weight) for b in model.blocks]))

    streamed(model)
    for number in (1, 3):
        model.blocks[number].out.register_forward_hook(look(f"forward {number}"))
        model.blocks[number].out.register_full_backward_hook(look(f"backward {number}"))
    loss = model(tokens())
    look("loss")()
    loss.backward()
    look("over")()
    assert seen == [
        ("forward 1", [False, True, False, False]),
        ("forward 3", [False, False, False, True]),
        ("loss", [False, False, False, False]),
        ("backward 3", [False, False, False, True]),
        ("backward 1", [False, True, False, False]),
        ("over", [False, False, False, False]),
    ]


def test_what_is_moved_is_each_block_twice_a_step_and_nothing_is_copied_back() -> None:
    model = small()
    session = streamed(model)
    for seed in range(3):
        model(tokens(seed)).backward()
    frozen = [p for p in model.blocks[0].parameters() if not p.requires_grad]
    num_bytes = sum(p.nbytes for p in frozen)
    assert session.statistics == {"weight bytes to the card": 3 * 2 * NUM_BLOCKS * num_bytes}
    with torch.inference_mode():
        model(tokens())
    assert session.statistics["weight bytes to the card"] == 7 * NUM_BLOCKS * num_bytes


@pytest.mark.parametrize("numbers", [(0, 1, 2, 3), (1,), (0, 3)])
def test_gradients_and_weights_are_those_of_the_plain_run(numbers: tuple[int, ...]) -> None:
    plain, model = small(), small()
    session = streamed(model, *numbers)
    for seed in range(3):
        assert same(gradients(plain, plain(tokens(seed))), gradients(model, model(tokens(seed))))
        with torch.inference_mode():
            assert torch.equal(plain(tokens(9)), model(tokens(9)))
    session.undo()
    assert same(values(plain), values(model))
    assert not any("forward" in vars(block) for block in model.blocks)
    assert not any(is_away(p) for p in model.parameters())


def _tied(model: Decoder) -> None:
    model.blocks[2].qkv.weight = model.blocks[1].qkv.weight


def _viewed(model: Decoder) -> None:
    model.view = model.blocks[1].qkv.weight.t()  # type: ignore[assignment]


@pytest.mark.parametrize("share", [_tied, _viewed])
def test_weights_that_others_refer_to_stay(share: Callable[[Decoder], None]) -> None:
    model = small()
    share(model)
    streamed(model)
    assert not is_away(model.blocks[1].qkv.weight)
    assert is_away(model.blocks[1].out.weight)


def test_a_block_without_frozen_weights_of_its_own_and_one_inside_of_another_are_refused() -> None:
    with pytest.raises(ApplyError, match=r"blocks\.1 has no weights that can be streamed: they are trained, or share"):
        streamed(small().requires_grad_(True), 1)
    model = small()
    inside = dataclasses.replace(
        streaming(1), where="Decoder.blocks.1.up", settings={"smallest_bytes": 1, "host_bytes": 1 << 15}
    )
    with pytest.raises(ApplyError, match=r"blocks\.1\.up is inside Decoder\.blocks\.1"):
        apply_choices([streaming(1), inside], model, [])
    assert not any(is_away(p) for p in model.parameters())


def between_the_steps() -> Iterator[tuple[str, Callable[[Decoder], Any]]]:
    """What programs do to weights while they are away; what it returns is compared with what it is without streaming."""

    def saved(model: Decoder) -> Any:
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        return list(torch.load(file).values())

    def loaded(model: Decoder) -> Any:
        model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})
        return values(model)

    def averaged(model: Decoder) -> Any:
        average = torch.optim.swa_utils.AveragedModel(model)
        for parameter in model.parameters():
            parameter.data.mul_(0.9)
        average.update_parameters(model)
        return values(average)

    def decayed(model: Decoder) -> Any:
        with torch.no_grad():
            for block in model.blocks:
                block.qkv.weight.mul_(0.9)
                block.out.weight.data.add_(0.1)
        return values(model)

    def copied(model: Decoder) -> Any:
        other = copy.deepcopy(model)
        other(tokens()).backward()
        return [*values(other), *(p.grad for p in other.parameters() if p.grad is not None)]

    def replaced(model: Decoder) -> Any:
        model.blocks[1].qkv.weight = nn.Parameter(model.blocks[1].qkv.weight * 2, requires_grad=False)
        model.blocks[2].qkv.weight.data = model.blocks[2].qkv.weight.data * 3
        return values(model)

    yield "saves a state dict", saved
    yield "loads a state dict", loaded
    yield "averages the weights", averaged
    yield "decays the weights by hand", decayed
    yield "copies the model", copied
    yield "pickles the weights", lambda m: [pickle.loads(pickle.dumps(p)) for p in m.parameters()]
    yield "looks at norms", lambda m: [p.norm() for p in m.parameters()]
    yield "replaces weights", replaced
    yield "casts and casts back", lambda m: values(m.double().float())
    yield "exports to numpy", lambda m: [torch.from_numpy(p.detach().numpy().copy()) for p in m.parameters()]


@pytest.mark.parametrize("does", [pytest.param(does, id=name) for name, does in between_the_steps()])
def test_programs_see_the_weights_and_change_them_as_without_it(does: Callable[[Decoder], Any]) -> None:
    plain, model = small(), small()
    session = streamed(model)
    for seed in range(2):
        assert same(gradients(plain, plain(tokens(seed))), gradients(model, model(tokens(seed))))
        assert same(does(plain), does(model))
    assert same(gradients(plain, plain(tokens(5))), gradients(model, model(tokens(5))))
    session.undo()
    assert same(values(plain), values(model))


def graphs() -> Iterator[tuple[str, Callable[[Decoder], torch.Tensor]]]:
    """Losses whose backward passes use weights in other ways than once, from the last block to the first."""

    def embedded(model: Decoder) -> torch.Tensor:
        return model.embedding(tokens()).requires_grad_()

    def through(model: Decoder, hidden: torch.Tensor, numbers: Any) -> torch.Tensor:
        for number in numbers:
            hidden = model.blocks[number](hidden)
        return hidden

    def second_order(model: Decoder) -> torch.Tensor:
        hidden = embedded(model)
        loss = through(model, hidden, range(NUM_BLOCKS)).square().mean()
        (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
        return loss + gradient.square().sum()

    def twice(model: Decoder) -> torch.Tensor:
        loss = model(tokens())
        loss.backward(retain_graph=True)
        return loss * 2

    def checkpointed(*, reentrant: bool) -> Callable[[Decoder], torch.Tensor]:
        def loss(model: Decoder) -> torch.Tensor:
            hidden = embedded(model)
            for numbers in ((0, 1), (2, 3)):
                hidden = checkpoint(through, model, hidden, numbers, use_reentrant=reentrant)
            return hidden.square().mean()

        return loss

    def inner(model: Decoder) -> torch.Tensor:
        # What a block keeps beside its result: the loss does not come by what it returns.
        kept = []
        handle = model.blocks[1].up.register_forward_hook(lambda _m, _i, out: kept.append(out))
        model(tokens())
        handle.remove()
        return kept[0].square().mean()

    def mixed(model: Decoder) -> torch.Tensor:
        # An evaluation, and a graph that is dropped, between a forward pass and its backward pass.
        loss = model(tokens())
        with torch.no_grad():
            model(tokens(1))
        model(tokens(2))
        return loss

    yield "a block is run again and again", lambda m: through(m, embedded(m), (0, 0, 1, 2, 1, 3, 0)).square().mean()
    yield "blocks in another order", lambda m: through(m, embedded(m), (3, 1, 2, 0)).square().mean()
    yield "half of the blocks", lambda m: through(m, embedded(m), (1, 2)).square().mean()
    yield "second derivatives", second_order
    yield "a graph that is gone through twice", twice
    yield "checkpoints around blocks", checkpointed(reentrant=False)
    yield "reentrant checkpoints", checkpointed(reentrant=True)
    yield "from inside of a block", inner
    yield "an evaluation in between", mixed
    yield "weights that are clamped by their data", clamped
    yield "hooks that copy what is saved", _with_hooks
    yield "hooks that round what is saved", _with_rounding


def _with_hooks(model: Decoder) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return model(tokens())


def _with_rounding(model: Decoder) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(
        lambda saved: saved.bfloat16() if saved.is_floating_point() else saved,
        lambda packed: packed.float() if packed.is_floating_point() else packed,
    ):
        return model(tokens())


def clamped(model: Decoder) -> torch.Tensor:
    loss = model(tokens())
    for block in model.blocks:
        block.qkv.weight.data.clamp_(-0.1, 0.1)
    return loss


@pytest.mark.parametrize("loss_of", [pytest.param(loss, id=name) for name, loss in graphs()])
def test_other_graphs_are_right(loss_of: Callable[[Decoder], torch.Tensor]) -> None:
    plain, model = small(), small()
    session = streamed(model)
    for _ in range(3):
        assert same(gradients(plain, loss_of(plain)), gradients(model, loss_of(model)))
    session.undo()
    assert same(values(plain), values(model))


def test_a_weight_that_is_written_to_before_its_backward_pass_is_autograds_error() -> None:
    plain, model = small(), small()
    streamed(model)
    for each in (plain, model):
        loss = each(tokens())
        with torch.no_grad():
            each.blocks[1].out.weight.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_weight_that_is_trained_later_stays_on_the_card() -> None:
    plain, model = small(), small()
    session = streamed(model)
    for each in (plain, model):
        each(tokens()).backward()
        each.blocks[2].requires_grad_(True)
        optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1)
        for seed in range(2):
            optimizer.zero_grad()
            each(tokens(seed)).backward()
            optimizer.step()
    assert not is_away(model.blocks[2].qkv.weight) and is_away(model.blocks[1].qkv.weight)
    session.undo()
    assert same(values(plain), values(model))


def test_transforms_of_torch_func_are_refused() -> None:
    model = small()
    session = streamed(model)
    with pytest.raises(ApplyError, match=r"blocks\.1 runs inside a torch\.func transform"):
        torch.func.grad(lambda hidden: model.blocks[1](hidden).square().mean())(torch.randn(2, 5, 16))
    session.undo()


def test_writes_without_a_version_inside_of_a_forward_are_found() -> None:
    class Writing(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.weight.data.mul_(0.5)
            return super().forward(inputs)

    model = small()
    model.blocks[1].out = Writing(16, 16).requires_grad_(False)
    session = streamed(model)
    with pytest.raises(ApplyError, match="differs from its copy in host memory, and its version was not increased"):
        model(tokens())
    session.undo()


def test_writes_inside_of_a_forward_are_kept() -> None:
    class Clamped(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.mul_(0.99)
            return functional.linear(inputs, self.weight.clone())

    models = [small(), small()]
    for each in models:
        torch.manual_seed(1)
        each.blocks[1].out = Clamped(16, 16).requires_grad_(False)
    session = streamed(models[1])
    for seed in range(3):
        found = [gradients(each, each(tokens(seed))) for each in models]
        assert same(*found)
    assert session.statistics["weight bytes to the host"] > 0
    assert same(*map(values, models))


def test_an_error_in_a_block_leaves_everything_as_it_should_be() -> None:
    model = small()
    expected = values(small())
    session = streamed(model)
    with pytest.raises(RuntimeError, match="shape"):
        model.blocks[2](torch.zeros(1, 2, 3))
    assert is_away(model.blocks[2].qkv.weight)
    model(tokens()).backward()
    session.undo()
    assert same(expected, values(model))


def test_a_model_that_is_larger_than_the_card_is_planned_with_memory_of_the_host_and_fits_as_promised() -> None:
    place = f"{streaming_models.__file__}:mostly_weights"
    others = [name for name in techniques() if name != "weight_streaming"]
    # Weights alone are 420 MiB; what the card has besides the context is less.
    budget = tightfit.estimate(place, "RTX 4090").peak.device_bytes - 250 * MIB
    plain = tightfit.plan(place, "RTX 4090", budget=budget, without=others, prove=False)
    assert not plain.fits and plain.host_bytes == 0
    planned = tightfit.plan(place, "RTX 4090", budget=budget, without=others, host="400MiB", prove=False)
    assert planned.fits and planned.exact
    assert {choice.technique for choice in planned.choices} == {"weight_streaming"}
    assert 250 * MIB <= planned.host_bytes <= 400 * MIB
    assert planned.run.peak.device_bytes <= budget
    # Layers of 128 tokens hide no copies.
    assert planned.run.seconds_per_step > plain.run.seconds_per_step


def test_more_host_memory_than_there_is_is_refused() -> None:
    model = small()
    with pytest.raises(ApplyError, match=r"the host has no .* plan with a smaller --host"):
        apply_choices([streaming(0, host_bytes=1 << 60)], model, [])
    assert not any("forward" in vars(block) for block in model.blocks)
