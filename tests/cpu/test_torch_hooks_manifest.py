"""Names of torch and of other libraries are replaced in one package, and the private ones that are read are listed, with what each is for."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cpu.sources import dotted, imported, trees

import tightfit
from tightfit.torch_hooks.manifest import REPLACED
from tightfit.torch_hooks.private_names import ON_OBJECTS, READ

LIBRARIES = ("torch", "transformers", "lightning", "pytorch_lightning", "accelerate", "peft", "bitsandbytes")
SOURCE = Path(tightfit.__file__).parent
# The capture has a process of its own.
ELSEWHERE = ("capture", "torch_hooks")


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _used() -> Iterator[tuple[str, Path]]:
    """The private names of libraries that the source imports, or reaches from what it imports."""
    for path, tree in trees(SOURCE, without=ELSEWHERE):
        names = imported(tree, LIBRARIES)
        within = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and id(node) not in within:
                name = dotted(node, names)
                while (
                    name.count(".")
                    and not _is_private(name.rpartition(".")[2])
                    and _is_private(name.rpartition(".")[0])
                ):
                    if name in READ:
                        break
                    name = name.rpartition(".")[0]
                yield name, path
        yield from ((name, path) for name in names.values())


def test_private_names_of_libraries_are_listed() -> None:
    used = {name: path for name, path in _used() if _is_private(name)}
    modules = {name for name in used if any(known.startswith(f"{name}.") for known in READ)}
    unlisted = {name: str(path) for name, path in used.items() if name not in READ and name not in modules}
    assert not unlisted, "say in tightfit/torch_hooks/private_names.py what these are for"


@pytest.mark.parametrize("name", READ)
def test_the_listed_names_are_there(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    try:
        holder = importlib.import_module(module)
    except ModuleNotFoundError:
        outer, _, inner = module.rpartition(".")
        holder = getattr(importlib.import_module(outer), inner)
    assert hasattr(holder, attribute)


def test_every_name_says_what_it_is_for() -> None:
    assert all(text and not text.endswith(".") for text in (*READ.values(), *ON_OBJECTS.values()))
    assert all(name.purpose.startswith("to ") and name.versions for name in REPLACED)


def test_nothing_else_replaces_a_name_of_a_library() -> None:
    found = []
    for path, tree in trees(SOURCE, without=ELSEWHERE):
        names = imported(tree, LIBRARIES)
        for node in ast.walk(tree):
            # What backends may use is a setting, and has no other way to be made.
            changed = [dotted(target, names) for target in _targets(node)]
            found += [
                f"{path.name}:{node.lineno}" for name in changed if name and not name.startswith("torch.backends.")
            ]
    assert not found


def _targets(node: ast.AST) -> list[ast.expr]:
    """Whose attribute is set; for an assignment the attribute itself."""
    if isinstance(node, ast.Assign):
        return [target for target in node.targets if isinstance(target, ast.Attribute)]
    if isinstance(node, ast.AugAssign):
        return [node.target] if isinstance(node.target, ast.Attribute) else []
    return node.args[:1] if isinstance(node, ast.Call) and _sets(node.func) else []


def _sets(function: ast.expr) -> bool:
    name = (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )
    return name in ("setattr", "set", "replace")
