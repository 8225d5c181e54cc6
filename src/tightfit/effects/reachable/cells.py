"""Closure cells as holders: a variable that a function shares with the one around it."""

import types
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, final

from tightfit.effects.holders import Holder, Names


@final
class Cell(Holder):
    """A closure cell: a variable that a function shares with the enclosing one."""

    def __init__(self, path: str, cell: types.CellType) -> None:
        super().__init__(path, id(cell))
        self._cell = cell
        self._names = Names(path, id(cell), lambda: _Content(cell), only=("cell_contents",))

    def content(self, *, is_kept: bool) -> Any:
        return self._names.content(is_kept=is_kept)

    def is_still(self, content: Any) -> bool:
        # The common case without the dicts: large programs reach ten thousand cells.
        try:
            if self._cell.cell_contents is content["cell_contents"]:
                return True
        except (ValueError, KeyError):
            # It is, or was, empty.
            pass
        return super().is_still(content)

    def same(self, one: Any, other: Any) -> bool:
        return self._names.same(one, other)

    def changed(self, one: Any, other: Any) -> Iterable[str]:
        yield ""

    def with_replaced(self, content: Any, others: Mapping[int, Any]) -> Any:
        return self._names.with_replaced(content, others)

    def put(self, content: Any) -> None:
        self._names.put(content)


class _Content(MutableMapping[str, Any]):
    """A cell as a dict of at most one entry."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._cell.cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cell.cell_contents

    def __iter__(self) -> Iterator[str]:
        return (name for name in ("cell_contents",) if name in self)

    def __len__(self) -> int:
        return len(list(iter(self)))


def contents(cell: types.CellType) -> list[Any]:
    """What a cell holds: one value, or none yet."""
    return list(_Content(cell).values())
