"""Programs that cannot be divided over ranks, or whose ranks differ as real processes do: each is to be refused, or noticed."""

import contextlib
import os
import types
from typing import Any

import numpy as np
import torch
from tests.cpu.ranks.programs import data, mlp, program, result_of, trained
from torch import nn
from torch.nn import functional


def is_second() -> bool:
    """Whether this is the second rank: for what differs between real processes (time, process numbers)."""
    return os.environ.get("TEST_RANK") == "1"


@program()
def dropout() -> Any:
    return trained(mlp(nn.Dropout(0.3)), data(3))


@program()
def batch_norm() -> Any:
    return trained(mlp(nn.BatchNorm1d(16)), data(3))


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x - x.mean(0))


@program()
def batch_statistics_by_hand() -> Any:
    return trained(Centred(), data(3))


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.normalize(self.inner(x), dim=1)
        return functional.cross_entropy(h @ h.T / 0.2, torch.arange(len(x)))


@program()
def contrastive_inside() -> Any:
    model = Contrastive()
    return trained(model, data(3), None, lambda x, y: model(x))


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        self.mean.lerp_(out.detach().mean(0), 0.1)
        return out - self.mean


@program()
def running_mean() -> Any:
    return trained(Remembers(), data(3))


@program()
def gradient_penalty() -> Any:
    model = mlp()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return functional.cross_entropy(out, y) + slope.pow(2).mean()

    return trained(model, data(3), None, loss_of)


@program()
def refusal_that_is_swallowed() -> Any:
    model, losses = mlp(nn.Dropout(0.5)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in data(4):
        try:
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        except Exception:  # noqa: BLE001 - as programs do
            continue
    return result_of(model, losses=losses)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(8, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        out, _ = self.rnn(x, state)
        return self.head(out[-1])


@program()
def examples_in_the_second_dimension() -> Any:
    model = Stateful()
    return trained(
        model,
        [(torch.randn(4, 3, 8), torch.randint(0, 4, (3,)))],
        None,
        lambda x, y: functional.cross_entropy(model(x, torch.zeros(1, 3, 12)), y),
    )


class Overwrites(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5)
        return self.inner(x)


@program()
def overwritten_batch() -> Any:
    model = Overwrites()
    return trained(model, data(3), None, lambda x, y: functional.mse_loss(model(x), x))


@program()
def one_example() -> Any:
    return trained(mlp(), data(3, 1))


@program()
def data_by_the_process() -> Any:
    """As a seed from the time does."""
    torch.manual_seed(7 + is_second())
    model = mlp()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.1)
    return trained(model, data(3))


@program()
def weights_by_the_process() -> Any:
    model, batches = mlp(), data(3)
    with torch.no_grad():
        model[0].bias += torch.from_numpy(np.random.default_rng(int(is_second())).normal(size=16)).float()
    return trained(model, batches)


@program()
def targets_by_the_process() -> Any:
    return trained(mlp(), [(x, y.roll(int(is_second()))) for x, y in data(3)])


@program()
def rate_by_the_process() -> Any:
    """Weights differ from the second step on."""
    model = mlp()
    return trained(model, data(4), torch.optim.SGD(model.parameters(), lr=0.2 if is_second() else 0.1))


@program(shards_states=True)
def rate_by_the_process_that_has_the_states() -> Any:
    """Weights are the same on all ranks, and those of neither rate."""
    return rate_by_the_process()


@program()
def fewer_steps_on_one() -> Any:
    return trained(mlp(), data(5)[: 3 if is_second() else 5])


@program()
def skips_a_step_on_one() -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, y) in enumerate(data(5)):
        loss = functional.cross_entropy(model(x), y)
        if not (is_second() and step == 2):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return result_of(model)


@program()
def error_on_one() -> Any:
    batches = data(5)
    if is_second():
        batches[2] = (batches[2][0], batches[2][1] + 9)
    return trained(mlp(), batches)


@program(shards_states=True)
def states_of_all_at_once() -> Any:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters())
    x, y = data(1)[0]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    return result_of(model)


class Returns(nn.Module):
    """Its loss, and what that is of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = self.inner(x)
        return functional.cross_entropy(out, y), out


@program()
def gradient_of_an_output_beside_the_loss() -> Any:
    model, slopes = Returns(), []

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss, out = model(x, y)
        slopes.append(torch.autograd.grad(loss, out, retain_graph=True, allow_unused=True)[0])
        return loss

    return trained(model, data(3), None, loss_of)


@program()
def hook_on_an_output_beside_the_loss() -> Any:
    model = Returns()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss, out = model(x, y)
        out.register_hook(lambda g: g * 2)
        return loss

    return trained(model, data(3), None, loss_of)


class Measures(nn.Module):
    """Fills in a table that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        out = self.inner(batch["x"])
        batch["hits"] = (out.argmax(-1) == batch["y"]).sum()
        return functional.cross_entropy(out, batch["y"])


@program()
def measures_in_an_argument() -> Any:
    model, hits = Measures(), []

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        batch = {"x": x, "y": y, "hits": 0}
        loss = model(batch)
        hits.append(float(batch["hits"]))
        return loss

    return trained(model, data(3), None, loss_of) | {"hits": torch.tensor(hits)}


@program()
def outputs_written_past_autograd() -> Any:
    """A plain backward pass of the softmax goes by what is written to its result."""
    model, late = nn.Sequential(mlp(), nn.Softmax(-1)), []

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        shares = model(x)
        late.append(None)
        if len(late) > 3:
            shares.data.clamp_(0.2, 0.6)
        return functional.nll_loss(shares.log(), y)

    return trained(model, data(5), None, loss_of)


@program()
def decides_by_text() -> Any:
    """One rank's part has the number that the model looks for, and the other's has not."""

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = mlp(), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.inner(x) * (0.5 if self.calls > 3 and "77" in repr(x[:, 0]) else 1.0)

    batches = data(6)
    for x, _ in batches:
        x[0, 0] = 77.0
    return trained(Looks(), batches)


class Scales(nn.Module):
    def __init__(self, options: Any) -> None:
        super().__init__()
        self.inner, self.options = mlp(), options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        by_rows, constant = torch.ones(1), torch.ones(1)
        by_rows.numpy()[0] = len(x) * 0.1
        return self.inner(x) * (by_rows if self.options["by rows"] else constant)


@program()
def scales_by_examples_later() -> Any:
    """What numpy writes to a tensor's memory is compared, where an operator reads it."""
    options, calls = {"by rows": False}, []
    model = Scales(types.MappingProxyType(options))

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        options["by rows"] = len(calls) > 3
        return functional.cross_entropy(model(x), y)

    return trained(model, data(6), None, loss_of)


@program(shards_states=True)
def exchanged_tensors() -> Any:
    """Torch exchanges no tensor that is referred to weakly, and the program goes on without."""
    model = mlp()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError):
            torch.utils.swap_tensors(model[0].bias, nn.Parameter(model[0].bias.detach() * 0.5))
        return functional.cross_entropy(model(x), y)

    return trained(model, data(6), None, loss_of)


@program(shards_states=True)
def steps_in_a_fork() -> Any:
    """The child has the states of its rank's share alone."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = trained(model, data(2), optimizer)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(Exception):
            trained(model, data(2), optimizer)
        os._exit(0)
    os.waitpid(child, 0)
    return found


@program()
def hook_on_the_first_gradient() -> Any:
    """It takes the time of the first gradient, whichever that is."""
    model, seen = mlp(), []
    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), lambda g: seen.append(len(g)), mode="any")
    return trained(model, data(3))
