"""The estimate of one tool for a workload, in a process of its own, as a user would run it.

    python -m benchmarks.side_by_side_tools accelerate benchmarks/workloads/published_fp32.py:train_images -p batch_size=200

prints `{"bytes": N}`; a tool that fails on the workload says why on stderr and exits 1, one that is not installed exits 3.

* `mem_tracker`: torch.distributed._tools.mem_tracker.MemTracker over two steps on fake host tensors.
* `accelerate`: four times the float32 weights (accelerate/commands/estimate.py, estimate_training_usage: the model, its gradients and twice the model for Adam).
* `deepspeed_zero2`: 4 P + 16 P / 1 bytes for P parameters on one card, nothing on the host (deepspeed/runtime/zero/stage_1_and_2.py,
  estimate_zero2_model_states_mem_needs): half-precision weights and gradients, and float32 weights, gradients and two Adam moments.
* `deepspeed_zero3`: 4 bytes for each parameter of the largest layer and 18 P / 1 (deepspeed/runtime/zero/stage3.py,
  estimate_zero3_model_states_mem_needs).
* `torch_preflight`: `VRAMGuard` of that package (0.5), which counts on meta tensors of batch 1; less the context that it adds.
"""

import argparse
import gc
import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import accuracy_baselines

EXIT_FAILED, EXIT_ABSENT = 1, 3
_PRECISIONS = {"fp32": "fp32", "amp-fp16": "amp", "amp-bf16": "amp", "bf16": "pure-bf16"}
Parameters = Mapping[str, Any]


class _Made(BaseException):
    """The workload has made its optimizer: it has been seen enough of, and must not catch this."""

    def __init__(self, optimizer: torch.optim.Optimizer, network: torch.nn.Module) -> None:
        super().__init__()
        self.optimizer, self.network = optimizer, network


def made_by(workload: Iterator[Any]) -> tuple[torch.optim.Optimizer, torch.nn.Module]:
    """The optimizer that the workload makes first and the network that it updates; the workload is stopped there, before any step."""
    construct = torch.optim.Optimizer.__init__

    def constructed(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        construct(optimizer, *args, **kwargs)
        raise _Made(optimizer, _network_of(optimizer))

    setattr(torch.optim.Optimizer, "__init__", constructed)  # noqa: B010 - a checker would refuse the plain assignment
    try:
        next(workload)
    except _Made as made:
        return made.optimizer, made.network
    raise RuntimeError("the workload made no optimizer")


def _weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _network_of(optimizer: torch.optim.Optimizer) -> torch.nn.Module:
    """The module that contains all parameters of the optimizer."""
    wanted = {id(weight) for weight in _weights(optimizer)}
    modules = [found for found in gc.get_objects() if isinstance(found, torch.nn.Module)]
    holders = [module for module in modules if wanted <= {id(weight) for weight in module.parameters()}]
    return max(holders, key=lambda module: len(list(module.modules())))


def _largest_layer(network: torch.nn.Module) -> int:
    """Parameters of the module with the most of its own, submodules not counted."""
    return max(sum(weight.numel() for weight in module.parameters(recurse=False)) for module in network.modules())


def by_formula(tool: str, target: str, parameters: dict[str, Any]) -> int:
    """A formula over the number of parameters."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        optimizer, network = made_by(accuracy_baselines.load(target, parameters))
        num_parameters = sum(weight.numel() for weight in _weights(optimizer))
        if tool == "accelerate":
            return 4 * 4 * num_parameters
        if tool == "deepspeed_zero2":
            return 4 * num_parameters + 16 * num_parameters
        return 4 * _largest_layer(network) + 18 * num_parameters


def by_tracker(target: str, parameters: dict[str, Any]) -> int:
    """The peak of torch's tracker."""
    return accuracy_baselines.tracked(accuracy_baselines.load(target, parameters), 2)["peak"]


def by_preflight(target: str, parameters: dict[str, Any]) -> int:
    """The total of torch-preflight without its context."""
    from torch_preflight.vram.guard import VRAMGuard  # pyrefly: ignore[missing-import]

    optimizer, network = made_by(accuracy_baselines.load(target, parameters))
    is_image = "image_size" in parameters or "images" in target
    guard = VRAMGuard(
        network,
        optimizer=optimizer,
        batch_size=int(parameters.get("batch_size", 1)),
        seq_len=None if is_image else int(parameters.get("num_tokens", parameters.get("data", 128))),
        image_size=int(parameters.get("image_size", parameters.get("data", 86))) if is_image else None,
        precision=_PRECISIONS.get(parameters.get("precision", ""), "amp" if "half_precision" in target else "fp32"),
        gradient_checkpointing=bool(parameters.get("recompute", False)),
        verify=False,
    )
    with guard:
        assert guard.report is not None
        return int(guard.report.total - guard.report.breakdown.cuda_context)


TOOLS = ("mem_tracker", "accelerate", "deepspeed_zero2", "deepspeed_zero3", "torch_preflight")


def main(words: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.side_by_side_tools")
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("workload")
    parser.add_argument("-p", dest="parameters", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--json-parameters", default="{}", help="more parameters, as a JSON object")
    options = parser.parse_args(words)
    pairs = (parameter.partition("=") for parameter in options.parameters)
    parameters = {name: int(value) if value.isdigit() else value for name, _, value in pairs}
    parameters |= json.loads(options.json_parameters)
    warnings.simplefilter("ignore")
    accuracy_baselines.help_along()
    try:
        if options.tool == "mem_tracker":
            found = by_tracker(options.workload, parameters)
        elif options.tool == "torch_preflight":
            found = by_preflight(options.workload, parameters)
        else:
            found = by_formula(options.tool, options.workload, parameters)
    except ModuleNotFoundError as error:
        print(f"not installed: {error.name}", file=sys.stderr)
        return EXIT_ABSENT
    except (RuntimeError, TypeError, AttributeError, KeyError, AssertionError, ValueError) as fault:
        print(f"{type(fault).__name__}: {(str(fault).splitlines() or [''])[0]}", file=sys.stderr)
        return EXIT_FAILED
    print(json.dumps({"bytes": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
