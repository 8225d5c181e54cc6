"""Names the code that a trace has not reached and that could use the GPU: branches in loops that were left, and what follows the end of a trace.

Source is read, not run. A branch counts if its condition can change from turn to turn (`step % 500 == 0`, not `args.resume`), it stands in a loop
that was left or in a function that such a loop calls, and it calls something that works on tensors: a model, or a function that evaluates,
generates, samples or saves, or leads to one.
"""

import ast
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from tightfit.capture.after_steps.changing_sizes import CountedSizes, Sizes
from tightfit.capture.after_steps.function_tables import FunctionTables
from tightfit.capture.after_steps.named_lambdas import given_name
from tightfit.capture.after_steps.names_of_modules import last_name, names_of_modules
from tightfit.capture.after_steps.rewriting import called
from tightfit.capture.after_steps.rewritten_program import RewrittenProgram
from tightfit.capture.after_steps.size_tables import SizeTables
from tightfit.capture.after_steps.unfreezing import is_unfreezing, unfreezes, unfreezing
from tightfit.capture.observe.attribution import short
from tightfit.tape import NotReached

# By name, as the objects are gone when the trace is over. Of a name's words, which underscores or capitals separate.
_WORKS = re.compile(
    r"evals?|evaluat\w*|valid|validat\w*|generat\w*|sampl\w*|infer\w*|predict\w*|save\w*|checkpoint\w*|ckpt|test|backward|deepcopy|clone|"
    r"visuali\w*|render|fid|forward",
    re.IGNORECASE,
)
# A new one makes its states at its first step, and a layer its weights.
_HOLDERS_OF_TENSORS = re.compile(
    r"(sparse|n|r)?adam\w*|sgd\w*|rmsprop|rprop|asgd|adagrad|adadelta|adafactor|adopt|ademamix|lion\w*|lamb|lars|lbfgs|muon\w*|shampoo|soap|"
    r"sophia\w*|prodigy|add_param_group|\w*_optimizers?|"
    r"(lazy)?(bi)?linear|(lazy)?conv(transpose)?[123]d|embedding(bag)?|lstm|gru|rnn|multiheadattention|transformer((en|de)coder)?(layer)?",
    re.IGNORECASE,
)
_MAX_NAME = 40
_WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+")
_NO_WORK_OF = frozenset({"random", "np", "numpy", "math", "json", "os", "logging", "logger", "rng", "plt", "pickle"})
_NO_WORK = frozenset(
    {
        "eval",
        "inference_mode",
        "is_inference_mode_enabled",
        "is_inference",
        "is_valid",
        "validate_args",
        "savefig",
        "save_hyperparameters",
        "save_pretrained",
    }
)
_OF_TORCH = frozenset(
    {"cat", "concat", "concatenate", "stack", "vstack", "hstack", "zeros", "ones", "empty", "rand", "randn", "full"}
    | {
        "matmul",
        "einsum",
        "bmm",
        "mm",
        "addmm",
        "cdist",
        "tensordot",
        "outer",
        "kron",
        "topk",
        "sort",
        "argsort",
        "cov",
    }
    | {"corrcoef", "softmax", "log_softmax", "logsumexp", "cosine_similarity", "pairwise_distance", "svd", "meshgrid"}
)
_MADE_BY = frozenset({"zeros_like", "ones_like", "empty_like", "randn_like", "rand_like"})
_PARTS_OF_TORCH = frozenset({"functional", "F", "linalg", "fft", "special", "func"})
# Given a module, these do nothing on the card.
_LOOK_AT_MODULES = frozenset(
    {
        "print",
        "isinstance",
        "len",
        "type",
        "id",
        "hasattr",
        "getattr",
        "setattr",
        "vars",
        "repr",
        "str",
        "callable",
        "issubclass",
    }
    | {"append", "info", "debug", "warning", "log", "watch", "add_graph", "unwrap_model", "ref", "WeakSet"}
)
# Methods of modules that compute nothing; all others may run the model (`model.encode_image(x)`).
_QUIET_METHODS = re.compile(
    r"(register|get|set|enable|disable|print|log|num|is|has|add|gradient|named|load|save|push|remove|freeze|unfreeze)(_.*)?|"
    r"(train|eval|parameters|buffers|modules|children|state_dict|requires_grad_|to|cuda|cpu|half|float|double|bfloat16|"
    r"zero_grad|apply|no_sync|compile|keys|values|items|append|extend|update|pop|copy|type)"
)
_STATIC_CALLS = frozenset(
    {"isinstance", "hasattr", "getattr", "len", "callable", "is_available", "get_rank", "is_main_process", "bool"}
    | {
        "int",
        "float",
        "str",
        "is_tensor",
        "is_initialized",
        "is_distributed",
        "is_dist_avail_and_initialized",
        "exists",
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class RunningLine:
    """A line of the user's code that was running, with the first line and the name of its function."""

    file: str
    line: int
    first_line: int
    function: str


def not_reached(
    program: RewrittenProgram, left: Sequence[int], stack: Sequence[RunningLine], *, is_stopped: bool
) -> tuple[NotReached, ...]:
    """The calls that were not reached: in the training loops `left`, and after `stack` where the trace ended there."""
    source = _Source(program)
    found: dict[NotReached, None] = {}
    # The same call elsewhere, such as an evaluation at the end as well, has shown what it needs.
    reached = set() if is_stopped else _reached(program, program.seen.ever)
    sizes = Sizes(tuple(program.trees.values()))
    for number in _unseen(program, source, left):
        branch = program.branches[number]
        for node, what in sizes.changed_in(branch.statements):
            where = f"{short(branch.file)}:{node.lineno}"
            found.setdefault(NotReached(what=what, where=where, condition=branch.condition))
        for call in source.works(branch.statements):
            if ast.unparse(call) not in reached:
                found.setdefault(_named(call, branch.file, branch.condition))
    tables, counted = SizeTables(tuple(program.trees.values()), sizes), CountedSizes(tuple(program.trees.values()))
    for file, loop in _nodes_of(program, set(left)):
        for node in sizes.growing_in(loop):
            what, where = " ".join(ast.unparse(node).split()), f"{short(file)}:{node.lineno}"
            if not any((each.what, each.where) == (what, where) for each in found):
                found[NotReached(what=what, where=where, condition="in each turn")] = None
        for size, what in (*tables.later_in(loop), *counted.growing_in(loop)):
            found.setdefault(NotReached(what=what, where=f"{short(file)}:{size.lineno}", condition="in a later turn"))
    if is_stopped:
        for each in _after(source, program, stack):
            found.setdefault(each)
        if not found:
            found.setdefault(NotReached(what="the rest of the program", where=""))
    return tuple(found)


def unfrozen_later(program: RewrittenProgram, loops: Iterable[int], left: Sequence[int]) -> tuple[NotReached, ...]:
    """What is unfrozen in each turn of `loops`, which were `left` with frozen weights: `unfreeze(layers=epoch)`, `model[-epoch].requires_grad_()`.

    `loops` are around other training loops, whose own statements do not count: what is frozen and unfrozen from step to step (in a GAN) was seen.
    """
    source = _Source(program)
    trained = {id(node) for _, node in _nodes_of(program, set(left))}
    nodes = [
        (file, each)
        for file, loop in _nodes_of(program, set(loops))
        for each in unfreezing(loop, trained, source.functions)
    ]
    return tuple(dict.fromkeys(_named(node, file, "in a later turn") for file, node in nodes))


def run_early_alone(program: RewrittenProgram, left: Sequence[int]) -> tuple[NotReached, ...]:
    """The calls in the training loops `left` that ran in the first turn, before an optimizer had its state, and could in a later one:
    an evaluation `if step % 500 == 0`, which begins with one at step 0."""
    source = _Source(program)
    reached = _reached(program, program.seen.later)
    found: dict[NotReached, None] = {}
    for number in _later(program, source, left):
        branch = program.branches[number]
        if not program.seen.early_alone(number) or branch.test is None or _is_once(branch.test):
            continue
        for call in source.works(branch.statements):
            if ast.unparse(call) not in reached:
                found.setdefault(_named(call, branch.file, branch.condition))
    return tuple(found)


def _is_once(test: ast.expr) -> bool:
    """Whether a condition is that of one turn: `step == 0`, `not started`."""
    if isinstance(test, ast.UnaryOp):
        return isinstance(test.op, ast.Not) and isinstance(test.operand, ast.Name | ast.Attribute)
    if not isinstance(test, ast.Compare) or len(test.ops) > 1:
        return False
    return isinstance(test.ops[0], ast.Eq | ast.Is) and isinstance(test.left, ast.Name | ast.Attribute)


def _named(call: ast.expr, file: str, condition: str) -> NotReached:
    if not isinstance(call, ast.Call):
        text = " ".join(ast.unparse(call).split())
        return NotReached(
            what=text if len(text) <= _MAX_NAME else "a matrix product",
            where=f"{short(file)}:{call.lineno}",
            condition=condition,
        )
    name = " ".join(ast.unparse(call.func).split())
    name = name if len(name) <= _MAX_NAME else f"...{called(call)}"
    return NotReached(what=f"{name}()", where=f"{short(file)}:{call.lineno}", condition=condition)


class _Source:
    """The source of a program: its functions by name, the names of its modules, and what changes from turn to turn."""

    def __init__(self, program: RewrittenProgram) -> None:
        self.functions: dict[str, list[ast.AST]] = {}
        self._modules, self._callable = names_of_modules(program.trees.values())
        self.changing: set[str] = set()
        self._works: dict[str, bool] = {}
        for tree in program.trees.values():
            self._read(tree)
        self.tables = FunctionTables(program.trees.values(), self.functions)

    def _read(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Lambda):
                self.functions.setdefault(given_name(node), []).append(node.value)
            elif isinstance(node, ast.AugAssign):
                self.changing.add(last_name(node.target))
            elif isinstance(node, ast.For | ast.While):
                for inside in ast.walk(node):
                    is_bound = isinstance(inside, ast.Name | ast.Attribute) and isinstance(inside.ctx, ast.Store)
                    self.changing |= {last_name(inside)} if is_bound else set()

    def works(self, statements: Iterable[ast.AST]) -> Iterator[ast.expr]:
        """The calls in `statements`, in order, that can use the GPU, and where weights are unfrozen; a call inside of another one is part of it."""
        for statement in statements:
            yield from self._works_in(statement)

    def _works_in(self, node: ast.AST) -> Iterator[ast.expr]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            return
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            yield node
            return
        if isinstance(node, ast.Call) and (unfreezes(node) or self._is_work(node)):
            yield node
            return
        if isinstance(node, ast.Assign) and is_unfreezing(node):
            # In words of its own: it is no expression.
            yield ast.copy_location(ast.Name(ast.unparse(node)), node)
            return
        for child in ast.iter_child_nodes(node):
            yield from self._works_in(child)

    def _is_work(self, call: ast.Call) -> bool:
        # `models["ema"](x)` is a call of `models`.
        name = called(call) or last_name(call.func)
        owner = _first(call.func)
        if not name or name in _NO_WORK or (isinstance(call.func, ast.Attribute) and owner in _NO_WORK_OF):
            return False
        # It copies to the host, a tensor at a time.
        if owner == "torch" and name == "save":
            return False
        if name in self.functions:
            return self._leads_to_work(name)
        is_of_torch = owner == "torch" and name in _OF_TORCH
        is_of_part = isinstance(call.func, ast.Attribute) and last_name(call.func.value) in _PARTS_OF_TORCH
        if name in self._callable or name in _MADE_BY or is_of_torch or is_of_part:
            return True
        if _HOLDERS_OF_TENSORS.fullmatch(name) or self._may_run_module(call, name):
            return True
        return any(_WORKS.fullmatch(word) for word in _WORDS.findall(name))

    def _may_run_module(self, call: ast.Call, name: str) -> bool:
        """Whether it is a method of a module, or a library's function that is given one."""
        if isinstance(call.func, ast.Attribute) and not _QUIET_METHODS.fullmatch(name):
            owner = call.func.value
            while isinstance(owner, ast.Attribute) and owner.attr in {"module", "_orig_mod"}:
                owner = owner.value
            if last_name(owner) in self._modules:
                return True
        values = [*call.args, *(each.value for each in call.keywords)]
        is_given = any(
            isinstance(each, ast.Name | ast.Attribute) and last_name(each) in self._modules for each in values
        )
        return is_given and name not in _LOOK_AT_MODULES

    def _leads_to_work(self, name: str) -> bool:
        if name not in self._works:
            self._works[name] = False  # of a function that calls itself
            nodes = [node for function in self.functions[name] for node in _statements(function)]
            # A class is constructed: what its constructor does counts.
            nodes += [
                inner
                for node in self.functions[name]
                if isinstance(node, ast.ClassDef)
                for function in node.body
                if isinstance(function, ast.FunctionDef) and function.name == "__init__"
                for inner in function.body
            ]
            self._works[name] = any(True for _ in self.works(nodes))
        return self._works[name]

    def calls(self, nodes: Iterable[ast.AST]) -> set[str]:
        """The names of the program's functions that `nodes` call or have in tables, and what these call."""
        return self._walked(nodes)[0]

    def selected(self, nodes: Sequence[ast.AST]) -> set[str]:
        """The names of the functions in tables from which `nodes`, or what they call, select by what can change; those of lambdas are the tables'."""
        in_loop = {id(inner) for node in nodes for inner in ast.walk(node)}
        found = set[str]()
        for node in self._walked(nodes)[1]:
            taken = self.tables.selected_by(node)
            if taken is None:
                continue
            name, index = taken
            # In a function it may be an argument.
            may_be_given = id(node) not in in_loop and name not in self.tables.by_text
            if any(
                last_name(part) in self.changing or (may_be_given and isinstance(part, ast.Name))
                for part in ast.walk(index)
                if isinstance(part, ast.Name | ast.Attribute)
            ):
                found |= {name for name, _ in self.tables.functions_of(ast.Name(name))}
        return found

    def _walked(self, nodes: Iterable[ast.AST]) -> tuple[set[str], list[ast.AST]]:
        waiting, found, seen = list(nodes), set[str](), list[ast.AST]()
        while waiting:
            for node in ast.walk(waiting.pop()):
                seen.append(node)
                name = called(node) if isinstance(node, ast.Call) else ""
                functions = [(name, each) for each in self.functions.get(name, ())]
                new = [each for each in (*functions, *self.tables.functions_of(node)) if each[0] not in found]
                found |= {name for name, _ in new}
                waiting += [each for _, each in new]
        return found, seen

    def can_change(self, test: ast.expr, *, in_loop: bool) -> bool:
        """Whether a condition may be true in a later turn and was not until now. `in_loop`: it stands in the loop itself, not in a function."""
        for node in ast.walk(test):
            if isinstance(node, ast.Call) and called(node) not in _STATIC_CALLS:
                return True
            if isinstance(node, ast.Name | ast.Attribute) and last_name(node) in self.changing:
                return True
        if in_loop:
            return False
        # In a function, a number that is compared may be an argument that differs from call to call.
        return any(_is_of_numbers(node) for node in ast.walk(test))


def _statements(function: ast.AST) -> Sequence[ast.AST]:
    return [function.body] if isinstance(function, ast.Lambda) else getattr(function, "body", [])


def _is_of_numbers(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Mod | ast.FloorDiv)
    if not isinstance(node, ast.Compare):
        return False
    return any(isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in node.ops)


def _unseen(program: RewrittenProgram, source: _Source, left: Sequence[int]) -> Iterator[int]:
    """The branches that did not run and could in a later turn of the loops that were left."""
    inner: set[int] = set()
    for number in _later(program, source, left):
        # Branches inside of one that is named are part of it.
        statements = program.branches[number].statements
        if not program.seen.ever(number) and id(statements[0]) not in inner:
            inner |= {id(node) for statement in statements for node in ast.walk(statement)}
            yield number


def _later(program: RewrittenProgram, source: _Source, left: Sequence[int]) -> Iterator[int]:
    """The branches that could run in a later turn of the loops that were left."""
    if not left:
        return
    lost = _with_consumers(program, left)
    files = {program.loops[number].file for number in left}
    # What a loop iterates over calls these, and no text of the loop does.
    iterating = [each for name in ("__iter__", "__next__") for each in source.functions.get(name, ())]
    loops = [loop for _, loop in _nodes_of(program, lost)]
    called_there = source.calls([*loops, *iterating]) | {"__iter__", "__next__"}
    selected = source.selected(loops)
    for number, branch in enumerate(program.branches):
        in_loop = bool(lost & set(branch.loops))
        is_on_the_way = in_loop or branch.function in called_there
        if branch.kind == "function":
            can_run = branch.function in selected
        elif branch.test is None:
            # A handler around the loop waits for its end.
            can_run = is_on_the_way or branch.file in files
        else:
            can_run = is_on_the_way and source.can_change(branch.test, in_loop=in_loop)
        if can_run:
            yield number


def _with_consumers(program: RewrittenProgram, left: Sequence[int]) -> set[int]:
    """The loops, and those that go through a generator in which one of them was left: they have ended with it."""
    lost = set(left)
    generators = {program.loops[number].scope[1] for number in left} - {"<module>"}
    lines = {
        (file, node.lineno)
        for file, tree in program.trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.For)
        and any(isinstance(each, ast.Call) and called(each) in generators for each in ast.walk(node.iter))
    }
    return lost | {number for number, loop in enumerate(program.loops) if (loop.file, loop.line) in lines}


def _reached(program: RewrittenProgram, has_run: Callable[[int], bool]) -> set[str]:
    """The calls, as text, in the code that ran, as far as branches (by their numbers) and functions tell."""
    inside: dict[int, int] = {}
    # An inner branch comes after the one around it.
    for number, branch in enumerate(program.branches):
        for statement in branch.statements:
            inside.update((id(node), number) for node in ast.walk(statement))
    return {
        ast.unparse(node)
        for tree in program.trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (id(node) not in inside or has_run(inside[id(node)]))
    }


def _nodes_of(program: RewrittenProgram, numbers: set[int]) -> list[tuple[str, ast.For | ast.While]]:
    """The loops with these numbers as syntax trees, with their files."""
    ends = {(program.loops[n].file, program.loops[n].line, program.loops[n].last) for n in numbers}
    return [
        (file, node)
        for file, tree in program.trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.For | ast.While) and (file, node.lineno, node.body[-1].end_lineno) in ends
    ]


def _after(source: _Source, program: RewrittenProgram, stack: Sequence[RunningLine]) -> Iterator[NotReached]:
    """The calls that follow the lines of `stack` in their functions."""
    for place in stack:
        tree = program.trees.get(place.file)
        for call in source.works(() if tree is None else _body(tree, place)):
            if call.lineno > place.line:
                yield _named(call, place.file, "")


def _body(tree: ast.Module, place: RunningLine) -> Sequence[ast.stmt]:
    if place.function == "<module>":
        return tree.body
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == place.function:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == place.first_line:
                return node.body
    return ()


def _first(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
