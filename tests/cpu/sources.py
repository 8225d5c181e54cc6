"""The source of a package as trees, and which names of libraries stand where in it."""

import ast
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path


def trees(folder: Path, without: Collection[str]) -> Iterator[tuple[Path, ast.Module]]:
    """The modules below `folder`, but for those in its folders `without`."""
    for path in sorted(folder.rglob("*.py")):
        if path.relative_to(folder).parts[0] not in without:
            yield path, ast.parse(path.read_text())


def imported(tree: ast.Module, libraries: Collection[str]) -> dict[str, str]:
    """The names of a module that stand for something of these libraries, with what that is."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] in libraries:
                    first = each.name.partition(".")[0]
                    names[each.asname or first] = each.name if each.asname else first
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in libraries:
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return names


def dotted(node: ast.expr, names: Mapping[str, str]) -> str:
    """The whole name of `a.b.c`, if `a` is one of `names`; empty otherwise."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return ""
    return ".".join((names[node.id], *reversed(parts)))
