"""Finds whole numbers that a later turn of a loop would use as sizes: `batch = 64 if step < 100 else 4096`, `if step == 500: length *= 2`,
`length = 64 + 32 * epoch`.

Curricula of lengths and warm-ups of batches hold no call that works on tensors, and change what each later step needs. A number counts where its name
is read as a size in the program: of a tensor that is made, of a slice, of a loop, or as an argument that is called a size, a length or a batch.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

from tightfit.capture.after_steps.conditional_expressions import is_whole_number
from tightfit.capture.after_steps.named_lambdas import given_name
from tightfit.capture.after_steps.rewriting import called

_GROWS = (ast.Add, ast.Mult, ast.LShift, ast.Pow)
_MULTIPLY = (ast.Mult, ast.LShift, ast.Pow)
_SIZED = frozenset(
    {"randn", "rand", "randint", "zeros", "ones", "empty", "full", "arange", "randperm", "eye", "range", "expand"}
    | {"repeat", "view", "reshape", "narrow", "new_zeros", "new_ones", "new_empty", "DataLoader", "interpolate"}
)
_NAMED_AS_SIZE = re.compile(
    r"(^|_)(size|length|len|seq|batch|bs|width|height|resolution|num|samples)(_|$)", re.IGNORECASE
)


class Sizes:
    """What is read as a size in the trees of a program, and which node each is part of."""

    def __init__(self, trees: Sequence[ast.Module]) -> None:
        self._parents: dict[int, ast.AST] = {}
        self._read: set[str] = set()
        self._parameters: dict[str, list[str]] = {}
        for node in (node for tree in trees for node in ast.walk(tree)):
            self._parents.update((id(child), node) for child in ast.iter_child_nodes(node))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._parameters[node.name] = [each.arg for each in node.args.args if each.arg != "self"]
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
                self._parameters[given_name(node)] = [each.arg for each in node.value.args.args]
        # What a function of the program reads as a size is one where it is called, and there it may be a parameter again.
        for _ in range(3):
            for node in (node for tree in trees for node in ast.walk(tree)):
                self._read |= {_name(inner) for part in self._sizes_in(node) for inner in ast.walk(part)} - {""}

    def _sizes_in(self, node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, ast.Slice):
            yield from (bound for bound in (node.lower, node.upper) if bound is not None)
        elif isinstance(node, ast.Call):
            if called(node) in _SIZED:
                yield from node.args
            given = zip(node.args, self._parameters.get(called(node), ()), strict=False)
            yield from (argument for argument, name in given if name in self._read)
            yield from (
                each.value
                for each in node.keywords
                if each.arg and (_NAMED_AS_SIZE.search(each.arg) or each.arg in self._read)
            )

    def changed_in(self, statements: Iterable[ast.stmt]) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
        """The assignments of sizes in a branch, in words; or the branch itself, where it is a part of an expression that is a size or is assigned to one."""
        for statement in statements:
            if isinstance(statement, ast.Expr) and is_whole_number(statement.value):
                told = self.told(statement.value)
                if told:
                    yield statement.value, told
                continue
            for node in ast.walk(statement):
                if isinstance(node, ast.Assign) and is_whole_number(node.value):
                    targets = node.targets
                elif isinstance(node, ast.AugAssign) and isinstance(node.op, _GROWS) and is_whole_number(node.value):
                    targets = [node.target]
                elif isinstance(node, ast.Return) and node.value is not None and is_whole_number(node.value):
                    if self._gives_a_size(node):
                        yield node, " ".join(ast.unparse(node).split())
                    continue
                else:
                    continue
                if any(_name(target) in self._read for target in targets):
                    yield node, " ".join(ast.unparse(node).split())

    def growing_in(self, loop: ast.For | ast.While) -> Iterator[ast.stmt]:
        """The statements of a loop that multiply a size in its turns: `length *= 2`, `batch = min(2 * batch, 512)`. A sum is no sign: positions in data are
        added to. Nor is what begins anew in each turn."""
        nodes = [node for statement in loop.body for node in ast.walk(statement)]
        growing = [node for node in nodes if isinstance(node, ast.stmt) and _multiplies(node)]
        begun = {ast.unparse(t) for n in nodes if isinstance(n, ast.Assign) and n not in growing for t in n.targets}
        for node in growing:
            if any(_name(target) in self._read and ast.unparse(target) not in begun for target in _targets(node)):
                yield node

    def reads(self, target: ast.expr) -> bool:
        """Whether what is assigned to `target` is read as a size."""
        return _name(target) in self._read

    def told(self, part: ast.expr) -> str:
        """What a part gives a size to; empty if to none."""
        text = ast.unparse(part)
        node: ast.AST = part
        is_in_lambda = False
        while not isinstance(node, ast.stmt):
            is_in_lambda |= isinstance(node, ast.Lambda)
            parent = self._parents.get(id(node))
            if parent is None:
                return ""
            if any(each is node for each in self._sizes_in(parent)):
                return f"a size of {text}"
            node = parent
        if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Call):
            return f"a size of {text}" if self._gives_a_size(node) else ""
        targets = node.targets if isinstance(node, ast.Assign) else []
        if is_in_lambda:
            return f"a size of {text}" if given_name(node) in self._read else ""
        return next((f"{ast.unparse(target)} = {text}" for target in targets if _name(target) in self._read), "")

    def _gives_a_size(self, node: ast.AST) -> bool:
        """Whether a result of its function is read as a size somewhere."""
        while not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parent = self._parents.get(id(node))
            if parent is None:
                return False
            node = parent
        return node.name in self._read


# Whose arguments by position are all sizes; of the others of `_SIZED` some are values, or places in data.
_ALL_SIZES = _SIZED - {"full", "randint", "arange", "range", "narrow", "DataLoader", "interpolate"}
_WITH_SIZE = frozenset({"interpolate", "resize", "Resize", "center_crop", "CenterCrop"})
_SIZE_KEYWORDS = frozenset({"size", "batch_size", "num_samples"})
_KEEP_GROWTH = frozenset({"min", "max", "int", "round", "float", "abs", "floor", "ceil"})


class CountedSizes:
    """Sizes that grow with the number of a loop's turn: `length = min(32 + 8 * epoch, 512)`, `range(1 + step // 50)`.

    What is read as a bound of a slice or of a range alone is no size here: places in data grow with the turn, and what lies between them does not.
    """

    def __init__(self, trees: Sequence[ast.Module]) -> None:
        self._read: set[str] = set()
        self._parameters: dict[str, list[str]] = {}
        self._results: dict[str, list[ast.expr]] = {}
        nodes = [node for tree in trees for node in ast.walk(tree)]
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self._parameters[node.name] = [each.arg for each in node.args.args if each.arg != "self"]
                returned = (each for each in ast.walk(node) if isinstance(each, ast.Return))
                self._results[node.name] = [each.value for each in returned if each.value is not None]
        # As in `Sizes`: what a function reads as a size is one where it is called.
        for _ in range(3):
            for node in nodes:
                self._read |= {_name(inner) for part in self._sizes_in(node) for inner in ast.walk(part)} - {""}

    def _sizes_in(self, node: ast.AST) -> Iterator[ast.expr]:
        if not isinstance(node, ast.Call):
            return
        name = called(node)
        if name in _ALL_SIZES:
            yield from node.args
        elif name in _WITH_SIZE or (name in ("range", "arange") and len(node.args) == 1):
            yield from node.args[-1:]
        elif name == "full":
            yield from node.args[:1]
        elif name == "randint":
            yield from (argument for argument in node.args if isinstance(argument, ast.Tuple | ast.List))
        parameters = self._parameters.get(name, ())
        yield from (argument for argument, each in zip(node.args, parameters, strict=False) if each in self._read)
        yield from (
            each.value
            for each in node.keywords
            if each.arg in _SIZE_KEYWORDS or (each.arg in parameters and each.arg in self._read)
        )

    def growing_in(self, loop: ast.For | ast.While) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
        """The assignments of sizes, and the sizes themselves, that grow with the number of the loop's turn, in words."""
        counters = _counters(loop)
        for node in (node for statement in loop.body for node in ast.walk(statement)):
            is_size = isinstance(node, ast.Assign) and any(_name(target) in self._read for target in node.targets)
            if isinstance(node, ast.Assign) and is_size and self._grows_with(node.value, counters):
                yield node, " ".join(ast.unparse(node).split())
            for part in self._sizes_in(node):
                for size in part.elts if isinstance(part, ast.Tuple | ast.List) else [part]:
                    if self._grows_with(size, counters):
                        yield size, f"a size of {ast.unparse(size)}"

    def _grows_with(self, node: ast.expr, counters: set[str]) -> bool:
        """Whether an expression grows where one of the counters does, by its looks; of a function of the program's, by those of its results."""
        if _grows_with(node, counters):
            return True
        if not isinstance(node, ast.Call):
            return False
        given = zip(node.args, self._parameters.get(called(node), ()), strict=False)
        growing = {name for argument, name in given if _grows_with(argument, counters)}
        growing |= {each.arg for each in node.keywords if each.arg and _grows_with(each.value, counters)}
        return any(_grows_with(result, growing) for result in self._results.get(called(node), ()))


def _counters(loop: ast.For | ast.While) -> set[str]:
    """The names that count the turns of a loop."""
    if isinstance(loop, ast.While):
        nodes = (node for statement in loop.body for node in ast.walk(statement) if isinstance(node, ast.AugAssign))
        return {_name(n.target) for n in nodes if isinstance(n.op, ast.Add) and is_whole_number(n.value)} - {""}
    source, target = loop.iter, loop.target
    while isinstance(source, ast.Call) and called(source) in ("tqdm", "track", "progress_bar") and source.args:
        source = source.args[0]
    name = called(source) if isinstance(source, ast.Call) else ""
    if name in ("range", "trange", "count"):
        return {_name(target)} - {""}
    if name == "enumerate" and isinstance(target, ast.Tuple) and target.elts:
        return {_name(target.elts[0])} - {""}
    return set()


def _grows_with(node: ast.expr, counters: set[str]) -> bool:
    """Whether an expression grows where one of the counters does, by its looks."""
    match node:
        case ast.Name() | ast.Attribute():
            return _name(node) in counters
        case ast.BinOp(op=ast.Add() | ast.Mult() | ast.Pow() | ast.LShift(), left=left, right=right):
            return _grows_with(left, counters) or _grows_with(right, counters)
        case ast.BinOp(op=ast.Sub() | ast.FloorDiv() | ast.Div(), left=left):
            return _grows_with(left, counters)
        case ast.Call(args=arguments) if called(node) in _KEEP_GROWTH:
            return any(_grows_with(argument, counters) for argument in arguments)
    return False


def _targets(node: ast.stmt) -> Sequence[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []


def _multiplies(node: ast.stmt) -> bool:
    """Whether it gives a name a multiple of what it was."""
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, _MULTIPLY) and is_whole_number(node.value)
    names = {ast.unparse(target) for target in _targets(node)}
    return isinstance(node, ast.Assign) and any(
        isinstance(part, ast.BinOp)
        and isinstance(part.op, _MULTIPLY)
        and is_whole_number(part)
        and bool(names & {ast.unparse(part.left), ast.unparse(part.right)})
        for part in ast.walk(node.value)
    )


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
