"""Names of torch and of other libraries are replaced in one package; that they are listed is compared in tests/surface/test_manifest.py."""

import ast
from pathlib import Path

from tests.cpu.sources import dotted, imported, trees

import tightfit

LIBRARIES = ("torch", "transformers", "lightning", "pytorch_lightning", "accelerate", "peft", "bitsandbytes")
SOURCE = Path(tightfit.__file__).parent
# The capture has a process of its own.
ELSEWHERE = ("capture", "torch_hooks")


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
