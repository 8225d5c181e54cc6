"""What a step that asks for its batches itself is handed: run again, it gets each as it was made, and not as the failed attempt has left it.

Making a batch is not done again. What it has changed of what the step reaches (a counter, a generator of random numbers that both draw from) is put back with
the rest at the step's beginning, and put in place anew when the batch is handed out again.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tightfit.effects.holders import Holder
from tightfit.effects.reachable.drawn import Drawn
from tightfit.effects.state import Snapshot, StateDifference, again, differences, restore, rewind, snapshot_of_arguments
from tightfit.guarding.state.copied_tensors import Copied


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DrawnItem:
    """`made`: the item when it was made, and what making it has left in what the step reaches. `copies` are of its tensors that steps write to."""

    made: Snapshot
    copies: Mapping[int, Copied]
    why_not: str
    """What making it has changed and cannot be changed anew without making it; empty if there is nothing."""
    _contents: Sequence[tuple[Holder, Any]]
    _positions: Sequence[tuple[Drawn, Any]]

    def changes(self) -> list[StateDifference]:
        """What has been changed of it since it was made."""
        return differences(self.made, again(self.made, reads_weights=False))

    def restore(self) -> None:
        """Makes it what it was when it was made."""
        restore(self.made)
        rewind(self.made)
        for copied in self.copies.values():
            copied.put()

    def put(self) -> None:
        """It is handed out again: changes what making it had changed."""
        for holder, content in self._contents:
            holder.put(content)
        for each, state in self._positions:
            put = each.put or each.rewind
            assert put is not None
            put(state)


def snapshot_of_item(item: Any, before: Sequence[Snapshot], after: Sequence[Snapshot]) -> Snapshot:
    """The item, and the objects that are new in what a step reaches."""
    new = [
        value
        for _, then, now in _changed(before, after)
        for value in _values(now)
        if not any(value is other for other in _values(then))
    ]
    return snapshot_of_arguments(
        {"a batch": item, "what came with a batch": new}, reads_weights=False, of_libraries=True
    )


def drawn_item(
    made: Snapshot, copies: Mapping[int, Copied], before: Sequence[Snapshot], after: Sequence[Snapshot]
) -> DrawnItem:
    """An item that was made between two snapshots of what a step reaches."""
    lost = (
        difference
        for one, other in zip(before, after, strict=True)
        for difference in differences(one, other)
        if difference.is_in_place and not difference.is_rewound
    )
    return DrawnItem(
        made=made,
        copies=copies,
        why_not=next((f"{each} while a batch was made" for each in lost), ""),
        _contents=[(holder, now) for holder, _, now in _changed(before, after)],
        _positions=list(_moved(before, after)),
    )


def _changed(before: Sequence[Snapshot], after: Sequence[Snapshot]) -> Iterator[tuple[Holder, Any, Any]]:
    for one, other in zip(before, after, strict=True):
        then = {holder.key: content for holder, content in zip(one.reach.holders, one.contents, strict=True)}
        for holder, content in zip(other.reach.holders, other.contents, strict=True):
            if holder.key in then and not holder.same(then[holder.key], content):
                yield holder, then[holder.key], content


def _moved(before: Sequence[Snapshot], after: Sequence[Snapshot]) -> Iterator[tuple[Drawn, Any]]:
    for one, other in zip(before, after, strict=True):
        then = {each.key: state for each, state in zip(one.reach.drawn, one.drawn, strict=True)}
        for each, state in zip(other.reach.drawn, other.drawn, strict=True):
            if (each.put or each.rewind) and each.key in then and then[each.key] != state:
                yield each, state


def _values(content: Any) -> Iterable[Any]:
    return content.values() if isinstance(content, dict) else content
