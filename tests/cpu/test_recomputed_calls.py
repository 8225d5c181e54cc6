"""Graphs of recomputed blocks are used as those of a plain run may be: in parts, several times, from outside of a backward pass."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tightfit.effects.values import contents
from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.recomputation import call_arguments

torch.set_num_threads(1)
ROWS = torch.linspace(-1, 1, 12).view(3, 4)


class Block(nn.Module):
    """A block with dropout, and what a test puts into its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.5)
        self.between: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows

    def forward(self, rows: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        rows = self.dropout(self.between(self.first(rows).tanh()))
        return self.second(rows if scale is None else rows * scale).sigmoid()


class Net(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = Block(), Block()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(rows), scale=rows)


def nets(between: Callable[[torch.Tensor], torch.Tensor] | None = None) -> tuple[Net, Net]:
    """The same model plain, and with both blocks recomputed."""
    plain, recomputed = Net(), Net()
    for net in (plain, recomputed):
        for block in (net.one, net.two):
            block.between = between or block.between
    choices = [
        Choice(technique="checkpointing", where=f"Net.{name}", settings={}, saves_bytes=0, adds_seconds=0.0, exact=True)
        for name in ("one", "two")
    ]
    apply_choices(choices, recomputed, [])
    return plain, recomputed


def same(use: Callable[[Net], Any], between: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
    """Whether both models give the same, bit for bit, in several steps."""
    found = []
    for net in nets(between):
        torch.manual_seed(1)
        found.append([(use(net), [p.grad for p in net.parameters()]) for _ in range(4)])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.fixture(params=["saved tensors of torch", "a function"])
def each_way_of_saving(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments are saved as torch 2.13 does it, and as it did before."""
    if request.param == "a function":
        monkeypatch.setattr(call_arguments, "_make_saved_tensor", None)


@pytest.mark.usefixtures("each_way_of_saving")
def test_a_graph_is_gone_through_once_twice_and_in_parts() -> None:
    def use(net: Net) -> list[torch.Tensor]:
        out = net(ROWS.clone().requires_grad_())
        loss = out.square().sum()
        loss.backward(retain_graph=True)
        some = torch.autograd.grad(loss, [net.one.first.weight], retain_graph=True)
        loss.backward(retain_graph=True)
        rest = torch.autograd.grad(out.sum(), [net.two.second.weight, net.one.second.bias])
        return [loss.detach(), *some, *rest, torch.rand(2)]

    same(use)


@pytest.mark.usefixtures("each_way_of_saving")
def test_what_passes_over_a_graph_that_stays_do_not_need_is_let_go() -> None:
    gates = nn.Parameter(torch.ones(7))
    _, net = nets(lambda rows: rows * gates.exp().exp().mean())
    rows = ROWS.clone().requires_grad_()
    out = net(rows).flatten()

    def num_left() -> int:
        torch.autograd.grad(out[0], rows, retain_graph=True)
        return sum(type(each) is torch.Tensor and each.shape == gates.shape for each in gc.get_objects())

    num_left()
    assert num_left() == num_left()


def test_an_argument_that_is_written_to_is_seen_by_autograd() -> None:
    net = nets()[1]
    rows = (ROWS.clone().requires_grad_() * 2).clone()
    out = net.one(rows)
    with torch.no_grad():
        rows.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.usefixtures("each_way_of_saving")
def test_arguments_go_to_the_hooks_around_the_call_and_nothing_else_does() -> None:
    net, packed = nets()[1], list[torch.Size]()
    for _ in range(3):
        packed.clear()
        with torch.autograd.graph.save_on_cpu():
            net(ROWS.clone().requires_grad_()).sum().backward()
    rows = ROWS.clone().requires_grad_()

    class Counted(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self) -> None:
            super().__init__(self.pack, lambda held: held)

        def pack(self, tensor: torch.Tensor) -> torch.Tensor:
            packed.append(tensor.shape)
            return tensor.detach()

    # Of a program's own hooks all that is saved is given to them, as the block then is left as it is.
    with Counted():
        net.one(rows).sum().backward()
    assert len(packed) > 1


def test_a_backward_pass_within_the_forward() -> None:
    def between(rows: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            leaf = rows.detach().requires_grad_()
            return rows + torch.autograd.grad(leaf.square().sum(), leaf)[0]

    same(lambda net: net(ROWS.clone().requires_grad_()).sum().backward(), between)


def test_saved_tensors_that_are_asked_for_twice_or_from_outside() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(rows)
            return rows.exp()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient * ctx.saved_tensors[0].exp() * (ctx.saved_tensors[0] / ctx.saved_tensors[0])

    def use(net: Net) -> torch.Tensor:
        out = net(ROWS.clone().requires_grad_())
        seen = out.grad_fn._saved_result.clone()
        out.sum().backward()
        return seen

    same(use, Twice.apply)


@pytest.mark.parametrize("num_later", [1, 3])
@pytest.mark.parametrize("num_plain_steps", [0, 4])
def test_a_second_run_that_saves_more_or_less_is_refused(tmp_path: Path, num_later: int, num_plain_steps: int) -> None:
    net, path = nets()[1], tmp_path / "count"
    path.write_text("2")

    def between(rows: torch.Tensor) -> torch.Tensor:
        for _ in range(int(path.read_text())):
            rows = rows.exp().tanh()
        return rows

    net.one.between = between
    for _ in range(num_plain_steps):
        net(ROWS.clone().requires_grad_()).sum().backward()
    loss = net(ROWS.clone().requires_grad_()).sum()
    path.write_text(str(num_later))
    with pytest.raises(ApplyError, match=r"Net\.one .* when it was recomputed"):
        loss.backward()


def test_code_that_goes_on_past_the_end_of_a_second_run() -> None:
    class Careless(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            try:
                return self.block(rows)
            except Exception:  # noqa: BLE001 - the program's
                return rows

    def use(net: Net) -> None:
        net(ROWS.clone().requires_grad_()).sum().backward()

    plain, recomputed = nets()
    for net in (plain, recomputed):
        net.one.second = Careless(net.one.second)
    found = []
    for net in (plain, recomputed):
        torch.manual_seed(1)
        for _ in range(5):
            use(net)
        found.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize("written", ["in place", "as the result"])
def test_state_that_is_put_back_at_the_end_is_put_back_where_contents_are_not_read(
    written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a card: no version tells of writes through `.data`, and nothing else is looked at in later steps."""
    monkeypatch.setattr(contents, "_place_of", lambda tensor: None)
    scale = torch.ones(4)

    def forward(self: Block, rows: torch.Tensor, scale_of_rows: torch.Tensor | None = None) -> torch.Tensor:
        self.shift.data.mul_(2)
        rows = rows + self.second(self.first(rows).tanh()) + self.shift
        if written == "in place":
            self.shift.data.mul_(0.5)
        else:
            torch.mul(self.shift.data, 0.5, out=self.shift.data)
        return rows

    monkeypatch.setattr(Block, "forward", forward)
    monkeypatch.setattr(Net, "forward", lambda self, rows: self.two(self.one(rows)))
    weights = []
    for recomputed in (False, True):
        net = Net()
        for block in (net.one, net.two):
            block.register_buffer("shift", scale.clone())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if recomputed:
            choices = [
                Choice(
                    technique="checkpointing",
                    where=f"Net.{name}",
                    settings={},
                    saves_bytes=0,
                    adds_seconds=0.0,
                    exact=True,
                )
                for name in ("one", "two")
            ]
            apply_choices(choices, net, [optimizer])
        for _ in range(8):
            optimizer.zero_grad()
            net(ROWS).square().mean().backward()
            optimizer.step()
        assert torch.equal(net.one.shift, scale)
        weights.append([parameter.detach() for parameter in net.parameters()])
    assert all(map(torch.equal, *weights))
