"""Compares the operators of two runs with different numbers of rows: they must be the same, except sizes that are multiples of that number.

Torch and programs skip operators that change nothing for one row: an expand to one row, a copy into the memory format that a tensor has already.
Both keep every value, and are inserted again before the runs are compared.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.effects.independence.rows import Mixes
from tightfit.effects.values.contents import content_of
from tightfit.effects.values.lent_memory import is_lent

aten = torch.ops.aten
Found = TypeVar("Found")
# Sizes in schemas that say which elements are taken, and not how many: where they are multiples of the number of rows, others are taken for each.
_PLACES = frozenset(
    [
        "k",
        "index",
        "start",
        "shifts",
        "storage_offset",
        "step",
        "diagonal",
        "dilation",
        "groups",
        "low",
        "high",
        "ignore_index",
        "padding_idx",
        "window_size_left",
        "window_size_right",
    ]
)
Source = tuple[Any, ...] | None
"""Where a tensor is from, as in `Sources.of`."""
_NUM_OF_NAMED = 3
GIVEN = "given"
"""What kind of name inputs have."""
COMPARISONS = frozenset(["eq", "ne", "lt", "le", "gt", "ge"])
# Of tables, and not of data sets in a file.
_LARGEST_LENT_BYTES = 1 << 24
# Names of one thing: which of them a reshape ends in depends on strides.
_VIEWS = {aten._unsafe_view.default: aten.view.default, aten._reshape_alias.default: aten.view.default}


class Sources:
    """Where the tensors of one run are from, as another one of two that are alike, chosen by the number of rows, is another computation: tensors that were there before it have a name that is the same in all runs, others the number of the operator that has made their memory."""

    def __init__(self) -> None:
        self._names: dict[int, Any] = {}
        self._made: dict[int, tuple[int, int]] = {}

    def name(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Names tensors that are there before the run by their place in this order."""
        for number, tensor in enumerate(tensors):
            if tensor.layout is torch.strided:
                self._names.setdefault(_key_of(tensor), (kind, number))

    def made(self, outputs: Sequence[torch.Tensor], number: int) -> None:
        """Operator `number` has returned these."""
        for place, output in enumerate(outputs):
            if _key_of(output) not in self._names:
                self._made.setdefault(_key_of(output), (number, place))

    def of(self, tensor: torch.Tensor) -> Source:
        """The name of a tensor and its place in its memory, or what has made it; None where neither is known."""
        key = _key_of(tensor)
        name = self._names.get(key)
        return self._made.get(key) if name is None else ("", name, tensor.storage_offset())

    def is_within(self, tensor: torch.Tensor) -> bool:
        """Whether the run has made a tensor, or its memory is that of an input."""
        key = _key_of(tensor)
        name = self._names.get(key)
        return key in self._made if name is None else name[0] == GIVEN


def are_alike(one: Source, other: Source, *, is_renumbered: bool) -> bool:
    """Whether two tensors are from the same place. `is_renumbered`: operators were left out in a run with one row, and all that follow are of other numbers."""
    if one == other or one is None or other is None:
        return True
    return is_renumbered and not (len(one) == len(other) == _NUM_OF_NAMED)


def _key_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operator for the comparison: the function and its plain arguments must be equal; sizes and shapes are compared as multiples.

    `given` is the shape of its first argument, and `made_of` the shapes and contents of tensors that the code makes of Python's numbers, or whose
    memory numpy may write to. `sources` says of each tensor where it is from, as in `Sources`.
    """

    func: Any
    values: tuple[Any, ...]
    sizes: tuple[Any, ...]
    shapes: tuple[tuple[int, ...], ...]
    given: tuple[int, ...] = ()
    made_of: tuple[tuple[tuple[int, ...], Any], ...] = ()
    sources: tuple[Source, ...] = ()

    def for_one_row(self, num_rows: int, given: tuple[int, ...] | None) -> "Operation | None":
        """This operation for one row, on a tensor of shape `given`, if it does nothing there; None for all others."""
        if self.func is aten.clone.default and given is not None:
            return dataclasses.replace(self, shapes=(given,), given=given)
        if self.func is aten.expand.default:
            before = (*(1,) * (len(self.shapes[0]) - len(self.given)), *self.given)
            pairs = list(zip(before, self.shapes[0], strict=True))
            if all(a == b or (a, b) == (1, num_rows) for a, b in pairs):
                sizes = tuple(1 if a != b else size for (a, b), size in zip(pairs, self.sizes, strict=True))
                return dataclasses.replace(self, sizes=sizes, shapes=(before,))
        return None


class HasOperations(Protocol):
    """A run with its number of rows, its operators, and the shapes of its inputs."""

    num_rows: int
    operations: list[Operation]
    given: list[tuple[int, ...]]
    num_inserted: int


class ByOperator(Generic[Found]):
    """Remembers what a function says of an operator, by identity: operators are hashed in Python, and a proof asks a few times for each call."""

    def __init__(self, ask: Callable[[OpOverload], Found]) -> None:
        self._ask = ask
        self._known: dict[int, tuple[OpOverload, Found]] = {}

    def __call__(self, func: OpOverload) -> Found:
        known = self._known.get(id(func))
        if known is None:
            known = self._known[id(func)] = (func, self._ask(func))
        return known[1]


def leaves_of(values: Iterable[Any]) -> list[Any]:
    """The arguments of an operator, or what it returns, out of their lists."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple):
            found += leaves_of(value)
        else:
            found.append(value)
    return found


def tensors_of(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among these."""
    return [leaf for leaf in leaves_of(values) if isinstance(leaf, torch.Tensor)]


@ByOperator
def schema_of(func: OpOverload) -> tuple[tuple[str, bool, bool], ...]:
    """For each argument its name, whether it is a size, and whether it is written to."""
    # Schemas say which integers are sizes (`SymInt`): those may depend on shapes under torch.compile, for the
    # same reason.
    sizes = set(re.findall(r"SymInt\S* (\w+)", str(func._schema))) - _PLACES
    # Its bounds are plain numbers (`Scalar`) in the schema, and sizes in nearly every program.
    if func.overloadpacket is aten.arange:
        sizes |= {"start", "end"}
    return tuple(
        (a.name, a.name in sizes, a.alias_info is not None and a.alias_info.is_write) for a in func._schema.arguments
    )


def is_plain(value: Any) -> bool:
    """Whether an argument is a number or a setting."""
    return isinstance(value, int | float | bool | complex | str | torch.dtype | torch.device | torch.layout | None)


def operation_of(
    func: Any, arguments: Mapping[str, Any], outputs: Sequence[torch.Tensor], sources: tuple[Source, ...] = ()
) -> Operation:
    """The operation to compare for one call of an operator."""
    values: list[Any] = []
    sizes: list[Any] = []
    for name, is_size, _ in schema_of(func):
        leaves = [leaf for leaf in leaves_of((arguments.get(name),)) if is_plain(leaf)]
        if is_size or (name == "other" and _may_count(func) and all(map(_is_count, leaves))):
            # The divisor of a sum may be the number of rows, and so may what a count is compared with: `totals` decides.
            sizes += [-1 if leaf is None else leaf for leaf in leaves]
        else:
            values += leaves
    first = arguments.get(schema_of(func)[0][0]) if schema_of(func) else None
    known = _VIEWS.get(func, func)
    return Operation(
        func=known,
        values=tuple(values),
        # A reshape hands on the -1 of the program where strides allow a view, and the size that it stands for where they do not.
        sizes=tuple(outputs[0].shape) if known is aten.view.default else tuple(sizes),
        shapes=tuple(tuple(o.shape) for o in outputs),
        given=tuple(first.shape) if isinstance(first, torch.Tensor) else (),
        made_of=tuple(
            (tuple(each.shape), content_of(each))
            for each in tensors_of(arguments.values())
            if func is aten.lift_fresh.default or _is_written_by_others(each)
        ),
        sources=sources,
    )


def _is_written_by_others(tensor: torch.Tensor) -> bool:
    """Whether an operator reads what numpy may have written meanwhile: of weights and fake tensors nothing is compared."""
    is_read = not isinstance(tensor, FakeTensor) and not tensor.requires_grad and tensor.nbytes <= _LARGEST_LENT_BYTES
    return is_read and is_lent(tensor)


@ByOperator
def _may_count(func: OpOverload) -> bool:
    return func.overloadpacket is aten.div or func.overloadpacket.__name__ in COMPARISONS


def _is_count(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value > 0 and float(value).is_integer()


def compare(one: HasOperations, other: HasOperations) -> None:
    """Checks that two runs did the same, except for the number of rows.

    Raises:
        Mixes: they did not.
    """
    for mine, its in ((one, other), (other, one)):
        for number in range(len(mine.operations)):
            add_left_out(mine, its, number)
    is_renumbered = bool(one.num_inserted or other.num_inserted)
    for first, second in zip(one.operations, other.operations, strict=False):
        compare_one(first, second, one.num_rows, other.num_rows, is_renumbered=is_renumbered)
    if len(one.operations) != len(other.operations):
        raise Mixes(f"runs other operators for {one.num_rows} rows than for {other.num_rows}")


def add_left_out(one: HasOperations, other: HasOperations, number: int) -> None:
    """Inserts operator `number` of one run into the other, if that has one row and skipped it."""
    # A run that has ended before did something else; `compare` says so.
    if other.num_rows != 1 or number > len(other.operations):
        return
    mine, its = one.operations[number], other.operations[number] if number < len(other.operations) else None
    if its is not None and its.func is mine.func:
        return
    left_out = mine.for_one_row(one.num_rows, _shape_for_one_row(one, other, number))
    if left_out is not None:
        other.operations.insert(number, left_out)
        other.num_inserted += 1


def _shape_for_one_row(one: HasOperations, other: HasOperations, number: int) -> tuple[int, ...] | None:
    """The shape of the first argument of operator `number` in the other run: that of the latest result with the same shape in this run, or of an input."""
    given = one.operations[number].given
    for mine, its in zip(reversed(one.operations[:number]), reversed(other.operations[:number]), strict=True):
        for shape, its_shape in zip(mine.shapes, its.shapes, strict=False):
            if shape == given:
                return its_shape
    # Targets that are a slice of a batch of ids are laid out anew before anything else is done with them.
    return next((its for mine, its in zip(one.given, other.given, strict=True) if mine == given), None)


def compare_one(mine: Operation, its: Operation, num_mine: int, num_its: int, *, is_renumbered: bool = False) -> None:
    """Checks that two operators are the same, except sizes that are multiples of the numbers of rows.

    Raises:
        Mixes: they differ by more.
    """
    rows = f"for {num_mine} rows than for {num_its}"
    if mine.func is its.func and num_mine != num_its and [len(mine.shapes), len(its.shapes)] == [num_mine, num_its]:
        raise Mixes(f"loops over the rows by {_name(mine.func)}; it has to compute all rows at once")
    if mine.func is not its.func or len(mine.sizes) != len(its.sizes) or len(mine.shapes) != len(its.shapes):
        raise Mixes(
            f"runs {_name(mine.func)} {rows}, where the other runs {_name(its.func)}: it loops over the rows, or "
            "branches on their number"
        )
    if len(mine.values) != len(its.values) or not all(map(_same, mine.values, its.values)):
        raise Mixes(f"passes other numbers to {_name(mine.func)} {rows}")
    for (shape, content), (its_shape, its_content) in zip(mine.made_of, its.made_of, strict=False):
        # One of another length may have a number for each row.
        if shape == its_shape and content != its_content:
            raise Mixes(f"makes a tensor of other numbers {rows}")
    if not all(are_alike(a, b, is_renumbered=is_renumbered) for a, b in zip(mine.sources, its.sources, strict=False)):
        raise Mixes(f"passes another tensor to {_name(mine.func)} {rows}")
    pairs = [*zip(mine.sizes, its.sizes, strict=True)]
    for first, second in zip(mine.shapes, its.shapes, strict=True):
        if len(first) != len(second):
            raise Mixes(f"gives {_name(mine.func)} other dimensions {rows}")
        pairs += zip(first, second, strict=True)
    if not all(_fits(a, b, num_mine, num_its) for a, b in pairs):
        raise Mixes(f"passes other sizes to {_name(mine.func)} {rows}")


def _fits(one: int, other: int, num_one: int, num_other: int) -> bool:
    if one == other:
        return True
    return one % num_one == 0 and other % num_other == 0 and one // num_one == other // num_other


def _name(func: Any) -> str:
    return str(func) if isinstance(func, OpOverload) else func.__name__


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or one != one)  # noqa: PLR0124 - not a number
