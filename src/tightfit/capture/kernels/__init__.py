"""The CUDA kernels below the operators: which ones a card picks, and what they allocate besides their outputs.

A capture on fake `cuda` tensors sees every operator and its outputs. It cannot see the choices and the scratch memory of the CUDA kernels,
because a CPU build of torch does not contain them. Each module here restates one of these rules as a pure function of shapes, types and a
`Card`, with the source file it was read from; `install` routes the few operators that a CPU build would take apart differently.
"""

from tightfit.capture.kernels.architecture import Card
from tightfit.capture.kernels.library_workspaces import Workspace, workspaces
from tightfit.capture.kernels.scratch import scratch_bytes, scratch_events

__all__ = ["Card", "Workspace", "scratch_bytes", "scratch_events", "workspaces"]
