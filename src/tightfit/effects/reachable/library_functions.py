"""What functions of smaller libraries keep in globals of their own modules and on their classes: counters, registries, generators of random numbers.

A project that is installed is a library too. Those that are known to keep nothing there that a step could change are not looked through: they are large.
"""

import itertools
import random
import sys
import types
from collections import deque
from typing import Any

import numpy as np
import torch

from tightfit.effects.code import CODE
from tightfit.effects.holders import is_plain
from tightfit.effects.reachable.classes_of_libraries import STATELESS, UNCHANGING
from tightfit.effects.reachable.named_in_code import named_in

MOST_FUNCTIONS = 100
"""Of libraries, in one walk."""
_KNOWN = (
    STATELESS
    | UNCHANGING
    | frozenset(
        [
            "transformers",
            "accelerate",
            "diffusers",
            "peft",
            "lightning",
            "pytorch_lightning",
            "lightning_fabric",
            "lightning_utilities",
            "torchvision",
            "torchaudio",
            "torchmetrics",
            "torchdata",
            "timm",
            "trl",
            "datasets",
            "evaluate",
            "huggingface_hub",
            "bitsandbytes",
            "deepspeed",
            "xformers",
            "flash_attn",
            "einops",
            "tqdm",
            "rich",
            "click",
            "typer",
            "omegaconf",
            "hydra",
            "wandb",
            "mlflow",
            "tensorboard",
            "pandas",
            "scipy",
            "sklearn",
            "sympy",
            "networkx",
            "cv2",
            "kornia",
            "pydantic",
            "attr",
            "attrs",
            "requests",
            "jinja2",
            "fsspec",
            "psutil",
            "packaging",
            "pytest",
            "hypothesis",
            "loguru",
        ]
    )
)
_STATE = (
    *(list, dict, set, deque, itertools.count, random.Random),
    *(torch.Generator, np.random.Generator, np.random.RandomState),
)


def is_looked_through(module: str | None) -> bool:
    """Whether a library's code may keep state that steps change, by the name of a module of it."""
    root = (module or "").partition(".")[0]
    return bool(root) and root not in _KNOWN and root not in sys.stdlib_module_names


def state_named_by(function: types.FunctionType) -> tuple[str, ...]:
    """The globals of its module that a function names and that may change: plain ones, containers and generators."""
    space = function.__globals__
    names = (name for name in named_in(function.__code__).names if name in space)
    return tuple(sorted(n for n in names if not isinstance(space[n], CODE) and is_state(space[n])))


def code_named_by(function: types.FunctionType) -> list[Any]:
    """The functions and classes of its own library that a function names."""
    space, root = function.__globals__, (function.__module__ or "").partition(".")[0]
    found = (space.get(name) for name in sorted(named_in(function.__code__).names))
    return [v for v in found if isinstance(v, types.FunctionType | type) and _root(v) == root]


def is_state(value: Any) -> bool:
    """Whether a value that a library's module has is looked at."""
    return is_plain(value) or isinstance(value, _STATE)


def _root(value: Any) -> str:
    return (getattr(value, "__module__", None) or "").partition(".")[0]
