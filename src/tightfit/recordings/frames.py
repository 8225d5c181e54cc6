"""Parses a stack of frames: the user's line that allocates, its callers, the operator, and the phase of training.

A recording with C++ frames names the operator (`at::_ops::mul_Tensor::call`) and, in a backward pass, the node of the graph
(`torch::autograd::generated::MulBackward0::apply`) but no line of Python there, because a thread of autograd runs it. The frame of a tape
names the user's line and the operator at once.
"""

import dataclasses
import re
from typing import Literal

from tightfit.simulate.history import is_library_frame

PlacePhase = Literal["forward", "backward", "optimizer", "unknown"]

_FRAME = re.compile(r"(.*?:\d+) (.*)", re.DOTALL)
_TRACED_OPERATOR = re.compile(r"[a-z_]\w*\.[\w.]+")
_DISPATCHED = re.compile(r"at::_ops::(\w+)::(?:call|redispatch)")
_NODE = re.compile(r"torch::autograd::(?:generated::)?(\w+Backward\w*|AccumulateGrad)::")
# Both sides of a backward pass: the engine's C++ thread, and the Python calls that lead into it. Clipping belongs to it because it
# runs between backward and step and allocates norms of gradients.
_ENGINE = ("torch::autograd::Engine::", "torch/autograd/graph.py", "torch/autograd/__init__.py", "clip_grad.py")
_OPTIMIZER = ("torch/optim/", "torch/amp/grad_scaler.py", "torch/cuda/amp/grad_scaler.py")
# The functions of aten/src/ATen/cuda/CublasHandlePool.cpp that allocate workspaces.
_WORKSPACE = ("getCurrentCUDABlasHandle", "getCUDABlasLtWorkspace", "getNewWorkspace", "getWorkspace(")
# Allocations below these make parameters and buffers: initialisers, module constructors, and Module._apply (to, cuda, half).
_BUILDING = re.compile(
    r"torch/nn/(?:init|parameter)\.py|torch/nn/modules/\w+\.py:\d+ (?:_apply|__init__|reset_parameters)$"
)
# Module.__call__ is _wrapped_call_impl, which calls _call_impl; the latter is in every stack of a forward pass.
_MODULE_CALL = re.compile(r"torch/nn/modules/module\.py:\d+ _call_impl$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllocationSite:
    """The allocation site of a block.

    `line` is the user's own (`train.py:41`), empty where there is none; `function` is around it, or the node of the graph in a backward pass.
    `callers` are the user's lines further out. `operator` is torch's name, as far as it is known.
    """

    line: str
    function: str
    callers: tuple[str, ...]
    operator: str
    phase: PlacePhase
    is_workspace: bool
    builds_module: bool
    in_module: bool

    @property
    def name(self) -> str:
        """The line, or the next best description of the place."""
        if not self.line and self.phase == "backward":
            return f"backward of {self.function}" if self.function else "backward pass"
        return self.line or self.operator


def place_of(stack: tuple[str, ...]) -> AllocationSite:
    """The allocation site that `stack` (innermost frame first) describes; an empty stack gives an empty one."""
    split = [match.groups() if (match := _FRAME.fullmatch(frame)) else ("", frame) for frame in stack]
    own = [(line, name) for frame, (line, name) in zip(stack, split, strict=True) if not is_library_frame(frame)]
    line, function = own[0] if own else ("", "")
    operator = ""
    # A recording that tightfit wrote from a tape: one frame, whose function is the operator.
    if len(split) == 1 and _TRACED_OPERATOR.fullmatch(split[0][1]):
        (line, operator), function = split[0], ""
    else:
        dispatched = [match[1] for _, name in split if (match := _DISPATCHED.match(name))]
        # The outermost dispatch is the operator that the program called; inner ones are its decomposition.
        operator = f"aten.{dispatched[-1]}" if dispatched else ""
    if not own and not function:
        function = next((match[1] for _, name in split if (match := _NODE.search(name))), "")
    return AllocationSite(
        line="" if line.endswith(":0") else line,
        function=function,
        callers=tuple(caller for caller, _ in own[1:]),
        operator=operator,
        phase=_phase(stack),
        is_workspace=_mentions(stack, _WORKSPACE),
        builds_module=any(_BUILDING.search(frame) for frame in stack),
        in_module=any(_MODULE_CALL.search(frame) for frame in stack),
    )


def _phase(stack: tuple[str, ...]) -> PlacePhase:
    if not stack:
        return "unknown"
    # First, because optimizers of the backward pass (hooks on gradients) run below the engine too.
    if _mentions(stack, _OPTIMIZER):
        return "optimizer"
    return "backward" if _mentions(stack, _ENGINE) else "forward"


def _mentions(stack: tuple[str, ...], words: tuple[str, ...]) -> bool:
    return any(word in frame.replace("\\", "/") for frame in stack for word in words)
