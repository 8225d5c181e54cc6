"""The offloaders of torchtune and torchao, as they are installed, for workloads on the virtual GPU: they run there as they would on a card.

    pip install --no-deps torchtune==0.6.1 torchao psutil

Of torchtune the one file is loaded, with stand-ins for what it imports beside torch: its newest release does not import with the newest torchao.
"""

import importlib.metadata
import importlib.util
import logging
import sys
import types
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

TORCHTUNE, TORCHAO = "torchtune", "torchao"
_FILE = "training/_activation_offloading.py"


def is_installed(library: str) -> bool:
    """Whether it can be compared with."""
    return importlib.util.find_spec(library) is not None and (
        library != TORCHTUNE or importlib.util.find_spec("psutil") is not None
    )


def version_of(library: str) -> str:
    """Of the installed one."""
    return importlib.metadata.version(library)


def torchtune_offload() -> AbstractContextManager[Any]:
    """torchtune's `OffloadActivations` with its defaults: pinned memory, a stream of its own, five tensors kept alive."""
    spec = importlib.util.find_spec(TORCHTUNE)
    assert spec is not None and spec.submodule_search_locations is not None
    stand_ins = {
        "torchao": types.ModuleType("torchao"),
        "torchao.dtypes": types.ModuleType("torchao.dtypes"),
        "torchao.dtypes.nf4tensor": types.ModuleType("torchao.dtypes.nf4tensor"),
        "torchtune": types.ModuleType("torchtune"),
        "torchtune.modules": types.ModuleType("torchtune.modules"),
        "torchtune.utils": types.ModuleType("torchtune.utils"),
    }
    stand_ins["torchao.dtypes.nf4tensor"].NF4Tensor = type("NF4Tensor", (torch.Tensor,), {})  # type: ignore[attr-defined]
    stand_ins["torchtune.modules"].TiedLinear = type("TiedLinear", (nn.Module,), {})  # type: ignore[attr-defined]
    stand_ins["torchtune.utils"].get_logger = lambda _level: logging.getLogger("torchtune")  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        file = Path(spec.submodule_search_locations[0]) / _FILE
        of_file = importlib.util.spec_from_file_location("torchtune_activation_offloading", file)
        assert of_file is not None and of_file.loader is not None
        module = importlib.util.module_from_spec(of_file)
        of_file.loader.exec_module(module)
    finally:
        for name, known in before.items():
            if known is None:
                del sys.modules[name]
            else:
                sys.modules[name] = known
    return module.OffloadActivations()  # type: ignore[no-any-return]


def torchao_optimizer(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    """torchao's `CPUOffloadOptimizer` around AdamW, which is fused on the host."""
    from torchao.optim import CPUOffloadOptimizer

    return CPUOffloadOptimizer(parameters, torch.optim.AdamW, **settings)  # type: ignore[no-any-return]
