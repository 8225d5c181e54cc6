"""Programs whose optimizer states are sharded: what they read of them is the whole, and a step may have a closure."""

import copy
import io
from typing import Any

import torch
from tests.cpu.ranks.programs import data, mlp, program, result_of, trained
from torch import nn
from torch.nn import functional


class OwnAdam(torch.optim.Adam):
    """With torch's step."""

    def rates(self) -> list[float]:
        return [group["lr"] for group in self.param_groups]


@program(shards_states=True)
def sharded_steps_with_closures() -> Any:
    """As Lightning steps: the passes are within the step, and gradients are clipped there; one closure finds that there is nothing to do."""
    model, losses = mlp(), []
    optimizer = OwnAdam(model.parameters(), lr=1e-2)
    for step, (x, y) in enumerate(data(6)):

        def closure(x: torch.Tensor = x, y: torch.Tensor = y, is_skipped: bool = step == 3) -> torch.Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            if not is_skipped:
                loss.backward()
                losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            return loss

        losses.append(optimizer.step(closure).item())
    losses += [state["exp_avg"].norm().item() for state in optimizer.state_dict()["state"].values()]
    return result_of(model, losses=[*losses, *optimizer.rates()])


@program(shards_states=True)
def reads_sharded_states() -> Any:
    """A log of the moments, one that is kept, one that is scaled by hand, and copies of the optimizer."""
    model, seen, kept = mlp(), [], torch.zeros(())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        trained(model, data(1), optimizer)
        seen.append(sum(s["exp_avg"].abs().sum().item() for s in optimizer.state.values()))
        if len(seen) == 1:
            kept = optimizer.state[model[0].weight]["exp_avg"]
        optimizer.state[model[2].weight]["exp_avg_sq"] *= 0.5
        seen += [kept.sum().item(), len(optimizer.state), optimizer.state[model[2].bias]["step"].item()]
    other = copy.deepcopy(optimizer)
    saved = io.BytesIO()
    torch.save(optimizer, saved)
    saved.seek(0)
    for each in (other, torch.load(saved, weights_only=False)):
        seen += [state["exp_avg"].norm().item() for state in each.state.values()]
    # Of its own parameters.
    other.step()
    seen += [state["exp_avg"].norm().item() for state in other.state.values()]
    return result_of(model, losses=seen)


@program(shards_states=True)
def takes_sharded_states_out() -> Any:
    """A layer grows, and takes its states along: half of the ranks have none."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained(model, data(2), optimizer)
    state = optimizer.state.pop(model[2].bias, None)
    model[2].bias = optimizer.param_groups[0]["params"][3] = nn.Parameter(model[2].bias.detach() * 2)
    if state is not None:
        optimizer.state[model[2].bias] = state
    return trained(model, data(4), optimizer)
