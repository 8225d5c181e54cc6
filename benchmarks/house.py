"""The figures of the code base itself: how long files and functions are, how rooms lean on one another, what is named twice, what is explained.

    python -m benchmarks.house

A room is a folder of `src/tightfit`. An arrow is an import between two members of a folder, its files and folders; imports for annotations do not
count. Methods of a class are counted without the special ones, `__init__` aside. Needs the `dev` extra (grimp, with which import-linter reads
imports) and networkx, which torch brings.
"""

import ast
import io
import re
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import grimp
import networkx

SOURCE = Path(__file__).parents[1] / "src" / "tightfit"
MAX_FILES, MAX_MEMBERS, MAX_ARROWS = 20, 20, 40
_SPECIAL = re.compile(r"__\w+__")
_PRIVATE_OF_TORCH = re.compile(r"\btorch(?:\.[a-z]\w*)*\._\w+")


def _share(lengths: Iterable[int]) -> str:
    ordered = sorted(lengths)
    ninety = ordered[int(0.9 * (len(ordered) - 1))]
    return f"median {statistics.median(ordered):.0f}, p90 {ninety}, max {ordered[-1]} lines ({len(ordered):,})"


def _functions(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def _classes(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
            # What Python or torch calls by a name of its own (`__enter__`, `__deepcopy__`, `__torch_dispatch__`) is a protocol,
            # which a class cannot split.
            yield node.name, sum(name == "__init__" or not _SPECIAL.fullmatch(name) for name in methods)


def _num_comment_lines(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})


def _twice(names: Iterable[str]) -> dict[str, int]:
    return {name: count for name, count in sorted(Counter(names).items()) if count > 1}


def lines_of_files(texts: Mapping[Path, str]) -> Iterator[str]:
    """What is measured file by file: lengths, names, comments."""
    trees = {path: ast.parse(text) for path, text in texts.items()}
    yield f"files: {_share(text.count(chr(10)) for text in texts.values())}"
    yield f"functions: {_share(n for tree in trees.values() for n in _functions(tree))}"
    classes = [found for tree in trees.values() for found in _classes(tree)]
    name, num_methods = max(classes, key=lambda found: found[1])
    yield f"largest class: {name}, {num_methods} methods; {sum(n >= 12 for _, n in classes)} with 12 or more"
    files = _twice(path.name for path in texts if path.name not in ("__init__.py", "__main__.py"))
    yield f"file names used more than once: {len(files)} ({_counted(files)})"
    own = _twice(name for name, _ in classes if not name.startswith("_"))
    yield f"class names used more than once: {len(own)} ({_counted(own)})"
    num_lines = sum(text.count("\n") for text in texts.values())
    num_comments = sum(map(_num_comment_lines, texts.values()))
    yield f"comment lines: {num_comments:,} of {num_lines:,} ({num_comments / num_lines:.1%})"
    private = {name for text in texts.values() for name in _PRIVATE_OF_TORCH.findall(text)}
    yield f"private names of torch: {len(private)}"


def _counted(names: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in names.items()) or "none"


def lines_of_rooms(modules: Collection[str], imports: Collection[tuple[str, str]]) -> Iterator[str]:
    """What is measured folder by folder, of the imports (importer, imported): files, members, arrows and circles."""
    rooms = sorted({module.rpartition(".")[0] for module in modules if "." in module})
    yield f"{'room':38}{'files':>7}{'members':>9}{'arrows':>8}{'circles':>9}"
    for room in rooms:
        members = {module for module in modules if module.rpartition(".")[0] == room}
        arrows = _arrows(room, imports)
        circles = [part for part in networkx.strongly_connected_components(arrows) if len(part) > 1]
        num_files = sum(1 for member in members if member not in rooms)
        is_over = num_files > MAX_FILES or len(members) > MAX_MEMBERS or arrows.number_of_edges() > MAX_ARROWS
        mark = "  over" if is_over else ""
        yield f"{room:38}{num_files:7}{len(members):9}{arrows.number_of_edges():8}{len(circles):9}{mark}"


def _arrows(room: str, imports: Collection[tuple[str, str]]) -> "networkx.DiGraph[str]":
    def member(module: str) -> str:
        return module[len(room) + 1 :].partition(".")[0]

    inside = [(member(a), member(b)) for a, b in imports if a.startswith(f"{room}.") and b.startswith(f"{room}.")]
    return networkx.DiGraph([(a, b) for a, b in inside if a != b])


def modules_and_imports() -> tuple[set[str], list[tuple[str, str]]]:
    """The modules of the package, and the imports between them (importer, imported)."""
    graph = grimp.build_graph("tightfit", exclude_type_checking_imports=True, cache_dir=None)
    return set(graph.modules), [(a, b) for a in graph.modules for b in graph.find_modules_directly_imported_by(a)]


def main() -> int:
    """Prints the figures."""
    print(*lines_of_files({path: path.read_text() for path in sorted(SOURCE.rglob("*.py"))}), sep="\n")
    modules, imports = modules_and_imports()
    print("", *lines_of_rooms(modules, imports), sep="\n")
    whole = defaultdict(set)
    for importer, imported in imports:
        whole[importer].add(imported)
    circles = [part for part in networkx.strongly_connected_components(networkx.DiGraph(whole)) if len(part) > 1]
    print("", f"circles of modules: {len(circles)}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
