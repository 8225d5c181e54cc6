"""Baselines for the accuracy benchmark: simpler estimators on the same workloads.

    python -m benchmarks.accuracy_baselines benchmarks/workloads/recorded_32_layers.py:train -p num_tokens=256

prints one JSON object: `mem_tracker`, the peak of torch's own tracker (torch.distributed._tools.mem_tracker.MemTracker)
over the first steps on fake host tensors; `accelerate`, the formula of `accelerate estimate-memory` for float32 training with
Adam (four times the weights); `arithmetic`, weights plus gradients plus the state that the optimizer really made. None
of them knows a caching allocator, a workspace or a context. One that fails on a workload is left out.
"""

import argparse
import importlib
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_iter


def load(target: str, parameters: dict[str, str | int]) -> Iterator[Any]:
    """The generator of the workload `FILE.py:FUNCTION`, on the host; FILE is relative to the working directory."""
    file, _, function = target.partition(":")
    module = importlib.import_module(".".join(Path(file).with_suffix("").parts))
    return getattr(module, function)(**parameters, device="cpu")


def help_along() -> None:
    """What a loop needs to run on fake host tensors: they are on the host already, and hold no value to read.

    A read answers one, and yes to a question (`mask.all()`): no optimizer divides by zero, no mask is built.
    """

    def stay(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        del args, kwargs
        return module

    def read(tensor: torch.Tensor) -> Any:
        return 1.0 if isinstance(tensor, FakeTensor) else real_read(tensor)

    def decide(tensor: torch.Tensor) -> bool:
        return True if isinstance(tensor, FakeTensor) else real_decide(tensor)

    real_read, real_decide = torch.Tensor.item, torch.Tensor.__bool__
    setattr(torch.nn.Module, "to", stay)  # noqa: B010 - a checker would refuse the plain assignment
    setattr(torch.Tensor, "item", read)  # noqa: B010
    setattr(torch.Tensor, "__bool__", decide)  # noqa: B010
    for name in dir(torch.nn.init):  # values do not matter, and `trunc_normal_` draws again until they are in range
        if name.endswith("_") and not name.startswith("_"):
            setattr(torch.nn.init, name, lambda tensor, *args, **kwargs: tensor)


def tracked(workload: Iterator[Any], num_steps: int) -> dict[str, int]:
    """Runs `num_steps` steps on fake tensors; the tracker's peak and the bytes that an optimizer looks after."""
    from torch.distributed._tools.mem_tracker import MemTracker

    kept: dict[str, int] = {}

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        kept["weights"] = sum(weight.nbytes for weight in weights)
        kept["gradients"] = sum(weight.grad.nbytes for weight in weights if weight.grad is not None)
        kept["state"] = sum(leaf.nbytes for leaf in tree_iter(dict(optimizer.state)) if isinstance(leaf, torch.Tensor))

    hook = register_optimizer_step_post_hook(after_step)
    tracker = MemTracker()
    with FakeTensorMode(allow_non_fake_inputs=True), tracker:
        for _ in range(num_steps):
            next(workload)
            tracker.reset_mod_stats()
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    hook.remove()
    return {"peak": max(peak.values()), **kept}


def figures(target: str, parameters: dict[str, str | int], num_steps: int) -> dict[str, int]:
    """The estimate of each baseline for the workload, in bytes."""
    seen = tracked(load(target, parameters), num_steps)
    said = {"mem_tracker": seen["peak"]}
    if "weights" in seen:
        # accelerate/commands/estimate.py, estimate_training_usage: model, gradients and twice the model for Adam.
        said["accelerate"] = 4 * seen["weights"]
        said["arithmetic"] = seen["weights"] + seen["gradients"] + seen["state"]
    return said


def main(words: Sequence[str] | None = None) -> int:
    """The command line; a workload that does not run on fake tensors prints an empty object and says why on stderr."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy_baselines")
    parser.add_argument("workload")
    parser.add_argument("-p", dest="parameters", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args(words)
    pairs = (parameter.partition("=") for parameter in options.parameters)
    parameters = {name: int(value) if value.isdigit() else value for name, _, value in pairs}
    warnings.simplefilter("ignore")
    help_along()
    try:
        said = figures(options.workload, parameters, options.steps)
    except (RuntimeError, TypeError, AttributeError, KeyError, AssertionError) as fault:
        print(f"{type(fault).__name__}: {str(fault).splitlines()[0] if str(fault) else ''}", file=sys.stderr)
        said = {}
    print(json.dumps(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())
