"""Who has called a process group: torch's own Python, its C++, or FSDP, which all mean other lifetimes."""

from collections.abc import Iterator
from types import FrameType

from tightfit.errors.faults import is_own_file

_OF_PYTHON = "torch/distributed/distributed_c10d.py"
_OF_SHARDING = "torch/distributed/fsdp/"
# What torch puts around every mode (torch/_compile.py, `_disable_dynamo`), and around the functions of `torch.distributed` to log them.
_AROUND = ("torch/_compile.py", "torch/_dynamo/eval_frame.py", "torch/distributed/c10d_logger.py")


def is_called_by_python(frame: FrameType) -> bool:
    """Whether a function of `torch.distributed` has called the group, which returns to the program what there is to wait for; else C++ has."""
    return next(_callers(frame), "").endswith(_OF_PYTHON)


def is_called_by_sharding(frame: FrameType) -> bool:
    """Whether FSDP gathers parameters or scatters gradients, in buffers of its own."""
    callers = (file for file in _callers(frame) if not file.endswith(_OF_PYTHON))
    return _OF_SHARDING in next(callers, "")


def _callers(frame: FrameType | None) -> Iterator[str]:
    """The files of the functions around `frame` that are not ours, the innermost first."""
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_own_file(file) and not file.endswith(_AROUND):
            yield file
        frame = frame.f_back
