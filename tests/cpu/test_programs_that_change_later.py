"""Programs that do something after their first steps that a technique has to follow: weights are frozen, lengths grow, labels are wrong, models are saved."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tightfit.errors import ApplyError, apply_error, forget_apply_errors
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices

Optimizer = torch.optim.Optimizer
TILES = ("tiled_tokens", "Net.f", {"num_tiles": 2})
UPDATES = ("update_in_backward", "optimizer", {"kernel": "same", "clips": False})
ZERO_GRAD = ("zero_grad", "gradients", {})
STREAMED = ("trained_weight_streaming", "Net", {"blocks": ["f"], "smallest_bytes": 1, "host_bytes": 1 << 20})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.i = nn.Linear(8, 8)
        self.f = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.f(self.i(x)))


def run(loop: Callable[[Net, Optimizer], Any], *choices: tuple[str, str, dict[str, Any]]) -> list[torch.Tensor]:
    """The weights after the loop."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    if choices:
        given = [
            Choice(technique=name, where=where, saves_bytes=0, adds_seconds=0.0, exact=True, settings=settings)
            for name, where, settings in choices
        ]
        session = apply_choices(given, model, [optimizer])
    loop(model, optimizer)
    if choices:
        session.undo()
    return [p.detach().clone() for p in model.parameters()]


def step(model: Net, optimizer: Optimizer, length: int, *, sets_to_none: bool = True) -> None:
    optimizer.zero_grad(set_to_none=sets_to_none)
    model(torch.randn(4, length, 8)).square().mean().backward()
    optimizer.step()


def assert_near(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    torch.testing.assert_close(ones, others, rtol=1e-4, atol=1e-5)


def test_tiled_weights_may_be_frozen_and_unfrozen() -> None:
    def loop(model: Net, optimizer: Optimizer) -> None:
        for number in range(6):
            model.f.requires_grad_(number not in (2, 3))
            step(model, optimizer, 6)

    assert_near(run(loop, TILES), run(loop))


@pytest.mark.parametrize("other", [UPDATES, ZERO_GRAD], ids=lambda other: other[0])
def test_lengths_may_change_where_tiles_meet_gradients_of_ours(other: tuple[str, str, dict[str, Any]]) -> None:
    def loop(model: Net, optimizer: Optimizer) -> None:
        for length in (6, 6, 7, 8):
            # The forward of the next step runs while the gradients of the last one are there.
            loss = model(torch.randn(4, length, 8)).square().mean()
            optimizer.zero_grad(set_to_none=other is UPDATES)
            loss.backward()
            optimizer.step()

    assert_near(run(loop, TILES, other), run(loop))


@pytest.mark.parametrize("gradients_in", ["forward", "backward"])
def test_a_label_out_of_bounds_is_the_error_of_plain_code(gradients_in: str) -> None:
    told: list[str] = []

    def loop(model: Net, optimizer: Optimizer) -> None:
        for number in range(4):
            labels = torch.randint(0, 5, (12,))
            if number == 2:
                labels[3] = 77
            try:
                loss = cross_entropy(model(torch.randn(12, 8)), labels)
            except IndexError as error:
                told.append(str(error))
                continue
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    chunked = ("chunked_loss", "Net.head", {"num_chunks": 2, "gradients_in": gradients_in})
    assert_near(run(loop, chunked), run(loop))
    assert told == 2 * ["Target 77 is out of bounds."]


def test_streamed_weights_are_saved_as_storages_of_their_own(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")

    def loop(model: Net, optimizer: Optimizer) -> None:
        for _ in range(2):
            step(model, optimizer, 6)
        safetensors.save_model(model, str(tmp_path / "model.safetensors"))
        torch.save(model.f.state_dict(), tmp_path / "model.pt")
        saved = safetensors.load_file(tmp_path / "model.safetensors")
        assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())

    assert all(torch.equal(a, b) for a, b in zip(run(loop, STREAMED), run(loop), strict=True))
    # The bytes of two layers and their names, not those of the slab.
    assert (tmp_path / "model.pt").stat().st_size < 10_000


def test_weights_of_two_models_cannot_be_streamed_by_one_plan() -> None:
    with pytest.raises(ApplyError, match="one model at a time"):
        run(lambda *_: None, STREAMED, STREAMED)


def test_memory_that_is_read_past_python_is_an_error_and_not_a_fault() -> None:
    def loop(model: Net, optimizer: Optimizer) -> None:
        model(torch.randn(4, 6, 8)).square().mean().backward()
        with pytest.raises(RuntimeError, match="data pointer"):
            torch.utils.dlpack.to_dlpack(model.head.weight.grad)
        optimizer.step()

    run(loop, UPDATES)


@pytest.mark.parametrize("choice", [STREAMED, ZERO_GRAD], ids=lambda choice: choice[0])
@pytest.mark.parametrize("kind", ["view", "detach", "numpy", "dlpack"])
def test_views_of_a_gradient_that_steps_add_to_stay_views_of_it(
    kind: str, choice: tuple[str, str, dict[str, Any]]
) -> None:
    def loop(model: Net, optimizer: Optimizer) -> None:
        views: list[Any] = []
        for number in range(6):
            optimizer.zero_grad(set_to_none=False)
            model(torch.randn(4, 6, 8)).square().mean().backward()
            if number == 1:
                gradients = [p.grad for p in model.parameters()]
                viewed: dict[str, Callable[[torch.Tensor], Any]] = {
                    "view": lambda g: g.view(-1),
                    "detach": torch.Tensor.detach,
                    "numpy": torch.Tensor.numpy,
                    "dlpack": torch.from_dlpack,
                }
                views = [viewed[kind](gradient) for gradient in gradients]
                del gradients
            for view in views:
                view.clip(-1e-3, 1e-3, out=view) if kind == "numpy" else view.clamp_(-1e-3, 1e-3)
            optimizer.step()

    assert all(map(torch.equal, run(loop, choice), run(loop)))


@pytest.mark.parametrize("way", ["operator", "data"])
@pytest.mark.parametrize("is_on_host", [False, True])
def test_moments_that_are_reset_through_the_state_dict_are_reset(way: str, *, is_on_host: bool) -> None:
    def loop(model: Net, optimizer: Optimizer) -> None:
        kept: list[Any] = []
        for number in range(7):
            step(model, optimizer, 6)
            if number == 1:
                kept.append(optimizer.state_dict()["state"])
            if number in (2, 4):
                for state in kept[0].values():
                    (state["exp_avg"] if way == "operator" else state["exp_avg"].data).mul_(0.5)

    sizes = {"host_bytes": 1 << 20, "window_bytes": 4096, "least_elements": 1}
    offloaded = ("optimizer_offload", "optimizer", sizes | ({"executor": "host"} if is_on_host else {}))
    # The host's own updates are those of a fused optimizer, which rounds otherwise.
    torch.testing.assert_close(run(loop, offloaded), run(loop), rtol=1e-5 * is_on_host, atol=1e-6 * is_on_host)


def test_a_streamed_weight_that_its_block_writes_past_autograd_in_a_later_step_is_refused() -> None:
    class Shrinking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.abs().max() > 50:
                self.weight.data.mul_(0.9)
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Shrinking(8, 8), nn.Linear(8, 8))
    settings = {"blocks": ["0", "1"], "smallest_bytes": 1, "host_bytes": 1 << 16}
    chosen = Choice(
        technique="trained_weight_streaming",
        where="Sequential",
        saves_bytes=0,
        adds_seconds=0.0,
        exact=True,
        settings=settings,
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    apply_choices([chosen], model, [optimizer])
    for _ in range(5):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ApplyError, match="differs from its copy in host memory"):
        model(100 * torch.randn(4, 8)).square().mean().backward()
    assert all(map(torch.equal, before[2:], list(model.parameters())[2:]))


class GradientDropout(torch.autograd.Function):
    """The identity, with a backward pass that drops what a mask of the program's own says."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, mask)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyrefly: ignore[bad-override]
        return gradient * ctx.saved_tensors[1], None


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.tensor([byte % 2 for byte in os.urandom(8)], dtype=torch.uint8)
        return GradientDropout.apply(self.inner(x)[0], mask)


def test_bytes_of_the_programs_own_behind_a_recurrent_layer_are_compared() -> None:
    model = nn.Sequential(Recurrent(), nn.Linear(8, 8))
    chosen = Choice(
        technique="checkpointing", where="Sequential.0", saves_bytes=0, adds_seconds=0.0, exact=True, settings={}
    )
    apply_choices([chosen], model, [])
    loss = model(torch.randn(5, 2, 8)).square().mean()
    with pytest.raises(ApplyError, match="saved other values"):
        loss.backward()


def test_moments_exported_without_a_copy_stay_the_moments() -> None:
    def loop(model: Net, optimizer: Optimizer) -> None:
        exported: list[torch.Tensor] = []
        for number in range(6):
            step(model, optimizer, 6)
            if number == 1:
                exported = [torch.from_dlpack(state["exp_avg"]) for state in optimizer.state.values()]
            for moment in exported:
                moment.mul_(0.5)

    offloaded = {"host_bytes": 1 << 20, "window_bytes": 4096, "least_elements": 1}
    assert all(map(torch.equal, run(loop, ("optimizer_offload", "optimizer", offloaded)), run(loop)))


def with_a_hook(model: Net, seen: list[Any]) -> Callable[[], Any]:
    return model.f[0].weight.register_hook(lambda gradient: seen.append(len(gradient))).remove


def with_dropout(model: Net, seen: list[Any]) -> Callable[[], Any]:
    model.f[1] = nn.Dropout(0.5)
    return lambda: setattr(model.f, "1", nn.GELU())


def with_a_mean_over_tokens(model: Net, seen: list[Any]) -> Callable[[], Any]:
    """Which counts its calls, too."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        model.f.num_calls = getattr(model.f, "num_calls", 0) + 1
        return x - x.mean(1, keepdim=True)

    model.f[1].forward = forward
    return lambda: (seen.append(model.f.num_calls), vars(model.f[1]).pop("forward"))


@pytest.mark.parametrize("change", [with_a_hook, with_dropout, with_a_mean_over_tokens])
def test_tiles_run_whole_where_they_cannot_be_any_more(change: Callable[[Net, list[Any]], Callable[[], Any]]) -> None:
    def trained(*choices: Any) -> tuple[list[torch.Tensor], list[Any]]:
        seen: list[Any] = []

        def loop(model: Net, optimizer: Optimizer) -> None:
            for number in range(5):
                back = change(model, seen) if number in (2, 3) else None
                step(model, optimizer, 6)
                back() if back is not None else None
                seen.append(torch.rand(()).item())

        return run(loop, *choices), seen

    forget_apply_errors()
    (weights, seen), (plain_weights, plain_seen) = trained(TILES), trained()
    assert apply_error() is None
    assert_near(weights, plain_weights)
    assert seen == plain_seen


def test_weights_from_elsewhere_are_not_run_in_tiles() -> None:
    def loop(model: Net, optimizer: Optimizer) -> None:
        step(model, optimizer, 6)
        for _ in range(2):
            fast = {name: p * 0.9 for name, p in model.named_parameters()}
            optimizer.zero_grad()
            torch.func.functional_call(model, fast, (torch.randn(4, 6, 8),)).square().mean().backward()
            optimizer.step()

    assert_near(run(loop, TILES), run(loop))
