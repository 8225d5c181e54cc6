"""Extensions in CUDA that a program builds as it runs (`torch.utils.cpp_extension`): not built, and one line where one of their functions is called.

Nothing but the card runs them, and only the program knows what they return. Extensions in C++ alone are built and loaded as ever: they may run on
host tensors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from tightfit.errors import CaptureError
from tightfit.errors.faults import hands_over

HELPS = (
    "make it an operator with torch.library.custom_op and give its output shapes with register_fake, or estimate with a stub module "
    '(docs/guide/targets.md, "Kernels of your own")'
)
_OF_CUDA = (".cu", ".cuh", ".hip")


class NotBuilt(ModuleType):
    """What a program gets for an extension in CUDA."""

    def __init__(self, name: str, where: Callable[[], str]) -> None:
        super().__init__(name)
        self._where = where

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def function(*_args: Any, **_kwargs: Any) -> Any:
            raise CaptureError(
                f"{self._where()}: {self.__name__}.{name} is a function of a CUDA extension, which is not built or run without a card; {HELPS}"
            )

        return function


def answers(where: Callable[[], str]) -> Mapping[str, Callable[[ModuleType], None]]:
    """The patch of the module that builds extensions; `where` says the program's line."""

    def answer(module: ModuleType) -> None:
        load, load_inline = module.load, module.load_inline

        @hands_over
        def load_(name: str, sources: str | Sequence[str], *args: Any, **kwargs: Any) -> Any:
            files = [sources] if isinstance(sources, str | os.PathLike) else sources
            is_cuda = kwargs.get("with_cuda") or any(os.fspath(file).endswith(_OF_CUDA) for file in files)
            return NotBuilt(name, where) if is_cuda else load(name, sources, *args, **kwargs)

        @hands_over
        def load_inline_(name: str, cpp_sources: Any, cuda_sources: Any = None, *args: Any, **kwargs: Any) -> Any:
            is_cuda = bool(cuda_sources) or kwargs.get("with_cuda")
            return NotBuilt(name, where) if is_cuda else load_inline(name, cpp_sources, cuda_sources, *args, **kwargs)

        for name, answer in (("load", load_), ("load_inline", load_inline_)):
            setattr(module, name, answer)

    return {"torch.utils.cpp_extension": answer}
