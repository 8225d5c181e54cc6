"""Token-wise modules in tiles: the same training up to the order of sums, what they promise, and what is refused."""

import copy
import dataclasses
import gc
import pathlib
import weakref
from collections.abc import Iterator

import pytest
import torch
from tests.cpu.module_training import DEVICE, assert_same, choice, promised_peak, timeline, traced, train
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.effects.independence.rows import Mixes
from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices
from tightfit.tape import Tape
from tightfit.techniques.recomputation.checkpointing import Checkpointing
from tightfit.techniques.tiling import tile_checks, tile_function
from tightfit.techniques.tiling.tiled_tokens import TiledTokens
from tightfit.techniques.tiling.token_wise_check import check_token_wise

NAME = "tiled_tokens"
# Sums over tokens are added up tile by tile.
ORDER = {"rtol": 1e-5, "atol": 1e-6}
# A file, once there is one.
SWITCH = pathlib.Path("does/not/exist")
torch.set_num_threads(1)


class Gated(nn.Module):
    """A gated feed-forward layer with a norm of its own, written by hand."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, inner), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(tokens)
        return self.down(functional.silu(self.gate(hidden)) * self.up(hidden))


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.mlp = nn.LayerNorm(width), nn.Linear(width, 3 * width), Gated(width, inner)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.qkv(self.norm(tokens)).unsqueeze(1).chunk(3, dim=-1)
        tokens = tokens + functional.scaled_dot_product_attention(queries, keys, values).squeeze(1)
        return tokens + self.mlp(tokens)


class Stack(nn.Module):
    """Blocks in a list."""

    def __init__(self, width: int = 8, inner: int = 32, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, inner) for _ in range(num_layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            tokens = layer(tokens)
        return tokens


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(torch.randn(3, 21, 8, generator=torch.Generator().manual_seed(step))).square().mean()


def workload(length: int = 4096) -> Iterator[torch.Tensor]:
    """`Stack` on the virtual card, with long sequences and wide feed-forward layers."""
    model = Stack(width=256, inner=2048, num_layers=3).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        loss = model(torch.randn(1, length, 256, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize("num_tiles", [2, 4, 7])
def test_training_is_the_same_up_to_the_order_of_sums(num_tiles):
    choices = [choice(NAME, f"Stack.layers.{i}.mlp", num_tiles=num_tiles) for i in (0, 1)]
    assert_same(train(Stack, loss_of), train(Stack, loss_of, choices), **ORDER)


def test_it_works_inside_a_block_that_is_recomputed():
    choices = [choice(NAME, "Stack.layers.0.mlp", num_tiles=4), choice("checkpointing", "Stack.layers.0")]
    assert_same(train(Stack, loss_of), train(Stack, loss_of, choices), **ORDER)


def test_frozen_parameters_and_inputs_without_gradients_are_left_without():
    def frozen() -> nn.Module:
        model = Stack(num_layers=1)
        model.layers[0].mlp.gate.requires_grad_(False)
        return model

    plain, other = train(frozen, loss_of), train(frozen, loss_of, [choice(NAME, "Stack.layers.0.mlp", num_tiles=4)])
    assert_same(plain, other, **ORDER)
    assert "layers.0.mlp.gate.weight" not in other.gradients[0]


def critic() -> nn.Module:
    model = nn.Sequential(Gated(8, 32))
    model.made = nn.Parameter(torch.randn(3, 21, 8))
    return model


def of_data_and_of_what_was_made(model: nn.Module, step: int) -> torch.Tensor:
    data = torch.randn(3, 21, 8, generator=torch.Generator().manual_seed(step))
    return model(data).square().mean() - model(model.made).square().mean()


def in_two_lengths(model: nn.Module, step: int) -> torch.Tensor:
    long, short = torch.randn(3, 21, 8), torch.randn(3, 9, 8, requires_grad=bool(step % 2))
    return model(long).square().mean() + model(short).square().mean()


def test_one_long_sequence_runs_the_operators_of_the_whole_with_frozen_weights():
    def frozen() -> nn.Module:
        model = Stack()
        for layer in model.layers:
            layer.mlp.up.requires_grad_(False)
        return model

    def of_one(model: nn.Module, step: int) -> torch.Tensor:
        return model(torch.randn(1, 64, 8, generator=torch.Generator().manual_seed(step))).square().mean()

    assert_same(
        train(frozen, of_one), train(frozen, of_one, [choice(NAME, "Stack.layers.0.mlp.up", num_tiles=4)]), **ORDER
    )


@pytest.mark.parametrize("loss", [of_data_and_of_what_was_made, in_two_lengths])
def test_calls_whose_graphs_differ_are_each_compared_with_their_like(loss):
    assert_same(train(critic, loss), train(critic, loss, [choice(NAME, "Sequential.0", num_tiles=4)]), **ORDER)


class Scaled(nn.Module):
    """A layer that reads what is set from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.settings, self.act = nn.Linear(8, 8), {"scale": 2.0}, functional.gelu
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.settings["scale"] * self.act(self.layer(rows) + self.shift)


def _other_scale(model: nn.Module) -> None:
    model[1].settings["scale"] += 1.0


def _another_key(model: nn.Module) -> None:
    model[1].settings["kind"] = "regression"


def _other_function(model: nn.Module) -> None:
    model[1].act = functional.silu if model[1].act is functional.gelu else functional.gelu


def _hook(model: nn.Module) -> None:
    model[1].layer.register_forward_hook(lambda *_: torch.zeros(1))


def _other_child(model: nn.Module) -> None:
    model[1].layer = copy.deepcopy(model[1].layer)


@pytest.mark.parametrize("change", [_other_scale, _another_key, _other_function])
def test_what_is_changed_behind_a_module_holds_from_its_next_forward_on(change):
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), Scaled())

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        result = model(torch.randn(3, 21, 8, generator=torch.Generator().manual_seed(step))).square().mean()
        change(model)
        return result

    assert_same(train(make, loss), train(make, loss, [choice(NAME, "Sequential.1", num_tiles=4)]), **ORDER)


def test_each_call_of_modules_that_share_a_setting_has_the_one_of_its_own_forward():
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), Scaled(), Scaled())
        model[2].settings = model[1].settings
        return model

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        rows = model[0](torch.randn(3, 21, 8, generator=torch.Generator().manual_seed(step)))
        for number in (1, 2, 1):
            rows = model[number](rows)
            _other_scale(model)
        return rows.square().mean() * 1e-3

    choices = [choice(NAME, f"Sequential.{number}", num_tiles=4) for number in (1, 2)]
    assert_same(train(make, loss), train(make, loss, choices), **ORDER)


def test_a_backward_pass_that_runs_out_of_memory_leaves_what_was_changed_as_the_program_has_it(monkeypatch):
    def exhausted(*_: object, **__: object) -> None:
        assert model[1].settings["scale"] == 2.0
        raise torch.OutOfMemoryError("CUDA out of memory")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Scaled())
    with apply_choices([choice(NAME, "Sequential.1", num_tiles=4)], model, []):
        loss = model(torch.randn(3, 21, 8)).sum()
        _other_scale(model)
        monkeypatch.setattr(tile_function, "grad", exhausted)
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
    assert model[1].settings["scale"] == 3.0


@pytest.mark.parametrize("change", [_hook, _other_child])
def test_what_is_put_on_a_module_between_the_passes_is_there_afterwards(change):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Scaled())
    plain, data = copy.deepcopy(model), torch.randn(3, 21, 8)
    gradients = []
    with apply_choices([choice(NAME, "Sequential.1", num_tiles=4)], model, []):
        for each in (plain, model):
            first = each[1].layer
            loss = each(data).square().mean()
            change(each)
            loss.backward()
            gradients.append([first.weight.grad, each[0].weight.grad])
            assert each[1].layer is not first or each[1].layer._forward_hooks
    torch.testing.assert_close(*gradients, **ORDER)


def test_a_buffer_that_is_written_to_between_the_passes_is_refused():
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        result = model(torch.ones(3, 21, 8)).square().mean()
        model[1].shift += 1
        return result

    with pytest.raises(ApplyError, match="shift was written to after the forward"):
        train(lambda: nn.Sequential(nn.Linear(8, 8), Scaled()), loss, [choice(NAME, "Sequential.1", num_tiles=4)])


class Felt(nn.Module):
    """A layer whose scale, which another layer computes, only gradients feel."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.settings = nn.Linear(8, 8), {"scale": None}

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows, scale = self.layer(rows), self.settings["scale"]
        return rows + (rows - rows.detach()) * (1.0 if scale is None else scale.detach())


class Gating(nn.Module):
    """Has the layer's scale computed anew in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.felt = nn.Linear(8, 1), Felt()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.felt.settings["scale"] = self.gate(rows.mean((0, 1))).sum()
        return self.felt(rows)


@pytest.mark.parametrize("other", [None, 5.0])
def test_tiles_that_would_read_a_tensor_with_a_graph_that_is_gone_are_refused(other):
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        result = model(torch.randn(3, 21, 8, generator=torch.Generator().manual_seed(step))).square().mean()
        model.felt.settings["scale"] = None if other is None else torch.tensor(other)
        return result

    with pytest.raises(ApplyError, match=r"reads .*settings\['scale'\], which was replaced between forward and"):
        train(Gating, loss, [choice(NAME, "Gating.felt", num_tiles=4)])


def test_a_tensor_with_a_graph_that_is_gone_and_that_no_tile_reads_is_not_missed():
    kept = {"result": None}

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), Scaled())
        model[1].register_forward_hook(lambda _, __, result: kept.update(result=result))
        return model

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        return model(torch.randn(3, 21, 8, generator=torch.Generator().manual_seed(step))).square().mean()

    assert_same(train(make, loss), train(make, loss, [choice(NAME, "Sequential.1", num_tiles=4)]), **ORDER)
    assert kept["result"].shape == (3, 21, 8)


def test_a_tensor_with_a_graph_that_is_dropped_after_each_step_is_no_change_between_the_passes():
    def loss(model: nn.Module, step: int) -> torch.Tensor:
        model.felt.settings["scale"] = None
        return model(torch.randn(3, 21, 8, generator=torch.Generator().manual_seed(step))).square().mean()

    assert_same(train(Gating, loss), train(Gating, loss, [choice(NAME, "Gating.felt", num_tiles=4)]), **ORDER)


@pytest.mark.parametrize("is_half", [False, True])
def test_in_half_precision_weight_gradients_are_summed_in_float32(is_half):
    kind = torch.bfloat16 if is_half else torch.float32
    torch.manual_seed(0)
    model = Gated(8, 32)
    tokens = torch.randn(1, 512, 8)
    model(tokens).sum().backward()
    exact = model.gate.weight.grad.clone()
    model.zero_grad()
    rough = copy.deepcopy(model).to(kind)
    with apply_choices([choice(NAME, "Gated", num_tiles=64)], rough, []):
        rough(tokens.to(kind)).sum().backward()
    assert rough.gate.weight.grad.dtype == kind
    error = (rough.gate.weight.grad.float() - exact).norm() / exact.norm()
    assert error < (2e-2 if is_half else 1e-6)


def test_autocast_is_that_of_the_forward_pass():
    def with_autocast(model: nn.Module, step: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = model(torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(step)))
        assert result.dtype == torch.float32
        return result.square().mean()

    plain = train(Stack, with_autocast)
    other = train(Stack, with_autocast, [choice(NAME, "Stack.layers.1.mlp", num_tiles=4)])
    # Gradients of weights are rounded to bfloat16 once per tile.
    assert_same(plain, other, rtol=0.05, atol=2e-3)


def test_a_copy_of_the_model_trains_its_own_parameters_and_undo_leaves_nothing():
    model = Stack(num_layers=1)
    with apply_choices([choice(NAME, "Stack.layers.0.mlp", num_tiles=4)], model, []):
        twin = copy.deepcopy(model)
        loss_of(twin, 0).backward()
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in model.parameters())
    assert "forward" not in vars(model.layers[0].mlp)


def _proved(module: nn.Module, *shape: int) -> None:
    """Along each dimension but the last."""
    for dim in range(len(shape) - 1):
        check_token_wise(module, module, torch.randn(*shape), dim, [max(1, shape[dim] // 2)])


class _Function(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.function(tokens * self.scale)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.gelu(x, approximate="tanh"),
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
        lambda x: functional.rms_norm(x, (8,)),
        lambda x: torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1),
        lambda x: x.reshape(-1, 4, 2).transpose(1, 2).softmax(-1).reshape(x.shape),
        lambda x: x + torch.arange(8.0),
        lambda x: torch.where(x > 0, x, x.clamp(min=-1.0)),
        lambda x: functional.linear(x, torch.eye(8)),
    ],
)
def test_what_keeps_tokens_apart_is_proved(function):
    _proved(_Function(function), 2, 5, 8)
    _proved(_Function(function), 7, 8)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - x.mean(),
        lambda x: x - x.mean(dim=1, keepdim=True),
        lambda x: x.softmax(dim=1),
        lambda x: x.flip(1),
        lambda x: x.cumsum(1),
        lambda x: x.roll(1, dims=1),
        lambda x: x + torch.randn(5, 8),
        lambda x: x + torch.arange(5.0)[:, None],
        lambda x: x @ (x.transpose(1, 2) @ x),
        lambda x: x.transpose(0, 1).reshape(2, 5, 8),
        lambda x: functional.layer_norm(x, (5, 8)),
        lambda x: functional.dropout(x, 0.5),
        lambda x: x[:, :3],
        lambda x: (x, x),
        lambda x: x.select(0, 0).select(0, 0).select(0, 0).item() * x,
        lambda x: functional.scaled_dot_product_attention(x, x, x),
    ],
)
def test_what_may_mix_tokens_is_refused(function):
    with pytest.raises(Mixes):
        _proved(_Function(function), 2, 5, 8)


class _Made(TorchDispatchMode):
    """Counts the results of all operators, and knows them for as long as they are held."""

    def __init__(self) -> None:
        super().__init__()
        self.results: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        self.num_results = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            self.results.add(tensor)
            self.num_results += 1
        return result


def test_a_proof_leaves_nothing_behind():
    # The tangent keeps its own result for the backward pass.
    with _Made() as made:
        _proved(_Function(lambda tokens: tokens.tanh()), 2, 5, 8)
    gc.collect()
    assert made.num_results > 2
    assert not made.results


class _Switched(Gated):
    """Begins to mix tokens, by a switch that no snapshot has."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        made = super().forward(tokens)
        return made - made.detach().mean(1, keepdim=True) if SWITCH.exists() else made


def test_lengths_that_come_by_turns_are_proved_once_each_and_again_after_a_change(monkeypatch, tmp_path):
    lengths: list[int] = []

    def counted(module, run, value, *args, **kwargs):
        lengths.append(value.shape[1])
        check_token_wise(module, run, value, *args, **kwargs)

    monkeypatch.setattr(tile_checks, "check_token_wise", counted)
    monkeypatch.setitem(_Switched.forward.__globals__, "SWITCH", tmp_path / "begun")
    torch.manual_seed(0)
    model = nn.Sequential(_Switched(8, 16))
    plain = copy.deepcopy(model)
    apply_choices([choice(NAME, "Sequential.0", num_tiles=2)], model, [torch.optim.SGD(model.parameters())])
    for length in (6, 8, 6, 8, 8, 6):
        model(torch.randn(2, length, 8)).sum().backward()
    assert lengths == [6, 8]
    model[0].norm.eps = plain[0].norm.eps = 1e-3
    for length in (6, 8, 6):
        model(torch.randn(2, length, 8)).sum().backward()
    assert lengths == [6, 8, 6, 8]
    (tmp_path / "begun").touch()
    for length in (6, 8):
        tokens = torch.randn(2, length, 8)
        # Whole, as it is in a plain run.
        assert torch.equal(model(tokens), plain(tokens))


def test_gradients_that_go_elsewhere_are_refused():
    other = torch.ones(8, requires_grad=True)
    with pytest.raises(Mixes, match="tensors that are not its own"):
        _proved(_Function(lambda x: x * other), 2, 5, 8)


def test_running_statistics_are_refused():
    with pytest.raises(Mixes):
        _proved(nn.BatchNorm1d(8), 6, 8)


def test_refusals_are_one_clear_line():
    model = nn.Sequential(nn.Conv1d(4, 4, 1))
    with pytest.raises(ApplyError, match="contains 0, a Conv1d, which mixes tokens; leave it out"):
        apply_choices([choice(NAME, "Sequential", num_tiles=2)], model, [])
    dropout = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    with (
        apply_choices([choice(NAME, "Sequential", num_tiles=2)], dropout, []),
        pytest.raises(ApplyError, match=r"Sequential cannot be run in tiles: .* random"),
    ):
        dropout(torch.randn(1, 16, 8))


@pytest.fixture(scope="module")
def plain() -> Tape:
    return traced(__file__, "workload")


def test_the_traced_saving_is_the_promised_one(plain):
    options = [
        o
        for o in TiledTokens().options(Profile(plain, find(DEVICE)))
        if o.settings == {"num_tiles": 4} and o.where.endswith("mlp")
    ]
    assert len(options) == 3
    before, after = timeline(plain).max(), timeline(traced(__file__, "workload", options)).max()
    assert before - after > 0.5 * before
    assert before - promised_peak(plain, options) == pytest.approx(before - after, rel=TiledTokens.tolerance)


def test_tiles_save_what_checkpointing_alone_cannot(plain):
    blocks = [o for o in Checkpointing().options(Profile(plain, find(DEVICE))) if o.where[:-1].endswith("layers.")]
    tiles = [
        o
        for o in TiledTokens().options(Profile(plain, find(DEVICE)))
        if o.settings == {"num_tiles": 16, "recomputed": True} and o.where.endswith("mlp")
    ]
    assert not any(a.slots & b.slots for a in blocks for b in tiles)
    alone = timeline(traced(__file__, "workload", blocks)).max()
    both = timeline(traced(__file__, "workload", [*blocks, *tiles])).max()
    assert both < 0.6 * alone
    before = timeline(plain).max()
    assert before - promised_peak(plain, [*blocks, *tiles]) == pytest.approx(before - both, rel=TiledTokens.tolerance)


def test_a_block_around_it_that_runs_twice_lets_go_of_its_input():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.act = nn.Linear(8, 8), nn.Sequential(nn.GELU(), nn.Linear(8, 8))

        def forward(self, tokens):
            hidden = self.first(tokens)
            held.append(weakref.ref(hidden))
            return tokens + self.act(hidden)

    held = []
    model = nn.Sequential(Block())
    tiles = Choice(
        technique="tiled_tokens",
        where="Sequential.0.act",
        settings={"num_tiles": 2, "recomputed": True},
        saves_bytes=0,
        adds_seconds=0.0,
        exact=True,
    )
    twice = dataclasses.replace(tiles, technique="checkpointing", where="Sequential.0", settings={})
    with apply_choices([tiles, twice], model, []):
        loss = model(torch.randn(4, 16, 8, requires_grad=True)).sum()
        assert held[0]() is None
        loss.backward()
