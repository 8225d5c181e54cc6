"""Eight leaks by Python containers, globals, caches and attributes that are never emptied."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.leaks.script import leaking

CONTAINER = "Python container"
FEATURES: dict[str, list[torch.Tensor]] = {"layer": []}


class _EvaluationLoop:
    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.outputs: list[dict[str, torch.Tensor]] = []

    @torch.no_grad()
    def validation_step(self, batch: torch.Tensor) -> None:
        self.outputs.append({"x": self.model(batch)})  # leaks here: outputs_of_validation_steps


@leaking(CONTAINER, holder="loop.outputs[-1]['x']")
def outputs_of_validation_steps(device: str) -> Iterator[None]:
    """Lightning-AI/pytorch-lightning#8453, #5735: the evaluation loop keeps what each validation step returns."""
    loop = _EvaluationLoop(nn.Linear(256, 256).to(device))
    while True:
        loop.validation_step(torch.ones(256, 256, device=device))
        yield


class _Trainer:
    def __init__(self) -> None:
        self.val_accuracy_results: dict[str, Any] = {"pose": {"joints": []}}

    def log(self, values: torch.Tensor) -> None:
        self.val_accuracy_results["pose"]["joints"].append(values)


@leaking(CONTAINER, holder="trainer.val_accuracy_results['pose']['joints'][-1]")
def results_that_are_never_cleared(device: str) -> Iterator[None]:
    """Lightning-AI/pytorch-lightning#14270: a dict of lists that a trainer appends to in every validation and never clears."""
    trainer = _Trainer()
    model = nn.Linear(128, 512).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        loss = model(torch.ones(64, 128, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            trainer.log(model(torch.ones(256, 128, device=device)))  # leaks here
        yield


@leaking(CONTAINER, holder="predictions")
def predictions_concatenated(device: str) -> Iterator[None]:
    """huggingface/transformers#7232, #8476: the predictions of all batches are concatenated into one tensor on the device."""
    model = nn.Linear(64, 512).to(device)
    predictions = torch.zeros(0, 512, device=device)
    while True:
        with torch.no_grad():
            logits = model(torch.ones(128, 64, device=device))
            predictions = torch.cat((predictions, logits))  # leaks here
        yield


class _AveragePrecision:
    def __init__(self) -> None:
        self.preds: list[torch.Tensor] = []
        self.target: list[torch.Tensor] = []

    def __call__(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.preds.append(preds.sigmoid())  # leaks here: metric_without_reset
        self.target.append(target.to(torch.int64))  # leaks here: metric_without_reset


@leaking(CONTAINER, holder="metric.")
def metric_without_reset(device: str) -> Iterator[None]:
    """Lightning-AI/torchmetrics#3294, #2481: a metric has list states, and is not reset between epochs."""
    metric = _AveragePrecision()
    while True:
        metric(torch.ones(512, 128, device=device), torch.ones(512, 128, device=device))
        yield


class _Dataset:
    def __init__(self, device: str) -> None:
        self.device = device

    @functools.cache  # noqa: B019 - the report
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((256, 256), index / 7, device=self.device)  # leaks here: cache_without_bound


@leaking(CONTAINER, holder="__getitem__")
def cache_without_bound(device: str) -> Iterator[None]:
    """MoonshotAI/Kimi-Audio#117: `lru_cache(maxsize=None)` on the `__getitem__` of a data set."""
    dataset = _Dataset(device)
    index = 0
    while True:
        dataset[index].sum()
        index += 1
        yield


def _keep_features(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
    FEATURES["layer"].append(output.detach().clone())  # leaks here: features_of_a_hook


@leaking(CONTAINER, holder="FEATURES['layer'][-1]")
def features_of_a_hook(device: str) -> Iterator[None]:
    """KamitaniLab/bdpy#72, meta-pytorch/opacus#176: a forward hook that nobody removes appends activations to a global."""
    FEATURES["layer"].clear()
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    model[0].register_forward_hook(_keep_features)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        model(torch.ones(256, 128, device=device)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


class _Accelerator:
    def __init__(self) -> None:
        self._models: list[nn.Module] = []

    def prepare(self, model: nn.Module) -> nn.Module:
        self._models.append(model)
        return model


@leaking(CONTAINER, holder="accelerator._models[-1]")
def models_that_were_prepared(device: str) -> Iterator[None]:
    """huggingface/accelerate#739, #89, huggingface/diffusers#8721: each model stays in a list of the accelerator; a sweep trains one after the other."""
    accelerator = _Accelerator()
    while True:
        model = accelerator.prepare(nn.Linear(256, 256, device=device))  # leaks here
        with torch.no_grad():
            model(torch.ones(4, 256, device=device))
        yield


class _Answer:
    def __init__(self, text: str, output: dict[str, Any]) -> None:
        self.text = text
        self._meta = {"hf_output": output}


@leaking(CONTAINER, holder="answers[-1]._meta['hf_output']['past_key_values']")
def outputs_in_the_answers(device: str) -> Iterator[None]:
    """generative-computing/mellea#544: each answer of a session keeps the output object of `generate`, and with it the key-value cache."""
    answers = []
    project = nn.Linear(64, 64, bias=False).to(device)
    while True:
        keys = torch.zeros(1, 0, 64, device=device)
        with torch.no_grad():
            for _ in range(4):
                keys = torch.cat((keys, project(torch.ones(1, 256, 64, device=device))), dim=1)  # leaks here
        answers.append(_Answer("yes", {"past_key_values": (keys,)}))
        yield
