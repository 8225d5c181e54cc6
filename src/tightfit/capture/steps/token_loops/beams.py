"""Beam search of transformers on a virtual GPU: it ends where its longest sequence does.

Whether a shorter answer is final depends on scores, which a trace does not have; read as False, "goes on" would end it after one token, and the peak would be that of one.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.errors.private_names import known

_IS_OPEN = known(
    "transformers.generation.utils:GenerationMixin._beam_search_has_unfinished_sequences",
    "to have a beam search go on to its longest sequence",
    "capture/steps",
    first="4.50",
    last="5.23",
)


def install(gpu: VirtualGpu, at_import: Callable[[str, Callable[[types.ModuleType], None]], None]) -> None:
    """Has searches go on. `at_import` calls a function with the module of a name when that is imported."""

    def answer(module: types.ModuleType) -> None:
        holder = getattr(module, "GenerationMixin", None)
        found = vars(holder).get(_IS_OPEN.name) if holder is not None else None
        # Releases before it ask their scorer, which says that no beam is done.
        if found is None:
            return
        is_static = isinstance(found, staticmethod)
        function = found.__func__ if is_static else found

        @functools.wraps(function)
        def goes_on(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            # At its longest sequence it ends, whatever the scores are: that is known.
            if isinstance(result, FakeTensor) and not gpu.known_values.known(result):
                with torch._C._DisableTorchDispatch():
                    values = torch.ones(result.shape, dtype=torch.bool, device="cpu")
                gpu.known_values.adopt(result, values)
                gpu.recorder.assume(
                    gpu.attribution.where(), "beams are assumed to be searched up to the longest sequence asked for"
                )
            return result

        setattr(holder, _IS_OPEN.name, staticmethod(goes_on) if is_static else goes_on)

    at_import(_IS_OPEN.module, answer)
