"""What a process has of torch, by identity: its functions and classes, its methods, its global hooks and modes. For tests that must leave it as it was."""

import builtins
import dataclasses
import functools
import gc
import sys
import types
from collections.abc import Iterator
from typing import Any

# Each of these, if it has been imported, with what its names stand for.
_MODULES = (
    "torch",
    "torch.amp",
    "torch.amp.autocast_mode",
    "torch.amp.grad_scaler",
    "torch.autograd",
    "torch.autograd.forward_ad",
    "torch.autograd.function",
    "torch.autograd.functional",
    "torch.autograd.grad_mode",
    "torch.autograd.graph",
    "torch.cuda",
    "torch.cuda.amp",
    "torch.cuda.memory",
    "torch.func",
    "torch.linalg",
    "torch.nn",
    "torch.nn.functional",
    "torch.nn.init",
    "torch.nn.attention",
    "torch.nn.modules.module",
    "torch.nn.parallel",
    "torch.nn.utils",
    "torch.nn.utils.clip_grad",
    "torch.nn.utils.parametrize",
    "torch.nn.utils.stateless",
    "torch.optim",
    "torch.optim.lr_scheduler",
    "torch.optim.optimizer",
    "torch.overrides",
    "torch.random",
    "torch.serialization",
    "torch.utils.checkpoint",
    "torch.utils.data",
    "torch.utils.hooks",
    "torch._tensor",
    "copy",
    "gc",
    "io",
    "pickle",
    "queue",
    "random",
    "weakref",
    "numpy",
    "numpy.random",
)
_CLASSES = {
    "torch": ("Tensor", "Generator", "UntypedStorage"),
    "torch.nn": ("Module", "Parameter"),
    "torch.autograd": ("Function",),
    "torch.optim": ("Optimizer",),
    "torch.amp": ("GradScaler", "autocast"),
    "torch.utils.data": ("DataLoader",),
    "transformers.trainer": ("Trainer",),
    "transformers.modeling_utils": ("PreTrainedModel",),
    "lightning.pytorch.strategies.strategy": ("Strategy",),
    "lightning.pytorch.core.module": ("LightningModule",),
    "pytorch_lightning.strategies.strategy": ("Strategy",),
    "pytorch_lightning.core.module": ("LightningModule",),
    "accelerate.accelerator": ("Accelerator",),
    "accelerate.optimizer": ("AcceleratedOptimizer",),
}
_NAMES_OF_CLASSES = {f"{module}.{kind}" for module, kinds in _CLASSES.items() for kind in kinds}
# What these put in the place of names of torch when they are imported, or when something is first compiled, is not ours to answer for.
_BY_LIBRARIES = ("/torch/_dynamo/", "/torch/_compile.py", "/lightning/fabric/", "/lightning_fabric/", "/transformers/")
_GLOBAL_HOOKS = ("_global_backward_hooks", "_global_backward_pre_hooks", "_global_forward_hooks")
_MORE_GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_module_registration_hooks")
_OF_OPTIMIZERS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessState:
    """The names of each module or class, and what else is the same for the whole process. Empty where torch was not imported."""

    names: dict[str, dict[str, Any]]
    others: dict[str, Any]
    kept: tuple[type, ...] = ()
    """The classes of optimizers: one that a function has made by `type` is not to be collected before the states are compared."""

    def changes(self, later: "ProcessState") -> Iterator[str]:
        """What is not what it was, one line each. Settings may change, and libraries that were imported since add names: these are not told."""
        for place, before in self.names.items():
            after = later.names[place]
            if before == after:
                continue
            if place in _NAMES_OF_CLASSES:
                added = (
                    name
                    for name, value in after.items()
                    if callable(value) and name not in before and not _is_same(None, value)
                )
                yield from (f"{place}.{name} has been added" for name in added)
            for name, value in before.items():
                if callable(value) and name not in after:
                    yield f"{place}.{name} is gone"
                elif callable(value) and not _is_same(value, after[name]):
                    yield f"{place}.{name} is {after[name]!r} and was {value!r}"
        for name, value in self.others.items():
            if later.others[name] != value:
                yield f"{name}: {later.others[name]}, and was {value}"


def process_state() -> ProcessState:
    """The state now."""
    if "torch" not in sys.modules:
        return ProcessState({}, {})
    names = {name: dict(vars(sys.modules[name])) for name in _MODULES if name in sys.modules}
    for module, kinds in _CLASSES.items():
        for kind in kinds if module in sys.modules else ():
            # A library may have been imported in part, or load its classes when they are asked for.
            owner = vars(sys.modules[module]).get(kind)
            if owner is not None:
                names[f"{module}.{kind}"] = dict(vars(owner))
    torch = sys.modules["torch"]
    names["forward"] = {kind.__name__: kind.__dict__.get("forward") for kind in _kinds_of_modules(torch.nn)}
    optimizers = tuple(_all_kinds(torch.optim.Optimizer))
    names["step"] = {
        f"{kind.__module__}.{kind.__qualname__}": _step(kind)
        for kind in optimizers
        # One that a function makes is another one each time.
        if "<locals>" not in kind.__qualname__
    }
    return ProcessState(names, _others(torch), optimizers)


def changed_since(before: ProcessState) -> list[str]:
    """What is not what it was, after what nobody refers to any more has been collected."""
    found = list(before.changes(process_state()))
    if found:
        gc.collect()
        found = list(before.changes(process_state()))
    return found


@functools.cache
def _kinds_of_modules(nn: types.ModuleType) -> list[type]:
    return [kind for kind in vars(nn).values() if isinstance(kind, type) and "forward" in vars(kind)]


def _is_same(before: Any, after: Any) -> bool:
    if before is None and after is getattr(object, getattr(after, "__name__", ""), None):
        # What a class has from `object` anyway: lightning puts that back in its place.
        return True
    code = getattr(after, "__code__", None)
    return after is before or (code is not None and any(part in code.co_filename for part in _BY_LIBRARIES))


def _audit_owners() -> list[int]:
    events = sys.modules.get("tightfit.torch_hooks.audit_events")
    return [] if events is None else list(events._owners)


def _step(kind: type) -> Any:
    """The step of a class of optimizers, without what torch itself puts around it: when the first of the class is made, or something is compiled."""
    step = vars(kind).get("step")
    while hasattr(step, "__wrapped__") and "/torch/" in step.__code__.co_filename:
        step = step.__wrapped__
    return step


def _all_kinds(kind: type) -> Iterator[type]:
    yield kind
    for inner in kind.__subclasses__():
        yield from _all_kinds(inner)


def forget_default_device() -> None:
    """`torch.set_default_device(None)`, after which torch up to 2.9 fails at `get_default_device`."""
    torch = sys.modules["torch"]
    torch.set_default_device(None)
    vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)


def _others(torch: Any) -> dict[str, Any]:
    from tightfit.effects.values.saved_hooks import top_saved_hooks

    module, optimizer = sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"]
    hooks = {name: list(getattr(module, name)) for name in (*_GLOBAL_HOOKS, *_MORE_GLOBAL_HOOKS)}
    hooks |= {name: list(getattr(optimizer, name)) for name in _OF_OPTIMIZERS}
    return hooks | {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "multithreading": torch._C._is_multithreading_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "function modes": torch._C._len_torch_function_stack(),
        "saved-tensor hooks": top_saved_hooks(),
        "excepthook": (sys.excepthook, sys.unraisablehook),
        "open": builtins.open,
        "owners of audit events": _audit_owners(),
    }
