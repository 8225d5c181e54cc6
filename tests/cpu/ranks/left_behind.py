"""What a model leaves behind in each forward: features that a hook or an attribute keeps, an auxiliary loss, and who reads them."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tests.cpu.ranks.programs import data, program, result_of, trained
from torch import nn
from torch.nn import functional

_STEPS = 6


class _Keeping(nn.Module):
    """Hands its hidden rows to `keep`."""

    def __init__(self, keep: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.kept: Any = None
        self.of_calls: list[torch.Tensor] = []
        self.keep = [keep]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        self.keep[0](self, hidden)
        return self.last(hidden)


def _trained(model: nn.Module, loss_of: Callable[..., torch.Tensor], after: Callable[..., Any] | None = None) -> Any:
    """`loss_of` and `after` are given the model, its logits and the targets."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for x, y in [*data(_STEPS), *data(2, 5)]:
        logits = model(x)
        loss = loss_of(model, logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses += [loss] if after is None else [loss, after(model, logits, y)]
    return result_of(model, losses=losses)


def _keep(model: Any, hidden: torch.Tensor) -> None:
    model.kept = hidden


@program(check_steps=0)
def features_kept_by_a_hook() -> dict[str, Any]:
    model, kept = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)), dict[str, Any]()
    model[1].register_forward_hook(lambda _, __, found: kept.__setitem__("features", found))
    return _trained(
        model,
        lambda _, logits, y: functional.cross_entropy(logits, y) + kept["features"].pow(2).mean(),
        lambda *_: float(kept["features"].sum()),
    )


@program(check_steps=0)
def rows_kept_by_the_model() -> dict[str, Any]:
    return _trained(
        _Keeping(_keep), lambda model, logits, y: functional.cross_entropy(logits, y) + model.kept.abs().mean()
    )


class Kept(NamedTuple):
    """What a model keeps of a forward."""

    hidden: torch.Tensor
    both: tuple[torch.Tensor, str]


@program(check_steps=0)
def tuple_of_rows_kept_by_the_model() -> dict[str, Any]:
    """The features of all rows and their norms, in tuples, one of them named."""

    def keep(model: Any, hidden: torch.Tensor) -> None:
        model.kept = Kept(hidden, (hidden.detach().norm(dim=1), "norms"))

    return _trained(
        _Keeping(keep),
        lambda model, logits, y: functional.cross_entropy(logits, y) + (model.kept.hidden.std(0) * model.kept.both[0].max()).mean(),
        lambda model, *_: float(model.kept.hidden.sum()) + len(model.kept.both[0]),
    )  # fmt: skip


@program(check_steps=0)
def list_of_rows_that_is_cleared() -> dict[str, Any]:
    return _trained(
        _Keeping(lambda model, hidden: model.of_calls.append(hidden)),
        lambda model, logits, y: functional.cross_entropy(logits, y) + torch.stack(model.of_calls).pow(2).mean(),
        lambda model, *_: len(model.of_calls) + len([model.of_calls.clear()]),
    )


@program(check_steps=0)
def auxiliary_loss_that_is_kept() -> dict[str, Any]:
    def keep(model: Any, hidden: torch.Tensor) -> None:
        model.kept = hidden.pow(2).sum(1).mean()

    return _trained(_Keeping(keep), lambda model, logits, y: functional.cross_entropy(logits, y) + 0.1 * model.kept)


@program(check_steps=0)
def rows_of_the_call_before() -> dict[str, Any]:
    """Their mean is that of the whole batch, as on one card."""

    class Model(_Keeping):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before, self.kept = self.kept, self.first(x).tanh()
            return self.last(self.kept if before is None else self.kept - before.detach().mean(0))

    return _trained(Model(lambda *_: None), lambda _, logits, y: functional.cross_entropy(logits, y))


def _keep_norm(model: Any, hidden: torch.Tensor) -> None:
    model.kept = hidden.detach().norm()


@program()
def statistic_that_is_kept_and_not_read() -> dict[str, Any]:
    """Copies of the model are none of it."""
    return _trained(
        _Keeping(_keep_norm),
        lambda _, logits, y: functional.cross_entropy(logits, y),
        lambda model, *_: float(copy.deepcopy(model).last.weight.detach().sum()),
    )


@program()
def statistic_that_is_kept_and_read() -> dict[str, Any]:
    return _trained(
        _Keeping(_keep_norm),
        lambda _, logits, y: functional.cross_entropy(logits, y),
        lambda model, *_: float(model.kept),
    )


@program()
def number_of_examples_that_is_kept() -> dict[str, Any]:
    def keep(model: Any, hidden: torch.Tensor) -> None:
        model.kept = (model.kept or 0) + len(hidden)

    return _trained(_Keeping(keep), lambda _, logits, y: functional.cross_entropy(logits, y))


@program(check_steps=0)
def gradient_of_rows_that_are_kept() -> dict[str, Any]:
    """That of the logits goes through them on one card."""

    def loss_of(model: Any, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model.kept.retain_grad()
        return functional.cross_entropy(logits, y)

    return _trained(_Keeping(_keep), loss_of, lambda model, *_: float(model.kept.grad.abs().sum()))


@program(check_steps=0)
def gradient_that_the_model_asks_for() -> dict[str, Any]:
    def keep(model: Any, hidden: torch.Tensor) -> None:
        hidden.retain_grad()
        model.kept = hidden

    return _trained(
        _Keeping(keep),
        lambda _, logits, y: functional.cross_entropy(logits, y),
        lambda model, *_: float(model.kept.grad.abs().sum()),
    )


@program(check_steps=0)
def gradient_of_one_of_two_results() -> dict[str, Any]:
    class Model(_Keeping):
        def forward(self, x: torch.Tensor) -> Any:
            hidden = self.first(x).tanh()
            return self.last(hidden), hidden

    def loss_of(_: nn.Module, found: Any, y: torch.Tensor) -> torch.Tensor:
        found[1].retain_grad()
        return functional.cross_entropy(found[0], y)

    return _trained(Model(lambda *_: None), loss_of, lambda _, found, __: float(found[1].grad.abs().sum()))


@program()
def attribute_of_a_result() -> dict[str, Any]:
    class Model(_Keeping):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits = self.last(self.first(x).tanh())
            logits.scale = 2.0  # pyrefly: ignore[missing-attribute]
            return logits

    return _trained(
        Model(lambda *_: None), lambda _, logits, y: functional.cross_entropy(logits, y) * getattr(logits, "scale", 1.0)
    )


class Counting(nn.Module):
    """A model that counts its calls in a buffer, and goes by the count; another name for it is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("count", torch.zeros(()))
        self.__dict__["other_name"] = self.count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        hidden = self.layer(x)
        # By the values of the batch from the third call on: parts are led, and run once more.
        if self.count > 2 and bool((x[:, 0] > 5).any()):
            hidden = hidden.masked_fill(x[:, :1] > 5, 0.0)
        return hidden / (self.other_name + 0.0) * (2 if int(self.count) % 3 == 0 else 1)


@program()
def buffers_that_are_written() -> Any:
    """A count that is read as a number, vectors of a spectral norm, evaluations that count too, and a count that begins anew."""
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), nn.Tanh(), Counting())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step, (x, y) in enumerate(data(9)):
        x[step % 6, 0] = 9.0 * (step % 2)
        optimizer.zero_grad()
        # Two forwards before one backward.
        loss = functional.cross_entropy(model(x), y) + functional.cross_entropy(model(x + 1), y)
        loss.backward()
        optimizer.step()
        losses.append(loss)
        if step % 3 == 0:
            model.eval()
            with torch.no_grad():
                losses.append(model(x).sum())
            model.train()
        if step == 5:
            model[2].count.zero_()
    return result_of(model, losses=losses)


class Largest(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = self.layer(x) * self.count.copy_(x.amax())
        self.count.zero_()
        return scaled


@program()
def buffer_that_has_the_largest_of_the_batch() -> Any:
    """It is overwritten before the forward ends."""
    return trained(Largest(), data())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, (hidden, _) = self.layers(x)
        return self.head(outputs.mean(1)) + self.head(torch.cat([hidden[-2], hidden[-1]], -1))


@program()
def recurrent_layers() -> Any:
    """At the host they are operators of oneDNN, with the steps in front whatever `batch_first` says; as many steps as examples in some batches."""
    batches = [(torch.randn(6, 5 + step % 2, 8), torch.randint(0, 4, (6,))) for step in range(6)]
    return trained(Recurrent(), batches)
