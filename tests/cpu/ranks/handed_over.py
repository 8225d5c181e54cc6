"""Programs that hang hooks on their weights, and whose models write to what they are called with."""

import copy
import os
import signal
import types
from typing import Any

import torch
from tests.cpu.ranks.programs import data, mlp, program, result_of, trained
from torch import nn
from torch.nn import functional


@program()
def hooks_on_weights() -> Any:
    """Before the first step, and from the fourth step on between forward and backward pass: each is called once, with the gradient of the batch."""
    model, seen = mlp(), []
    model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.abs().sum()))
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, (x, y) in enumerate(data(6)):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        handles = []
        if step > 2:
            handles = [p.register_hook(lambda g: seen.append(g.abs().max()) or 2 * g) for p in model.parameters()]
        loss.backward()
        for handle in handles:
            handle.remove()
        optimizer.step()
        losses.append(loss.item())
    return result_of(model, losses=losses) | {"seen": torch.stack(seen).sum(), "calls": len(seen)}


class Takes(nn.Module):
    """Takes its labels out of the batch, as it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, batch: dict[str, Any], given: list[torch.Tensor]) -> torch.Tensor:
        y = batch.pop("y")
        given.reverse()
        batch["mask"] = None
        # One rank's part may have the class, and the other's not.
        return functional.cross_entropy(self.inner(given[0]), y) * (0.5 if 3 in y else 1.0)


@program()
def arguments_that_are_written() -> Any:
    model, left = Takes(), []

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        batch, given = {"x": x, "y": y}, [y, x]
        loss = model(batch, given)
        left.append(sorted(batch) == ["mask", "x"] and given[0] is x and given[1] is y)
        return loss * (2 if "y" in batch else 1)

    return trained(model, data(6), None, loss_of) | {"left": torch.tensor(left)}


class Annealed(nn.Module):
    """Returns numbers beside its logits: one that the loop changes where no snapshot of the model sees it, and how many examples there are."""

    def __init__(self, options: Any) -> None:
        super().__init__()
        self.inner, self.options = mlp(), options

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x), self.options["temperature"], len(x), None


@program()
def numbers_beside_logits() -> Any:
    """Logits are written to in place, as those of a plain run may be."""
    options = {"temperature": 1.0}
    model = Annealed(types.MappingProxyType(options))

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        options["temperature"] *= 0.7
        logits, temperature, count, nothing = model(x)
        assert nothing is None
        logits /= temperature
        logits[:, 0] = -5.0
        return functional.cross_entropy(logits, y.clamp(1)) * count

    return trained(model, data(6, 5), None, loss_of)


class Smoothed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.smoothing = mlp(), 0.0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.inner(x), y, label_smoothing=self.smoothing)


@program()
def shallow_copies() -> Any:
    """A shallow copy of the model is trained on, with another setting; the first one too, and is dropped."""
    models = [Smoothed()]
    optimizer = torch.optim.SGD(models[0].parameters(), lr=0.1)
    found = trained(models[0], data(3), optimizer, models[0])
    models.append(copy.copy(models[0]))
    models[1].smoothing = 0.5
    found |= trained(models[1], data(3), optimizer, lambda x, y: models[1](x, y) + models[0](x, y))
    del models[0]
    models.append(copy.copy(models[0]))
    models[1].smoothing = 0.1
    return found | trained(models[1], data(3), optimizer, models[1])


@program(shards_states=True)
def checkpoints_that_are_kept() -> Any:
    """States that were taken once, without a copy, and those that were loaded are the optimizer's own, and go on with it."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = trained(model, data(2), optimizer)
    best = optimizer.state_dict()
    found |= trained(model, data(2), optimizer)
    for number, state in best["state"].items():
        found |= {f"best.{number}.{name}": value.clone() for name, value in state.items()}
    loaded = copy.deepcopy(best)
    optimizer.load_state_dict(loaded)
    del best
    found |= trained(model, data(2), optimizer)
    for number, state in loaded["state"].items():
        found |= {f"loaded.{number}.{name}": value.clone() for name, value in state.items()}
    return found


@program(compares=False)
def interrupted_at_other_times() -> Any:
    """Ctrl-C comes to one rank in its third step, and to the other one in its fourth; what is saved then is of one step."""
    model, losses = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    try:
        for step, (x, y) in enumerate(data(9)):
            losses.append(functional.cross_entropy(model(x), y).item())
            functional.cross_entropy(model(x), y).backward()
            if step == 2 + int(os.environ.get("TEST_RANK", "0")):
                os.kill(os.getpid(), signal.SIGINT)
            optimizer.step()
    except KeyboardInterrupt:
        losses.append(-1)
    return result_of(model, losses=losses)
