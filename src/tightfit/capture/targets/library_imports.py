"""Imports of known libraries at the head of a program, which the process that its traces are forked from runs once for all of them.

transformers takes as long to import as a small model to trace, and a plan traces many times. A statement is taken only as long as
nothing but imports of Python, torch and such libraries came before it, so that it does there what it would do in the program.
"""

import ast
import importlib.util
import os
import sys
from pathlib import Path

from tightfit.capture.targets.huggingface.known_names import OF_CARDS, OF_CARDS_TOO, is_any_installed
from tightfit.errors.package_folders import package_folders

# Imported with a card and without one they are the same (tests/cpu/test_imported_before.py); diffusers notes whether there is one.
LIBRARIES = frozenset(("transformers", "accelerate", "peft", "lightning"))
# What runs before them in a program and changes nothing for them; imported by whatever needs it.
_BESIDE = frozenset((*sys.stdlib_module_names, "__future__", "torch", "numpy", "tqdm", "safetensors"))
# Of torch, what imports other libraries.
_NOT_OF_TORCH = ("torch.utils.tensorboard", "torch._dynamo", "torch._inductor", "torch.compiler")
# Installed, they are imported by the libraries, and ask for a card.
_WITH_CARDS = ("bitsandbytes", "deepspeed", "kernels", "torchao", "liger_kernel", "hqq")


def library_imports(path: Path) -> tuple[str, ...]:
    """The statements in the file at `path`, in order; none where it cannot be read or parsed."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        # The trace says what is wrong with it.
        return ()
    found = []
    for statement in tree.body:
        names = _modules(statement)
        if names is None or any(_is_beside(name, path) for name in names):
            break
        tops = {name.partition(".")[0] for name in names}
        if not tops <= LIBRARIES | _BESIDE or any(name.startswith(_NOT_OF_TORCH) for name in names):
            break
        if tops & LIBRARIES:
            found.append(ast.unparse(statement))
    if not found or is_any_installed((*OF_CARDS, *OF_CARDS_TOO, *_WITH_CARDS)) or any(map(_is_of_the_users, LIBRARIES)):
        return ()
    return tuple(found)


def _modules(statement: ast.stmt) -> list[str] | None:
    """The modules that a statement imports, none for a docstring; None for what is no import, or a relative one."""
    if isinstance(statement, ast.Import):
        return [alias.name for alias in statement.names]
    if isinstance(statement, ast.ImportFrom):
        module = statement.module or ""
        return None if statement.level else [f"{module}.{alias.name}" for alias in statement.names]
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return []
    return None


def _is_of_the_users(library: str) -> bool:
    """Whether a library is a clone that is on the path, or installed from there: as the user's own code, it is compiled with checks in its loops in a trace."""
    spec = importlib.util.find_spec(library)
    return spec is not None and not os.path.realpath(spec.origin or "").startswith(package_folders())


def _is_beside(name: str, path: Path) -> bool:
    """Whether the program's own folder has a module of the name, which the program finds first, or the working folder, which the server does."""
    tops = [folder / name.partition(".")[0] for folder in (path.parent, Path())]
    return any(top.exists() or top.with_suffix(".py").exists() for top in tops)
