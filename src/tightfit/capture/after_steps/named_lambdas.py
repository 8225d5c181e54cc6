"""Lambdas that a statement gives a name, by themselves (`SIZE = lambda step: ...`) or in a table (`PHASES = {0: lambda model: ...}`)."""

import ast
from collections.abc import Iterator

TABLES = (ast.Dict, ast.List, ast.Tuple, ast.Set)


def given_name(statement: ast.stmt) -> str:
    """The name that an assignment gives to its value; empty of another statement."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return _name(targets[0]) if len(targets) == 1 else ""


def named_lambdas(statement: ast.stmt) -> Iterator[ast.Lambda]:
    """The lambdas that are the value of an assignment to one name, or stand in a table that is."""
    value = getattr(statement, "value", None) if given_name(statement) else None
    if isinstance(value, ast.Lambda):
        yield value
    elif isinstance(value, TABLES):
        yield from (each for each in entries_of(value) if isinstance(each, ast.Lambda))


def entries_of(table: ast.expr) -> Iterator[ast.expr]:
    """What stands in a table, and in tables within it."""
    parts = table.values if isinstance(table, ast.Dict) else getattr(table, "elts", [])
    for part in parts:
        if isinstance(part, TABLES):
            yield from entries_of(part)
        elif part is not None:
            yield part


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
