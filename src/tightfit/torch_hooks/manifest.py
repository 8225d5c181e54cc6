"""Every name of torch and of other libraries that tightfit replaces in a user's process, and every private one that it reads there.

None of them is a stable interface. A name that the installed library lacks is an error that says so when it is needed: never a patch that
is installed and not called, nor one that is left out silently. What the capture replaces in its own child process is not listed here.
"""

import dataclasses
import importlib
import inspect
import sys
from typing import Any

from tightfit.errors import ApplyError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """One name: where it is, what it is needed for, and the versions of its library that it was tested in.

    `kind` is the class, or a part of the module that cannot be imported, that has it; empty for a name of the module itself.
    """

    module: str
    kind: str = ""
    name: str
    purpose: str
    versions: str

    def __str__(self) -> str:
        return ".".join(part for part in (self.module, self.kind, self.name) if part)

    @property
    def library(self) -> str:
        """The package that the name belongs to."""
        return self.module.partition(".")[0]

    def holder(self) -> Any:
        """The module or class that has the name, possibly inherited.

        Raises:
            ApplyError: there is no such name in the installed library.
        """
        try:
            holder: Any = importlib.import_module(self.module)
        except ImportError as error:
            raise self.missing() from error
        # `torch._C._functions` is an attribute of the extension module and cannot be imported as a module.
        if self.kind:
            holder = vars(holder).get(self.kind)
        if holder is None or not any(self.name in vars(base) for base in _bases(holder)):
            raise self.missing()
        return holder

    def value(self) -> Any:
        """What the name is bound to now, as its holder has it and not as an instance would see it.

        Raises:
            ApplyError: there is no such name in the installed library.
        """
        # A static method or a property would be bound by `getattr`, and could not be restored as it was.
        return inspect.getattr_static(self.holder(), self.name)

    def missing(self) -> ApplyError:
        """The error for a library that does not have the name."""
        version = getattr(sys.modules.get(self.library), "__version__", "that is installed")
        return ApplyError(
            f"{self.library} {version} has no {self}, which is needed {self.purpose}; install a version that has it ({self.versions})"
        )


def _bases(holder: Any) -> tuple[Any, ...]:
    return holder.__mro__ if isinstance(holder, type) else (holder,)


_TORCH = "2.11 to 2.13"

# torch/autograd/__init__.py imports it by name from torch.autograd.graph: both `backward` and `grad` look it up
# here, `Tensor.backward` goes through `backward`.
RUN_BACKWARD = Name(
    module="torch.autograd",
    name="_engine_run_backward",
    purpose="to tell which backward pass concerns a model, and when one begins and ends",
    versions=_TORCH,
)
OPTIMIZER_INIT = Name(
    module="torch.optim.optimizer",
    kind="Optimizer",
    name="__init__",
    purpose="to put a plan on the optimizers of a script",
    versions=_TORCH,
)
MODULE_CALL = Name(
    module="torch.nn.modules.module",
    kind="Module",
    name="__call__",
    purpose="to put a plan on the models of a script",
    versions=_TORCH,
)
LIGHTNING_STEP = Name(
    module="lightning.pytorch.strategies.strategy",
    kind="Strategy",
    name="training_step",
    purpose="to put a plan on a LightningModule's training step",
    versions="2.6",
)
# The same framework under its older package name, which is still published beside the new one.
PYTORCH_LIGHTNING_STEP = dataclasses.replace(LIGHTNING_STEP, module="pytorch_lightning.strategies.strategy")
TRAINER_STEP = Name(
    module="transformers.trainer",
    kind="Trainer",
    name="training_step",
    purpose="to put a plan on a Trainer's training step",
    versions="4.51 to 5.23",
)
CUDA_IS_AVAILABLE = Name(
    module="torch.cuda",
    name="is_available",
    purpose="to import a library of kernels beside a virtual card",
    versions=_TORCH,
)
ACCUMULATE_GRAD = Name(
    module="torch._C",
    kind="_functions",
    name="AccumulateGrad",
    purpose="to tell the leaves of a graph from its other nodes",
    versions=_TORCH,
)
GRAPH_TASK_ID = Name(
    module="torch._C",
    name="_current_graph_task_id",
    purpose="to tell what runs within a backward pass",
    versions=_TORCH,
)

KEEPS_GRAPH = Name(
    module="torch._C._autograd",
    name="_get_current_graph_task_keep_graph",
    purpose="to tell whether a graph may be gone through once more",
    versions=_TORCH,
)
NODE_HOOK = Name(
    module="torch.autograd.function",
    kind="_HookMixin",
    name="_register_hook",
    purpose="to tell which graphs have hooks on their nodes, before one is run twice or in parts",
    versions=_TORCH,
)
TENSOR_HOOK = Name(
    module="torch",
    kind="Tensor",
    name="register_hook",
    purpose="to tell which tensors of a graph are hooked, before its backward pass is run twice",
    versions=_TORCH,
)
RETAIN_GRAD = dataclasses.replace(TENSOR_HOOK, name="retain_grad")
# Saved tensors are compared by version when a node is run (torch/csrc/autograd/saved_variable.cpp): raising a
# version finds the nodes that read a parameter, without writing a value.
SET_VERSIONS = Name(
    module="torch._C._autograd",
    name="_unsafe_set_version_counter",
    purpose="to try out whether a graph still needs parameters that were updated, without updating them",
    versions=_TORCH,
)
STORAGE_USES = Name(
    module="torch._C",
    name="_storage_Use_Count",
    purpose="to tell memory that somebody else has a view of",
    versions=_TORCH,
)

REPLACED = (
    RUN_BACKWARD,
    OPTIMIZER_INIT,
    MODULE_CALL,
    LIGHTNING_STEP,
    PYTORCH_LIGHTNING_STEP,
    TRAINER_STEP,
    CUDA_IS_AVAILABLE,
    TENSOR_HOOK,
    RETAIN_GRAD,
    NODE_HOOK,
)
READ = (ACCUMULATE_GRAD, GRAPH_TASK_ID, KEEPS_GRAPH, SET_VERSIONS, STORAGE_USES)
