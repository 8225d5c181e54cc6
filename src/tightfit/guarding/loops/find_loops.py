"""Finds the training loops in the source of a program: the innermost loops whose turn runs a backward pass. No torch.

A backward pass is a call of a method `backward`, or of a function of the program that makes such a call outside of a training loop of its own.
Functions are told apart by their names alone, so that more loops may be found than train; while a program runs, the innermost one counts.
"""

import ast
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

Loop = ast.For | ast.While
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_BACKWARD = ("backward", "manual_backward")
_MOST_FILES = 200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GuardedProgram:
    """The parsed files of a program, by their paths, and the functions that they define, by name."""

    trees: Mapping[str, ast.Module]
    functions: Mapping[str, tuple[ast.AST, ...]]

    @classmethod
    def of(cls, path: Path, folder: Path | None = None) -> "GuardedProgram":
        """The file at `path`, and what it imports from `folder`, by default its own, or relatively to itself."""
        folder = path.resolve().parent if folder is None else folder.resolve()
        trees: dict[str, ast.Module] = {}
        waiting = [path.resolve(), *_packages(path.resolve(), folder)]
        while waiting and len(trees) < _MOST_FILES:
            each = waiting.pop()
            if str(each) in trees:
                continue
            try:
                tree = ast.parse(each.read_bytes(), str(each))
            except (SyntaxError, OSError, ValueError):
                # Python says it when it comes to run it.
                continue
            trees[str(each)] = tree
            waiting += _imported(tree, each, folder)
        functions: dict[str, list[ast.AST]] = {}
        for tree in trees.values():
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    functions.setdefault(node.name, []).append(node)
        return cls(trees=trees, functions={name: tuple(found) for name, found in functions.items()})


def training_loops(program: GuardedProgram, path: str) -> list[Loop]:
    """The training loops in the file at `path`, in no particular order."""
    search = _Search(program.functions)
    tree = program.trees.get(path)
    if tree is None:
        return []
    scopes: Iterable[ast.AST] = (tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)))
    for scope in scopes:
        search.trains(scope)
    own = {id(node) for node in ast.walk(tree)}
    return [loop for loop in search.loops if id(loop) in own and not _is_suspended(loop)]


class _Search:
    """Decides for each function whether calling it runs a backward pass outside of a training loop."""

    def __init__(self, functions: Mapping[str, tuple[ast.AST, ...]]) -> None:
        self.loops: list[Loop] = []
        self._functions = functions
        self._known: dict[int, bool] = {}

    def trains(self, scope: ast.AST) -> bool:
        """Whether the code of `scope`, itself or by what it calls, runs a backward pass that is in no training loop."""
        known = self._known.get(id(scope))
        if known is None:
            # Of a function that calls itself: what the rest of it says.
            self._known[id(scope)] = False
            known = self._known[id(scope)] = self._any(scope)
        return known

    def _node(self, node: ast.AST) -> bool:
        if isinstance(node, _FUNCTIONS):
            return False
        inner = self._any(node)
        if isinstance(node, ast.Call):
            inner = inner or self._call(node.func)
        if inner and isinstance(node, ast.For | ast.While):
            self.loops.append(node)
            return False
        return inner

    def _call(self, function: ast.expr) -> bool:
        name = (
            function.attr
            if isinstance(function, ast.Attribute)
            else function.id
            if isinstance(function, ast.Name)
            else ""
        )
        # All of them are gone through, for their loops.
        found = [self.trains(each) for each in self._functions.get(name, ())]
        return name in _BACKWARD or any(found)

    def _any(self, node: ast.AST) -> bool:
        found = [self._node(child) for child in ast.iter_child_nodes(node)]
        return any(found)


def _is_suspended(loop: Loop) -> bool:
    """Whether a turn of the loop hands control to other code in its middle: that code's state is not the loop's."""
    return any(isinstance(node, ast.Yield | ast.YieldFrom | ast.Await) for node in own_nodes(loop))


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below `node` that run with it: not those of functions and classes that it defines."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            yield from own_nodes(child)


def _imported(tree: ast.Module, path: Path, folder: Path) -> Iterator[Path]:
    for node in ast.walk(tree):
        names: list[str] = []
        base = folder
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names]
            if node.level > len(path.parents):
                continue
            if node.level:
                base = path.parents[node.level - 1]
                yield from _files(base.parent, [base.name])
        for name in names:
            yield from _files(base, name.split("."))


def _files(base: Path, parts: Sequence[str]) -> Iterator[Path]:
    """The files that Python runs to import a name below a folder: those of the packages that it is in too."""
    for number in range(1, len(parts) + 1):
        place = base.joinpath(*parts[:number])
        yield from (file.resolve() for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file())


def _packages(path: Path, folder: Path) -> list[Path]:
    """The files of the packages between a folder and a module that is run with `python -m`."""
    places = path.parents[: path.parents.index(folder)] if folder in path.parents else ()
    return [place / "__init__.py" for place in places if (place / "__init__.py").is_file()]
