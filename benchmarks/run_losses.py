"""Runs a training script, plain or under `tightfit run`, and writes down every loss that it calls `backward` on. The script is not changed.

python benchmarks/run_losses.py LOSSES.json SCRIPT [ARGUMENTS]
python benchmarks/run_losses.py LOSSES.json --plan PLAN.json SCRIPT [ARGUMENTS]
"""

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from tightfit.cli.main import run


def main(losses_file: str, *words: str) -> int:
    """Runs the command line, and returns its exit code."""
    losses: list[float] = []
    plain = torch.Tensor.backward

    def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        losses.append(loss.detach().double().sum().item())
        plain(loss, *args, **kwargs)

    torch.Tensor.backward = backward  # type: ignore[method-assign]
    # A script that draws its weights without a seed draws the same ones under a plan.
    torch.manual_seed(0)
    try:
        if words[0] == "--plan":
            return run(["run", "--plan", *words[1:3], "--", *words[3:]])
        sys.argv = list(words)
        sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
        runpy.run_path(words[0], run_name="__main__")
        return 0
    finally:
        Path(losses_file).write_text(json.dumps(losses))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
