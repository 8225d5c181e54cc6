"""The private names of torch that the source uses, found in its syntax trees: imports, attributes, names in strings, names that are replaced."""

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from tests.cpu.sources import dotted, imported

import tightfit
from tightfit.errors.private_names import Name

SOURCE = Path(tightfit.__file__).parent
# The rooms that run beside torch, by the process in which they do.
CHILD = ("capture",)
USERS_PROCESS = (
    "torch_hooks",
    "runtime",
    "techniques",
    "recordings",
    "calibration",
    "fit",
    "diagnosis",
    "engine",
    "guarding",
    "integrations",
)
BOTH = ("effects",)
BESIDE_TORCH = ("capture", "effects", "engine", "guarding", "torch_hooks", "runtime", "techniques", "recordings")
MANIFESTS = ("capture/patches/manifest.py", "torch_hooks/manifest.py")
_CLASSES = (
    *(torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.UntypedStorage, torch.Generator),
    *(type(torch.ops.aten.add.Tensor), torch.autograd.graph.Node, torch.autograd.Function),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A private name in a file: the whole of it where it can be told (`torch._C._foo`), else its last part (`_foo`)."""

    name: str
    file: str

    @property
    def room(self) -> str:
        """The folder that the file is in, two deep at most; for a file at the top of `capture` or `techniques` that room."""
        return "/".join(self.file.split("/")[:-1][:2])


def is_private(name: str) -> bool:
    """Whether a part of a dotted name begins with one underscore."""
    return any(part.startswith("_") and not part.startswith("__") and len(part) > 1 for part in name.split("."))


def names_of_torchs_objects() -> set[str]:
    """Private attributes of torch's own classes, by which an attribute that our classes have too is told to be torch's."""
    found = {name for kind in _CLASSES for name in dir(kind)}
    found |= {name for kind in _CLASSES for base in kind.__mro__ for name in inspect.get_annotations(base)}
    return {name for name in found if is_private(name)}


def uses() -> list[Use]:
    """Every use of the source."""
    trees = {
        str(path.relative_to(SOURCE)): ast.parse(path.read_text())
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).parts[0] in (*CHILD, *USERS_PROCESS, *BOTH)
        and str(path.relative_to(SOURCE)) not in MANIFESTS
    }
    own = {name for tree in trees.values() for name in _defined(tree)}
    of_torch = names_of_torchs_objects()
    found = []
    for file, tree in trees.items():
        names = imported(tree, ("torch",))
        names |= _aliases(tree, names)
        found += [Use(name=name, file=file) for name in names.values() if is_private(name)]
        found += [Use(name=name, file=file) for name in _attributes(tree, names, own - of_torch)]
        found += [Use(name=name, file=file) for name in _in_calls(tree, names)]
        found += [Use(name=name, file=file) for name in _rows(tree)]
        if file.split("/")[0] in BESIDE_TORCH:
            found += [Use(name=name, file=file) for name in _strings(tree, own - of_torch)]
    return found


def _aliases(tree: ast.Module, names: Mapping[str, str]) -> dict[str, str]:
    """What `aten = torch.ops.aten` at the head of a file names."""
    given = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
    return {node.targets[0].id: whole for node in given if (whole := dotted(node.value, names))}  # type: ignore[attr-defined]


def _rows(tree: ast.Module) -> Iterator[str]:
    """The rows of a manifest that a file imports by their own names, for `Name.value` or to have them replaced."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith(".manifest"):
            given = [getattr(importlib.import_module(str(node.module)), each.name) for each in node.names]
            yield from (str(row) for row in given if isinstance(row, Name))


def _defined(tree: ast.Module) -> Iterator[str]:
    """The names that a file of ours gives: functions, classes, variables, and attributes of `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _attributes(tree: ast.Module, names: Mapping[str, str], own: set[str]) -> Iterator[str]:
    within = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            whole = dotted(node, names)
            if whole and id(node) not in within and is_private(whole):
                yield whole
            elif not whole and is_private(node.attr) and not _is_self(node.value) and node.attr not in own:
                yield node.attr


def _in_calls(tree: ast.Module, names: Mapping[str, str]) -> Iterator[str]:
    """What `replace(owner, name=...)` and `setattr(owner, "name", ...)` name."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
            continue
        owner = dotted(node.args[0], names)
        given: list[str] = []
        if node.func.id == "replace":
            given = [keyword.arg for keyword in node.keywords if keyword.arg]
        elif node.func.id in ("getattr", "setattr", "hasattr", "delattr"):
            given = [str(part.value) for part in node.args[1:2] if isinstance(part, ast.Constant)]
        yield from (f"{owner}.{name}" for name in given if owner and is_private(f"{owner}.{name}"))


def _strings(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Strings that are one private identifier, but for what our own code is called."""
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, str) and value.isidentifier() and is_private(value) and value not in own:
            yield value
