"""Runs operators of ours outside of a selective checkpoint of the program's, which takes each operator inside of it for one of the block's."""

from collections.abc import Iterator
from contextlib import contextmanager

from tightfit.torch_hooks.manifest import DISPATCH_MODE, POP_DISPATCH_MODE, PUSH_DISPATCH_MODE
from tightfit.torch_hooks.saved_tensor_hooks import CHECKPOINT


@contextmanager
def outside_of_selection() -> Iterator[None]:
    """Hides the innermost dispatch modes inside, as far as they are of `torch.utils.checkpoint`."""
    modes = []
    try:
        while type(DISPATCH_MODE.value()()).__module__ == CHECKPOINT:
            modes.append(POP_DISPATCH_MODE.value()())
        yield
    finally:
        for mode in reversed(modes):
            PUSH_DISPATCH_MODE.value()(mode)
