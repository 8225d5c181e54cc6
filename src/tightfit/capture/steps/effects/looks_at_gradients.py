"""Code of libraries that looks at gradients between a backward pass and the step, and takes nothing of them: whether there is one, and of which class.

Clipping of accelerate (`Accelerator.clip_grad_norm_`, from 1.14 on) and of transformers' `Trainer` (`has_mixed_dtensor`, from 5.20 on) asks so for distributed
gradients, and calls torch's own where there are none. A program's own look stays a read: what it does next may change.
"""

import os
from types import CodeType, FrameType

from tightfit.capture.observe.attribution import is_of_another_library
from tightfit.effects.bytecode.instructions import instructions_of

_CLASS = "DTensor"
# A function of transformers asks for gradients that it is given one by one. It is told by where it stands and by all that it names, so that one that does more in
# another release is a reader again; the set that it makes is a function of its own up to Python 3.11.
_FILE = os.path.join("transformers", "trainer_optimizer.py")
_FUNCTION = "has_mixed_dtensor"
_NAMES = frozenset({"torch.distributed.tensor", "isinstance", "device_mesh", "len", _CLASS})


def is_only_a_look(frame: FrameType) -> bool:
    """Whether the read of `Tensor.grad` at which `frame` stands is one of a library that takes nothing of the gradient."""
    code = frame.f_code
    if not is_of_another_library(code.co_filename):
        return False
    if code.co_name == "<genexpr>" and code.co_names == ("grad",):
        # `p.grad for p in model.parameters() if p.grad is not None`
        return frame.f_back is not None and _asks_for_meshes(frame.f_back.f_code)
    return is_compared_with_none(frame) or _is_asked_for_class(frame)


def is_compared_with_none(frame: FrameType) -> bool:
    """Whether the bytecode after the read only compares the gradient with None."""
    following = [i for i in instructions_of(frame.f_code) if i.offset > frame.f_lasti][:2]
    if following and "_NONE" in following[0].opname:
        return True
    # `is None` and `is not None` compile to a load of None and IS_OP in Python 3.11; newer versions have
    # POP_JUMP_IF_NONE and its like, which the test for "_NONE" meets.
    return len(following) == 2 and following[0].argval is None and following[1].opname == "IS_OP"


def _is_asked_for_class(frame: FrameType) -> bool:
    """`isinstance(p.grad, DTensor)`"""
    instructions = list(instructions_of(frame.f_code))
    place = next((n for n, i in enumerate(instructions) if i.offset > frame.f_lasti), 0) - 1
    if place < 2 or place + 2 >= len(instructions):
        return False
    asked, loaded = instructions[place - 2], instructions[place + 1]
    is_call = instructions[place + 2].opname == "CALL" and instructions[place + 2].argval == 2
    return asked.argval == "isinstance" and loaded.argval == _CLASS and is_call


def _asks_for_meshes(code: CodeType) -> bool:
    outermost = code.co_qualname.partition(".")[0]
    return code.co_filename.endswith(_FILE) and outermost == _FUNCTION and set(code.co_names) <= _NAMES
