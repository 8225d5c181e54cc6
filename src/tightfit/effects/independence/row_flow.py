"""Proves that a computation treats the rows of its inputs independently, by following them through every operator.

The computation runs on fake tensors, which have shapes and no data: once for each number of rows that parts have, and once for all rows. All runs
must have the same operators with the same arguments, except sizes that are multiples of the number of rows: so nothing that Python did depended
on that number. In the last run each storage gets a pattern that says which row its bytes belong to, by a rule per operator (`rules`).
Results that mix rows, or come from an operator without a rule, are marked; the proof fails if a marked one reaches a result, a branch or a loss.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from tightfit.effects.independence.fake_tensors import FakeTensors
from tightfit.effects.independence.meta_kernels import MetaKernels
from tightfit.effects.independence.operations import (
    ByOperator,
    Operation,
    Sources,
    add_left_out,
    compare_one,
    is_plain,
    operation_of,
    schema_of,
    tensors_of,
)
from tightfit.effects.independence.operator_names import (
    KEEPS_COUNT,
    KEEPS_VOTE,
    MAKES_UNIFORM,
    TAKES_COUNT,
    TAKES_SIZE,
    VOTES,
)
from tightfit.effects.independence.row_states import (
    UNIFORM,
    UNIFORM_SQUARE,
    Mixed,
    RowStates,
    State,
    Uniform,
    at_line,
    key_of,
)
from tightfit.effects.independence.rows import Mixes, Pattern, RowLayout, pattern_of
from tightfit.effects.independence.totals import (
    Total,
    compares_with_rows,
    divides_by_rows,
    is_sum,
    is_vote,
    total_of,
)
from tightfit.effects.outside_calls import Unwatched
from tightfit.effects.reads import READS
from tightfit.effects.values.lent_memory import is_lent

aten = torch.ops.aten


class NeedsValues(Exception):
    """The code reads a value, which fake tensors do not have: run it for real once, inside of `Reads`, and pass in the values read."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCall:
    """One operator call: its arguments by the names of its schema, and its output tensors."""

    func: OpOverload
    arguments: Mapping[str, Any]
    outputs: Sequence[torch.Tensor]

    @property
    def name(self) -> str:
        """The name without namespace and overload, the same for in-place variants."""
        return self.func.overloadpacket.__name__.rstrip("_")

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors among the arguments."""
        return tensors_of(self.arguments.values())

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument that only some overloads have."""
        return self.arguments.get(name, default)


Place = RowLayout | Uniform | None
Result = Place | Sequence[Place]
Rule = Callable[["Flow", OperatorCall], Result]


@ByOperator
def _defaults(func: OpOverload) -> dict[str, Any]:
    return {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}


@ByOperator
def _names_of_written(func: OpOverload) -> list[str]:
    return [name for name, _, is_written in schema_of(func) if is_written]


def _bound(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return (
        _defaults(func) | {known[0]: value for known, value in zip(schema_of(func), args, strict=False)} | dict(kwargs)
    )


def _written(func: OpOverload, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes to."""
    names = _names_of_written(func)
    return tensors_of([arguments.get(name) for name in names]) if names else []


def _with_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """An argument of an operator with its tensors changed. torch's own function for trees takes a tenth of a proof."""
    if isinstance(value, torch.Tensor):
        return change(value)
    return type(value)(_with_tensors(change, each) for each in value) if type(value) in (list, tuple) else value


class FakeRun(TorchDispatchMode):
    """One run on fake tensors, with `num_rows` rows; its operators are in `operations`, and the shapes of its inputs in `given`. A subclass follows the rows."""

    def __init__(
        self,
        num_rows: int,
        *,
        fake: FakeTensorMode,
        device: torch.device | None = None,
        reads: Sequence[Any] | None = None,
        allows_randomness: bool = False,
        allows_votes: bool = False,
        shares_draws: bool = False,
    ) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.fake = fake
        self._tensors = FakeTensors(fake, device)
        self._kernels = MetaKernels(fake)
        self.operations: list[Operation] = []
        self.given: list[tuple[int, ...]] = []
        self.sources = Sources()
        # How many operators were inserted that it has left out.
        self.num_inserted = 0
        self.failure: Mixes | None = None
        self._allows_randomness = allows_randomness
        self._allows_votes = allows_votes
        # Numbers may be drawn that are the same for any rows.
        self._shares_draws = shares_draws
        self._reads = None if reads is None else list(reads)
        # Nothing here has data: all storages are kept, so that none is taken for another.
        self._kept: list[Any] = []
        self._born: set[int] = set()
        # Memory from before that may be written to, with the words for that where it was.
        self.may_write: dict[int, str] = {}
        self._is_atom = False

    def fail(self, reason: str) -> Mixes:
        """The error to raise. It is also kept, as the code may swallow it."""
        self.failure = self.failure or Mixes(reason)
        return self.failure

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with Unwatched():
            return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        arguments = _bound(func, args, kwargs)
        tensors = tensors_of(arguments.values())
        self._check(func, arguments, tensors)
        if func in READS:
            return self._read(func, tensors)
        is_on_host = _is_on_host(func, arguments, tensors) and (func.is_view or not self._tensors.are_any_away(tensors))
        if is_on_host:
            out = func(*args, **kwargs)
        else:
            # Fake kernels draw nothing, and refuse a generator of another device.
            kwargs = {k: v for k, v in kwargs.items() if k != "generator"}
            args = _with_tensors(self._tensors.as_fake, args)
            kwargs = {name: _with_tensors(self._tensors.as_fake, value) for name, value in kwargs.items()}
            out = self._kernels.run(func, args, kwargs)
            if out is NotImplemented:
                with self.fake:
                    out = _moved(func, arguments) if _is_move(func, tensors) else func(*args, **kwargs)
        outputs = tensors_of((out,))
        if not is_on_host:
            outputs = self._with_written(func, arguments, outputs)
        known = {key_of(t) for t in tensors}
        for output in outputs:
            if output.layout != torch.strided:
                raise self.fail(f"{func} makes a {output.layout} tensor{at_line()}")
            self._kept.append((output, output.untyped_storage()))
            if key_of(output) not in known:
                self._born.add(key_of(output))
        sources = tuple(map(self.sources.of, tensors))
        # A view is from where its memory is.
        self.sources.made([output for output in outputs if key_of(output) not in known], len(self.operations))
        if not self._is_atom:
            self._note(operation_of(func, arguments, outputs, sources))
            self.follow(OperatorCall(func=func, arguments=arguments, outputs=outputs), known)
        return out

    def _check(self, func: Any, arguments: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        """Raises if the operator cannot be followed, before it runs."""
        for tensor in tensors:
            if is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided:
                raise self.fail(f"{func} works on a {type(tensor).__name__} ({tensor.layout}){at_line()}")
        if not self._allows_randomness and _draws(func, arguments) and (not self._shares_draws or self._is_atom):
            raise self.fail(f"{func} draws random numbers{at_line()}")
        for leaf in _written(func, arguments):
            # A write to what was there before the run (a buffer, a global table) happens once for the whole
            # batch, and would happen once for each part.
            key = key_of(leaf)
            if key in self._born:
                continue
            told = f"{func} writes to a tensor from outside{at_line()}"
            if key not in self.may_write:
                raise self.fail(told)
            self.may_write[key] = self.may_write[key] or told

    def _with_written(
        self, func: Any, arguments: Mapping[str, Any], outputs: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """The outputs of an operator, with real host tensors that it writes to instead of the fake tensors that stood in for them."""
        written = [leaf for leaf in _written(func, arguments) if not isinstance(leaf, FakeTensor)]
        if not written:
            return outputs
        if len(written) != 1 or len(outputs) != 1:
            raise self.fail(f"{func} writes to several tensors{at_line()}")
        return written

    def written(self, tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, str]]:
        """Those of `tensors`, which may be written to, that were, with the words for it."""
        for each in tensors:
            if told := self.may_write[key_of(each)]:
                yield each, told

    def _read(self, func: Any, tensors: Sequence[torch.Tensor]) -> Any:
        self.check_read(func, tensors)
        if self._is_atom:
            return 0
        if self._reads is None:
            raise NeedsValues
        if not self._reads:
            raise self.fail(f"values are read in another order than before{at_line()}")
        return self._reads.pop(0)

    def check_read(self, func: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Raises Mixes if the value that is read depends on the rows."""

    def _note(self, operation: Operation) -> None:
        self.operations.append(operation)

    def follow(self, call: OperatorCall, known: set[int]) -> None:
        """Follows the rows through one operator; `known` are the storages of its arguments."""

    def atom(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs a function as if it were one operator."""
        given = tree_leaves((args, dict(kwargs)))
        sources = tuple(map(self.sources.of, tensors_of(given)))
        self._is_atom = True
        try:
            out = func(*args, **kwargs)
        finally:
            self._is_atom = False
        values = tuple(leaf for leaf in given if is_plain(leaf))
        self._note(Operation(func=func, values=values, sizes=(), shapes=(tuple(out.shape),), sources=sources))
        return out


def _draws(func: OpOverload, arguments: Mapping[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    rate = [arguments[name] for name in ("dropout_p", "dropout") if name in arguments]
    return not ((bool(rate) and not any(rate)) or arguments.get("p") == 0 or arguments.get("train") is False)


def _is_on_host(func: OpOverload, arguments: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether to run an operator for real: host tensors that no input went into have values, and so do views of weights."""
    device = arguments.get("device")
    if device is not None and torch.device(device).type not in ("cpu", "meta"):
        return False
    return all(not isinstance(t, FakeTensor) and (t.device.type in ("cpu", "meta") or func.is_view) for t in tensors)


def _is_move(func: OpOverload, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether it copies a host tensor to a card, for which FakeTensorMode would need the card."""
    return func is aten._to_copy.default and not isinstance(tensors[0], FakeTensor) and tensors[0].device.type == "cpu"


def _moved(func: OpOverload, arguments: Mapping[str, Any]) -> torch.Tensor:
    source = arguments["self"]
    return torch.empty(source.shape, dtype=arguments["dtype"] or source.dtype, device=arguments["device"])


def _poisoned(rows: RowStates, call: OperatorCall, why: str) -> State:
    """The state of what an operator makes of rows that it mixes."""
    states = [rows.state(t) for t in call.tensors]
    # The first reason is passed on, so that the error names the operator where rows came together and not
    # the last one after it.
    mixed = next((s for s in states if isinstance(s, Mixed)), None)
    if mixed is None:
        mixed = next((Mixed(reason=s.reason) for s in states if isinstance(s, Total)), None)
    if mixed is None:
        return Mixed(reason=f"{call.func} {why}{at_line()}", is_vote=call.name in VOTES)
    return mixed if call.name in KEEPS_VOTE else Mixed(reason=mixed.reason)


def _check_draw(flow: "Flow", call: OperatorCall) -> None:
    """Raises Mixes if an operator draws, where that is not allowed, and is given rows, or is given or gives sizes that depend on their number."""
    if flow._allows_randomness or not _draws(call.func, call.arguments):
        return
    sizes = list(operation_of(call.func, call.arguments, call.outputs).sizes)
    has_grown = any(flow.grown(number, output) for number, output in enumerate(call.outputs))
    if has_grown or sizes != list(flow.its_sizes()) or any(map(flow.rows.depends, call.tensors)):
        raise flow.fail(f"{call.func} draws random numbers{at_line()}")


def _is_of_counts(rows: RowStates, output: torch.Tensor, call: OperatorCall) -> bool:
    """Whether something is made of position numbers of the rows that is none itself: the last of them, their sum."""
    return not rows.is_scaled(output) and any(map(rows.counts_rows, call.tensors))


def _constants(flow: "Flow", call: OperatorCall) -> list[RowLayout | Uniform | None]:
    return [flow._constant(call, output, number) for number, output in enumerate(call.outputs)]


def _note_writes(flow: "Flow", call: OperatorCall) -> None:
    """Position numbers that are written to, by an operator or by numpy, are none any longer."""
    rows, written = flow.rows, list[torch.Tensor]()
    if torch.Tag.inplace_view not in call.func.tags:
        written += [t for t in _written(call.func, call.arguments) if key_of(t) in rows.counting]
    written += [t for t in call.tensors if not isinstance(t, FakeTensor) and rows.counts_rows(t) and is_lent(t)]
    for tensor in written:
        if rows.state(tensor) is None:
            rows.set(tensor, Mixed(reason=f"{call.func} depends on the number of rows{at_line()}"))


def _grows_with_rows(view: torch.Tensor, pattern: Pattern, grown: tuple[int, ...]) -> bool:
    """Whether a view grows along its rows alone. `x.view(-1, len(x))` has rows of a fixed number of columns in this run, and of fewer ones in another."""
    try:
        return grown == (pattern.layout_in(view).dim,)
    except Mixes:
        # Told where it is used, if it is; but not more columns for more rows.
        return len(grown) < 2


def _in_uniform(
    flow: "Flow", output: torch.Tensor, state: Uniform, result: Place, grown: tuple[int, ...], call: OperatorCall
) -> Place:
    """What `result` is for memory whose elements were all equal, of which `output` may be a part."""
    if isinstance(result, Uniform) and call.name not in MAKES_UNIFORM:
        if call.func._schema.is_mutable:
            raise Mixes("overwrites rows")
        return result
    is_whole = output.numel() * output.element_size() == output.untyped_storage().nbytes()
    if is_whole or result is None:
        return result
    if state is UNIFORM_SQUARE:
        raise Mixes("writes to a part of what depends on the number of rows")
    if isinstance(result, RowLayout):
        return result
    # One element of each row, say: the others are still equal for all rows.
    if len(grown) != 1 or output.shape[grown[0]] != flow.num_rows:
        raise Mixes("overwrites rows")
    return RowLayout(dim=grown[0])


class Flow(FakeRun):
    """The run with all rows, which follows them; `other` is an earlier run with a part of the rows."""

    def __init__(self, num_rows: int, other: FakeRun, rules: Mapping[str, Rule], **settings: Any) -> None:
        super().__init__(num_rows, **settings)
        self.other = other
        self._rules = rules
        self.rows = RowStates(num_rows)

    def its_sizes(self) -> Sequence[Any]:
        """The size arguments of the current operator in the run with the other number of rows."""
        return self.other.operations[len(self.operations) - 1].sizes

    def check_read(self, func: Any, tensors: Sequence[torch.Tensor]) -> None:
        if self._is_atom:
            return
        for tensor in tensors:
            state = self.rows.state(tensor)
            is_vote = self._allows_votes and isinstance(state, Mixed) and state.is_vote
            if (state is not None and not is_vote) or self.rows.is_scaled(tensor):
                raise self.fail(f"Python reads a value that depends on the rows{at_line()}")

    def _note(self, operation: Operation) -> None:
        number = len(self.operations)
        super()._note(operation)
        add_left_out(self, self.other, number)
        if number >= len(self.other.operations):
            raise self.fail(f"runs other operators for {self.num_rows} rows than for {self.other.num_rows}{at_line()}")
        try:
            is_renumbered = self.other.num_inserted > 0
            its = self.other.operations[number]
            compare_one(operation, its, self.num_rows, self.other.num_rows, is_renumbered=is_renumbered)
        except Mixes as error:
            raise self.fail(f"{error}{at_line()}") from None

    def follow(self, call: OperatorCall, known: set[int]) -> None:
        _check_draw(self, call)
        _note_writes(self, call)
        written = {key_of(leaf) for leaf in _written(call.func, call.arguments)}
        made = [o for o in call.outputs if key_of(o) not in known]
        changed = [o for o in call.outputs if key_of(o) in written]
        # A view needs no rule: the pattern belongs to the storage, and the view's strides say where the rows
        # lie in it.
        for viewed in (o for o in call.outputs if key_of(o) in known - written):
            self._view(viewed, call)
        self._follow_unreturned(call)
        targets = [*made, *changed]
        if not targets:
            return
        # Dividing a sum by the number of rows makes a mean; dividing anything else by it makes another result
        # for each part.
        votes = is_vote(self, call)
        is_of_rows = divides_by_rows(self, call) and not is_sum(self.rows.state(call["self"]))
        if is_of_rows or (compares_with_rows(self, call) and not votes):
            raise self.fail(f"passes other numbers to {call.func} for {self.num_rows} rows{at_line()}")
        if votes:
            for target in targets:
                self.rows.set(target, Mixed(reason=f"{call.func} counts along the rows{at_line()}", is_vote=True))
            return
        inputs = call.tensors
        try:
            takes_size = call.name in TAKES_SIZE and not isinstance(self.rows.state(inputs[0]), Pattern)
            total = None if takes_size else total_of(self, call)
            if total is not None:
                for target in targets:
                    self.rows.set(target, total)
                return
            results = _constants(self, call) if takes_size else self._results(call, inputs)
        except Mixes as error:
            # Marked and not raised: much of what mixes rows is never used (a batch statistic that is only
            # logged).
            state: State = _poisoned(self.rows, call, str(error))
            for target in targets:
                self.rows.set(target, state)
            return
        for output, result in zip(call.outputs, results, strict=True):
            if key_of(output) in known - written or not output.numel():
                continue
            try:
                self._assign(output, result, call)
            except Mixes as error:
                self.rows.set(output, _poisoned(self.rows, call, str(error)))

    def _follow_unreturned(self, call: OperatorCall) -> None:
        """Marks what an operator writes to and does not return (`_foreach_add_`, many operators of programs): no rule is asked about it."""
        returned = {key_of(output) for output in call.outputs}
        unreturned = [t for t in _written(call.func, call.arguments) if key_of(t) not in returned]
        inputs = call.tensors
        if unreturned and any(self.rows.state(t) is not None or self.rows.is_scaled(t) for t in inputs):
            state = _poisoned(self.rows, call, "has no rule for its effect on rows")
            for target in unreturned:
                self.rows.set(target, state)

    def _results(self, call: OperatorCall, inputs: Sequence[torch.Tensor]) -> Sequence[RowLayout | Uniform | None]:
        follows = any(self.rows.state(t) is not None or self.rows.is_scaled(t) for t in inputs)
        if not follows:
            return _constants(self, call)
        rule = self._rules.get(call.name) if call.func.namespace in ("aten", "prims", "torchvision") else None
        if rule is None and torch.Tag.pointwise in call.func.tags:
            rule = self._rules["pointwise"]
        if rule is None:
            raise Mixes("has no rule for its effect on rows")
        if (
            rule is not self._rules["pointwise"]
            and call.name not in TAKES_COUNT
            and any(map(self.rows.counts_rows, inputs))
        ):
            raise Mixes("depends on the number of rows")
        found = rule(self, call)
        return found if isinstance(found, Sequence) else [found] * len(call.outputs)

    def grown(self, number: int, output: torch.Tensor) -> tuple[int, ...]:
        """The dimensions of output `number` of the current operator whose size depends on the number of rows."""
        its = self.other.operations[len(self.operations) - 1].shapes[number]
        return tuple(dim for dim, (a, b) in enumerate(zip(output.shape, its, strict=True)) if a != b)

    def _constant(self, call: OperatorCall, output: torch.Tensor, number: int) -> RowLayout | Uniform | None:
        """The layout of an output that no row goes into: it is the same for every number of rows, or repeated for each row."""
        grown = self.grown(number, output)
        if not grown:
            return None
        if len(grown) == 1 and output.stride(grown[0]) == 0 and output.shape[grown[0]] == self.num_rows:
            self.rows.scale(output, grown, counts=False)
            return None
        if call.name in MAKES_UNIFORM:
            is_plain = len(grown) == 1 and output.shape[grown[0]] == self.num_rows
            return RowLayout(dim=grown[0]) if is_plain else UNIFORM
        if call.name in ("repeat", "expand_copy") and len(grown) == 1:
            whole, dim = call.arguments["self"], grown[0] - output.dim()
            inner = whole.shape[dim] if -dim <= whole.dim() else 1
            if output.shape[dim] % (inner * self.num_rows) == 0:
                return RowLayout(dim=grown[0], inner=output.shape[dim] // self.num_rows)
        # Position numbers of the rows: allowed as indices (`x[torch.arange(n), y]`), since a part's own numbers
        # start at 0 as well.
        if call.name == "arange" and output.dim() == 1 and len(output) == self.num_rows:
            step = call.get("step", 1)
            if call.get("start", 0) in (0, None) and step in (1, None):
                self.rows.scale(output, grown, counts=True)
                return None
        raise Mixes("depends on the number of rows")

    def _view(self, output: torch.Tensor, call: OperatorCall) -> None:
        """A view of a constant may repeat it for each row."""
        state = self.rows.state(output)
        number = next(n for n, o in enumerate(call.outputs) if o is output)
        grown = self.grown(number, output)
        if isinstance(state, Pattern) and output.numel() and not _grows_with_rows(output, state, grown):
            self.rows.set(output, Mixed(reason=f"{call.func} depends on the number of rows{at_line()}"))
            return
        if state is not None and not isinstance(state, Total):
            return
        if not grown:
            if state is None and _is_of_counts(self.rows, output, call):
                self.rows.set(output, Mixed(reason=f"{call.func} depends on the number of rows{at_line()}"))
            return
        if isinstance(state, Total):
            self.rows.set(output, Mixed(reason=state.reason))
            return
        if len(grown) == 1 and output.stride(grown[0]) == 0 and output.shape[grown[0]] == self.num_rows:
            self.rows.scale(output, grown, counts=False)
            return
        source = call.tensors[0]
        if self.rows.counts_rows(source) and output.numel() == self.num_rows:
            self.rows.scale(output, grown, counts=True)
            return
        self.rows.set(output, Mixed(reason=f"{call.func} depends on the number of rows{at_line()}"))

    def _assign(self, output: torch.Tensor, result: RowLayout | Uniform | None, call: OperatorCall) -> None:
        state = self.rows.state(output)
        if isinstance(state, Mixed):
            raise Mixes(state.reason)
        number = next(n for n, o in enumerate(call.outputs) if o is output)
        grown = self.grown(number, output)
        if isinstance(state, Uniform):
            result = _in_uniform(self, output, state, result, grown, call)
        if isinstance(result, Uniform):
            if state is None:
                self.rows.set(output, UNIFORM if len(grown) < 2 else UNIFORM_SQUARE)
            elif not isinstance(state, Uniform):
                raise Mixes("overwrites rows")
            return
        if result is None:
            if state is not None:
                raise Mixes("overwrites rows")
            if grown and call.name in KEEPS_COUNT and self.rows.counts_rows(call.tensors[0]):
                self.rows.scale(output, grown, counts=True)
            elif (grown and not self.rows.is_scaled(output)) or _is_of_counts(self.rows, output, call):
                raise Mixes("depends on the number of rows")
            return
        if grown and grown != (result.dim,):
            raise Mixes("has a result with other dimensions for another number of rows")
        if isinstance(state, Pattern):
            if state.layout_in(output) != result:
                raise Mixes("overwrites other rows")
            return
        self.rows.set(output, pattern_of(output, result, self.num_rows))
