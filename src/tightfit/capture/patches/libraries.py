"""Patches functions of other libraries that check for fake tensors, so that they take the path of a real card, and what launches or builds
kernels of the program's own. No library is imported for it.

A library that a workload imports is patched at its import, after the module with the check has run. A release from before such
a check needs no patch; one that lacks it later is noted among the assumptions. `tests/cpu/test_libraries.py` names the functions that are relied on.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.observe.attribution import is_user_file
from tightfit.capture.patches import extensions
from tightfit.capture.patches.triton.launches import Launches
from tightfit.errors.private_names import Name, known


def _no(_tensor: object) -> bool:
    return False


# Functions of other libraries with the versions in which they were seen. transformers 5 builds a causal mask for fake tensors, since it cannot
# read them, where it leaves it to the attention kernel on a card; transformers 4 has no such check.
ANSWERS: Mapping[Name, Callable[..., Any]] = {
    known(
        "transformers.utils.import_utils:is_fake_tensor",
        "to have masks built as on a card",
        "capture/patches",
        first="5.0",
        last="5.23",
    ): _no,
}


_LISTS = known(
    "transformers.utils.import_utils:fetch__all__",
    "to look through the source of transformers in half the time when it is imported",
    "capture/patches",
    first="5.0",
    last="5.23",
)
_LIST = "__all__"


Answer = Callable[[types.ModuleType], None]


def install(gpu: VirtualGpu) -> None:
    """Patches modules that are loaded already, and others when they are imported."""
    # transformers 5 copies weights to the card in threads of a pool (`device_map="cuda"`), where no dispatch mode is active, and in an order that
    # differs from run to run.
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    answers: dict[str, Answer] = {name.module: functools.partial(_answer, gpu.recorder.assume) for name in ANSWERS}
    answers[_LISTS.module] = _all_of(answers[_LISTS.module], _read_lists_from_their_begin)
    answers.update({**Launches(gpu).answers, **extensions.answers(gpu.attribution.where)})
    for name, answer in answers.items():
        if name in sys.modules:
            answer(sys.modules[name])
    sys.meta_path.insert(0, _Finder(answers))


def answer_at_import(name: str, answer: Answer) -> None:
    """Patches a module that is loaded already, or when it is imported."""
    if name in sys.modules:
        answer(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder({name: answer}))


def is_code_of_the_users_imported() -> bool:
    """Whether a module of a file of the user's is loaded, a clone of a library say."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    # Some modules of torch's that are no files have a name alone.
    return any(isinstance(file, str) and os.path.isabs(file) and is_user_file(file) for file in files)


def read_lists_from_their_begin() -> None:
    """Has transformers look through its source as it does in a trace, in half the time."""
    answer_at_import(_LISTS.module, _read_lists_from_their_begin)


def _answer(assume: Callable[[str, str], None], module: types.ModuleType) -> None:
    for name, answer in ANSWERS.items():
        if name.module != module.__name__:
            continue
        if hasattr(module, name.name):
            setattr(module, name.name, answer)
            continue
        version = version_of(name.library)
        if _release(version) >= _release(name.first):
            assume(
                name.library,
                f"{name.library} {version} has no {name}, which is replaced {name.purpose} ({name.versions})",
            )


def _all_of(*answers: Answer) -> Answer:
    def answer(module: types.ModuleType) -> None:
        for each in answers:
            each(module)

    return answer


def _read_lists_from_their_begin(module: types.ModuleType) -> None:
    """transformers reads what its 1,100 files export, the last line in each that begins with `__all__`: it is given the source from that line on."""
    fetch = getattr(module, _LISTS.name, None)
    if fetch is None:
        return

    def fetch_from_begin(source: str) -> list[str]:
        begin = source.rfind(_LIST)
        return fetch(source[begin:] if begin > 0 and source[begin - 1] == "\n" else source)

    setattr(module, _LISTS.name, fetch_from_begin)


def version_of(library: str) -> str:
    """The version of a library that is imported, as it says itself (it may be a clone, or a folder of that name beside an installed one), else as it is
    installed; empty where neither is known.
    """
    own = getattr(sys.modules.get(library), "__version__", None)
    if own is not None:
        return str(own)
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


class _Finder(importlib.abc.MetaPathFinder):
    """Delegates to the other finders, and patches the module after it has run. `answers` are the patches by the names of modules."""

    def __init__(self, answers: Mapping[str, Answer]) -> None:
        self._answers = answers

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._answers:
            return None
        # `find_spec` walks the same list of finders: with this one in it, it would call itself.
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            _answer_after(spec.loader, self._answers[fullname])
        return spec


def _answer_after(loader: importlib.abc.Loader, answer: Answer) -> None:
    run = loader.exec_module

    def exec_module(module: types.ModuleType) -> None:
        run(module)
        answer(module)

    setattr(loader, "exec_module", exec_module)  # noqa: B010 - of this one loader, which is of this one module
