"""Eight leaks by retained autograd graphs: a loss, a hidden state or a gradient is kept, and with it what it was computed from."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from benchmarks.leaks.script import leaking

GRAPH = "retained autograd graph"


def _model(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1)).to(device)


@leaking(GRAPH, holder="running_loss")
def running_loss_of_an_evaluation(device: str) -> Iterator[None]:
    """BatsResearch/labelmodels#4, pytorch/pytorch#1840: `running_loss += loss` without `.item()`, in a loop without backward passes."""
    model, running_loss = _model(device), torch.zeros((), device=device)
    while True:
        hidden = model[0](torch.ones(256, 64, device=device))
        hidden = torch.tanh(hidden)  # leaks here
        loss = model[2](hidden).square().mean()
        running_loss = running_loss + loss
        yield


@leaking(GRAPH, holder="metrics[-1]['loss']")
def metrics_with_their_graphs(device: str) -> Iterator[None]:
    """pnnl/neuromancer#292: metrics are stored with their graphs; `retain_graph=True` keeps what the backward pass would have freed."""
    model, metrics = _model(device), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        hidden = functional.silu(model[0](torch.ones(256, 64, device=device)))  # leaks here
        loss = model[2](hidden).square().mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        metrics.append({"loss": loss})
        yield


@leaking(GRAPH, holder="hidden")
def hidden_state_that_is_not_detached(device: str) -> Iterator[None]:
    """pytorch/pytorch#2198: the hidden state of a recurrent net is carried over all batches of an epoch."""
    cell = nn.Linear(256, 256).to(device)
    hidden = torch.zeros(256, 256, device=device)
    while True:
        hidden = torch.tanh(cell(hidden))  # leaks here
        hidden.mean().item()
        yield


@leaking(GRAPH, holder="weight.grad")
def gradients_that_are_never_zeroed(device: str) -> Iterator[None]:
    """pytorch/pytorch#1346: gradients of backward(create_graph=True) are summed over the steps, each with its graph."""
    weight = torch.ones(256, 256, device=device, requires_grad=True)
    while True:
        y = torch.sin(weight) * weight  # leaks here
        y.sum().backward(create_graph=True)  # leaks here
        yield


class _AverageMeter:
    def __init__(self) -> None:
        self.sum: torch.Tensor | float = 0.0
        self.count = 0

    def update(self, value: torch.Tensor, n: int) -> None:
        self.sum = self.sum + value * n
        self.count += n


@leaking(GRAPH, holder="meter.sum")
def average_meter(device: str) -> Iterator[None]:
    """rabbityl/lepard#12: AverageMeter.update adds losses that are not detached."""
    model, meter = _model(device), _AverageMeter()
    while True:
        hidden = torch.exp(model[0](torch.ones(256, 64, device=device)))  # leaks here
        meter.update(model[2](hidden).mean(), 256)
        yield


class _Problem:
    def __init__(self, model: nn.Sequential) -> None:
        self.model = model
        self.losses: list[torch.Tensor] = []

    def evaluate_loss(self, x: torch.Tensor) -> float:
        hidden = torch.sigmoid(self.model[0](x))  # leaks here: losses_of_a_problem
        loss = self.model[2](hidden).mean()
        self.losses.append(loss)
        return loss.item()


@leaking(GRAPH, holder="problem.losses[-1]")
def losses_of_a_problem(device: str) -> Iterator[None]:
    """IBM/mi-prometheus#111: one more loss tensor after every evaluation, in a list for statistics."""
    problem = _Problem(_model(device))
    while True:
        problem.evaluate_loss(torch.ones(256, 64, device=device))
        yield


class _Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.affine, self.action = nn.Linear(64, 512), nn.Linear(512, 2)
        self.saved_log_probs: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.affine(x))  # leaks here: log_probabilities_of_all_episodes
        return functional.log_softmax(self.action(hidden), dim=-1)


@leaking(GRAPH, holder="policy.saved_log_probs[-1]")
def log_probabilities_of_all_episodes(device: str) -> Iterator[None]:
    """pytorch/pytorch#1536: the policy keeps the log probabilities of its actions, and the list is not cleared after an episode."""
    policy = _Policy().to(device)
    while True:
        policy.saved_log_probs.append(policy(torch.ones(128, 64, device=device))[:, 0])
        yield


@leaking(GRAPH, holder="metrics['total_loss']")
def total_loss_of_a_dict(device: str) -> Iterator[None]:
    """google/brax#152: `total_loss += loss` in a dict of metrics that lives as long as the training."""
    model = _model(device)
    metrics: dict[str, torch.Tensor] = {}
    while True:
        for name in ("policy_loss", "total_loss"):
            hidden = functional.softplus(model[0](torch.ones(128, 64, device=device)))  # leaks here
            loss = model[2](hidden).mean()
            metrics[name] = loss if name == "policy_loss" else metrics.get(name, 0.0) + loss
        yield
