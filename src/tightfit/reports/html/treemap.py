"""Memory at the peak as a tree: by module where modules are known, else by the user's calls, for a treemap to descend."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from tightfit.reports.blocks_by_site import line_and_function, split_frame, stack_of, user_path
from tightfit.simulate.history import CATEGORIES, History

OUTSIDE = "outside of modules"
_MAX_CALLS = 24


@dataclasses.dataclass(slots=True, kw_only=True)
class TreemapNode:
    """A part of the allocated memory: a module with its class (where that is known), a call, or blocks of one category.

    `category` is -1 for what has parts; `held` has the bytes of each category in it.
    """

    name: str
    module_class: str = ""
    category: int = -1
    num_bytes: int = 0
    num_blocks: int = 0
    held: dict[int, int] = dataclasses.field(default_factory=dict)
    parts: dict[tuple[str, int], "TreemapNode"] = dataclasses.field(default_factory=dict)

    @property
    def label(self) -> str:
        """`mlp: GPT2MLP`, as torch prints modules, or the name alone."""
        return f"{self.name}: {self.module_class}" if self.module_class not in ("", self.name) else self.name

    @property
    def main_category(self) -> int:
        """Which category holds most of it; -1 for nothing."""
        return max(self.held, key=lambda category: self.held[category], default=-1)

    def add(self, path: Sequence[tuple[str, int]], held: dict[int, int], num_blocks: int) -> None:
        """Counts blocks here and in the parts that `path` names."""
        node = self
        node.count(held, num_blocks)
        for name, category in path:
            node = node.parts.setdefault((name, category), TreemapNode(name=name, category=category))
            node.count(held, num_blocks)

    def with_classes(self, classes: Mapping[str, str], path: str = "") -> None:
        """Gives each module in it its class, by its path."""
        for part in self.parts.values():
            inner = f"{path}.{part.name}" if path else part.name
            if part.category < 0:
                part.module_class = classes.get(inner, "")
                part.with_classes(classes, inner)

    def count(self, held: dict[int, int], num_blocks: int) -> None:
        """Counts `num_blocks` blocks that hold so many bytes of each category."""
        self.num_blocks += num_blocks
        for category, num_bytes in held.items():
            self.num_bytes += num_bytes
            self.held[category] = self.held.get(category, 0) + num_bytes

    def pruned(self, min_bytes: int) -> "TreemapNode":
        """The same with parts below `min_bytes` taken together, and a part that is its whole's only one joined to it."""
        large = [part.pruned(min_bytes) for part in self.parts.values() if part.num_bytes >= min_bytes]
        small = [part for part in self.parts.values() if part.num_bytes < min_bytes]
        if len(large) == 1 and not small and large[0].parts and self.name:
            return dataclasses.replace(large[0], name=_joined(self.name, large[0].name))
        if len(small) == 1 and large:
            large += small
        elif small and large:
            rest = TreemapNode(name=f"{len(small)} smaller parts")
            for part in small:
                rest.count(part.held, part.num_blocks)
            large.append(rest)
        large.sort(key=lambda part: -part.num_bytes)
        # Not by category: parts that were joined may have come to be of one name.
        parts = {(part.name, i): part for i, part in enumerate(large)}
        return dataclasses.replace(self, parts=parts)


def peak_tree(history: History, min_share: float) -> TreemapNode:
    """The blocks that live at the peak; parts of less than `min_share` of the whole are taken together."""
    blocks = history.blocks
    alive = history.alive_at(history.peak_event)
    rows = np.stack([blocks.module[alive], blocks.stack[alive], blocks.category[alive]])
    groups, group = np.unique(rows, axis=1, return_inverse=True)
    num_bytes = np.bincount(group.ravel(), blocks.block_bytes[alive], groups.shape[1]).astype(np.int64)
    num_blocks = np.bincount(group.ravel(), minlength=groups.shape[1])
    has_modules = any(module >= 0 and history.modules[module] for module in groups[0].tolist())
    root = TreemapNode(name="")
    for (module, stack, category), size, number in zip(
        groups.T.tolist(), num_bytes.tolist(), num_blocks.tolist(), strict=True
    ):
        name = history.modules[module] if module >= 0 else ""
        if name:
            path = _module_path(name, stack_of(history, stack), category)
        else:
            path = _call_path(stack_of(history, stack), category, [OUTSIDE] if has_modules else [])
        root.add(path, {category: size}, number)
    root.with_classes(history.module_classes)
    return root.pruned(max(1, round(root.num_bytes * min_share)))


def _module_path(module: str, stack: tuple[str, ...], category: int) -> list[tuple[str, int]]:
    line, function = line_and_function(stack)
    own = function or line or CATEGORIES[category]
    return [*((part, -1) for part in module.split(".", _MAX_CALLS)), (own, category)]


def _call_path(stack: tuple[str, ...], category: int, above: list[str]) -> list[tuple[str, int]]:
    """By the user's calls from the outermost; what has no stack is told apart by category alone."""
    calls = [_short(frame) for frame in user_path(stack)[-_MAX_CALLS:]]
    parts = [*above, *calls[:-1]]
    last = calls[-1] if calls else CATEGORIES[category].replace("_", " ")
    return [*((part, -1) for part in parts), (last, category)]


def _joined(outer: str, inner: str) -> str:
    """`model.layers` for modules; of calls, which are longer, the inner one."""
    return f"… {inner.removeprefix('… ')}" if ":" in outer or ":" in inner else f"{outer}.{inner}"


def _short(frame: str) -> str:
    line, function = split_frame(frame)
    return f"{line.rpartition('/')[2]} {function.removeprefix('aten.')}".strip()
