"""What the host takes for an operator, by kind: with and without a graph, backward, under autocast; for modules around it, for optimizers and clipping.

    PYTHONPATH=src:. python -m benchmarks.host_costs [--device cpu]

`cost.efficiency` has one figure for all of them (`issue`, and `tightfit calibrate` measures it with a product by a number). Prints one line of JSON, in
microseconds of one call: the host's clock around 60 of them, which is fewer than a GPU's queue holds, so that nothing waits. The tensors are so small
that kernels end before the next is issued. `reference_work` tells how fast the processor is (`cost.host_python`).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tightfit.cost.host_python import reference_work

_NUM_CALLS = 60
_NUM_SAMPLES = 9
Call = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_costs", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    torch.manual_seed(0)
    found: dict[str, Any] = {"device": device, "reference_work": _once(reference_work, device)}
    weights = [torch.randn(64, 64), torch.randn(64), torch.randn(16, 16, 3, 3), torch.ones(16), torch.zeros(16)]
    weights = [each.to(device) for each in weights]
    for name, (start, call) in _calls(device, weights).items():
        found[name] = _of_call(start, call, weights, device)
    for number in (50, 150):
        found |= _of_updates(number, device)
    print(json.dumps(found))


def _once(call: Callable[[], Any], device: str) -> float:
    """The median of a call's microseconds on the host, with an empty queue before each."""
    call()
    samples = []
    for _ in range(_NUM_SAMPLES):
        _wait(device)
        begin = time.perf_counter()
        call()
        samples.append(time.perf_counter() - begin)
    _wait(device)
    return round(1e6 * statistics.median(samples), 2)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _chain(call: Call, value: torch.Tensor) -> torch.Tensor:
    for _ in range(_NUM_CALLS):
        value = call(value)
    return value


def _of_call(start: torch.Tensor, call: Call, weights: list[torch.Tensor], device: str) -> dict[str, float]:
    with torch.no_grad():
        row = {"no_grad": _once(lambda: _chain(call, start), device)}
    leaf = start.clone().requires_grad_()
    for weight in weights:
        weight.requires_grad_(True)
    row["forward"] = _once(lambda: _chain(call, leaf), device)
    with torch.autocast(device, torch.bfloat16):
        row["autocast"] = _once(lambda: _chain(call, leaf), device)
    end = _chain(call, leaf)
    if end.grad_fn is not None:
        gradient = torch.ones_like(end)
        row["backward"] = _once(lambda: end.backward(gradient, retain_graph=True), device)
    for weight in weights:
        weight.requires_grad_(False).grad = None
    return {name: round(value / _NUM_CALLS, 2) for name, value in row.items()}


def _calls(device: str, weights: list[torch.Tensor]) -> Mapping[str, tuple[torch.Tensor, Call]]:
    """Where a chain of a call begins, and the call."""
    square, bias, kernel, scale, shift = weights
    rows = torch.randn(4, 16, 64, device=device)
    image = torch.randn(2, 16, 8, 8, device=device)
    heads = torch.randn(2, 4, 16, 64, device=device, dtype=torch.bfloat16)
    mean, variance = torch.zeros(16, device=device), torch.ones(16, device=device)
    linear, norm = nn.Linear(64, 64).to(device), nn.LayerNorm(64).to(device)
    convolution, batch = nn.Conv2d(16, 16, 3, padding=1).to(device), nn.BatchNorm2d(16).to(device)
    return {
        "view": (rows, lambda t: t.view(64, 64).view(4, 16, 64)),
        "transpose": (rows, lambda t: t.transpose(1, 2).transpose(1, 2)),
        "add": (rows, lambda t: t + bias),
        "times a number": (rows, lambda t: t * 1.01),
        "gelu": (rows, functional.gelu),
        "softmax": (rows, lambda t: functional.softmax(t, -1)),
        "dropout": (rows, lambda t: functional.dropout(t, 0.1)),
        "layer norm": (rows, lambda t: functional.layer_norm(t, (64,), bias, bias)),
        "linear": (rows, lambda t: functional.linear(t, square, bias)),
        "batched product": (torch.randn(4, 64, 64, device=device), lambda t: torch.bmm(t, t)),
        "concatenation": (rows, lambda t: torch.cat([t[:2], t[2:]])),
        "to bfloat16 and back": (rows, lambda t: t.to(torch.bfloat16).to(torch.float32)),
        "attention": (heads, lambda t: functional.scaled_dot_product_attention(t, t, t, is_causal=True)),
        "convolution": (image, lambda t: functional.conv2d(t, kernel, None, padding=1)),
        "batch norm": (image, lambda t: functional.batch_norm(t, mean, variance, scale, shift, True)),
        "relu": (image, functional.relu),
        "root mean square": (rows, lambda t: t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6)),
        "module of nothing": (rows, nn.Identity()),
        "module of linear": (rows, linear),
        "module of layer norm": (rows, norm),
        "module of convolution": (image, convolution),
        "module of batch norm": (image, batch),
    }


def _of_updates(number: int, device: str) -> dict[str, float]:
    """Of one update of so many parameters, of clipping them, and of setting their gradients to None."""
    parameters = [nn.Parameter(torch.randn(64, 64, device=device)) for _ in range(number)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    kinds: dict[str, dict[str, Any]] = {
        "foreach": {"foreach": True},
        "fused": {"fused": True},
        "loop": {"foreach": False},
    }
    optimizers = {name: torch.optim.AdamW(parameters, **options) for name, options in kinds.items()}
    found = {f"AdamW, {name}, {number}": _once(one.step, device) for name, one in optimizers.items()}
    found[f"clipping, {number}"] = _once(lambda: nn.utils.clip_grad_norm_(parameters, 1.0), device)
    return found


if __name__ == "__main__":
    main()
