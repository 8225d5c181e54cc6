"""torchvision's models on a torch that torchvision was not built for.

Its Python code is all that a classifier needs, but importing it asks for the operators of its compiled half. Declaring
their schemas is enough: no kernel is ever called here. transformers and timm import torchvision when it is installed,
so a workload that uses them imports this module first; where torchvision is absent nothing happens.
"""

import importlib.util
from types import ModuleType

import torch

# torchvision/csrc/ops/nms.cpp declares these; torchvision/_meta_registrations.py registers fake kernels for them
# while the package is imported, and asks for no other operator unless the compiled library was found.
SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def is_installed() -> bool:
    """True where torchvision's Python files are there, whether or not its kernels load."""
    return importlib.util.find_spec("torchvision") is not None


def _declare() -> torch.library.Library | None:
    if not is_installed() or hasattr(torch.ops.torchvision, "nms"):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema)
    return library


# The declaration lives as long as the object that made it.
DECLARATION = _declare()


def models() -> ModuleType:
    """torchvision.models, importable even where torchvision's compiled operators are not."""
    from torchvision import models as torchvision_models

    return torchvision_models
