"""What a walk has found of the state of a module's forward, and what it collects on its way."""

import dataclasses
import functools
import itertools
import operator
import weakref
from collections import OrderedDict, deque
from typing import Any

import torch

from tightfit.effects.code import Code
from tightfit.effects.holders import Holder, Items, Members, Names
from tightfit.effects.identities import identities
from tightfit.effects.reachable.drawn import Drawn
from tightfit.effects.reachable.many_items import left_out, many_items
from tightfit.effects.reachable.scripted import scripted_attributes

# Bounds for programs that keep a data set or a tokeniser on the model: a snapshot is taken in every call, and
# its cost must stay far below that of a block.
_MAX_OBJECTS = 20_000
_IN_GRAPH = object()


@dataclasses.dataclass(slots=True, kw_only=True)
class Reach:
    """The result of a walk. `contents` are those of the holders when last read."""

    holders: list[Holder] = dataclasses.field(default_factory=list)
    contents: list[Any] = dataclasses.field(default_factory=list)
    # Those of the holders that are dicts, by position, with their contents when last read: compared in one
    # pass, without a call for each.
    modules: list[weakref.ref[torch.nn.Module]] = dataclasses.field(default_factory=list)
    # Those of torch's classes are not walked: what they hold is large, and changed by every step.
    optimizers: list[weakref.ref[torch.optim.Optimizer]] = dataclasses.field(default_factory=list)
    dicts: list[dict[Any, Any]] = dataclasses.field(default_factory=list)
    others: list[int] = dataclasses.field(default_factory=list)
    values: tuple[Any, ...] = ()
    # The dicts of hooks in which there is none.
    empty: list[dict[Any, Any]] = dataclasses.field(default_factory=list)
    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    tensor_paths: list[str] = dataclasses.field(default_factory=list)
    drawn: list[Drawn] = dataclasses.field(default_factory=list)
    # Of `functools.cache`, with their paths: their contents cannot be inspected.
    caches: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    # What the code that was read is found by.
    code: Code = dataclasses.field(default_factory=Code)
    is_cut: bool = False
    """Whether there were more objects than a walk looks at."""
    names_outside: bool = False
    """Whether code of the region names something by which it may reach outside of the process's memory."""
    ends_by_hand: bool = False
    """Whether code of the region names something that it would have to end by itself, such as a lock: an exception in between leaves it as it is."""
    names_gradient_hooks: bool = False
    """Whether code of the region names something by which it may put a hook on a tensor or on a node of the graph."""
    has_graphs: bool = False
    """Whether a dict held a tensor with a graph when last read, or may have."""
    _identities: Any = None
    _weights: frozenset[int] | None = None
    _parameters: list[torch.nn.Parameter] | None = None

    def _mappings(self) -> list[dict[Any, Any]]:
        attributes = [vars(module) for module in [reference() for reference in self.modules] if module is not None]
        return attributes + self.dicts

    def remember(self) -> None:
        """Remembers the current contents of the dicts for `is_same`."""
        # A tensor with a graph is not kept: the dict then looks changed, and is looked at by itself.
        self.values = tuple(
            _IN_GRAPH if isinstance(value, torch.Tensor) and value.grad_fn is not None else value
            for mapping in self._mappings()
            for value in mapping.values()
        )
        self._identities = identities(self.values)
        self.has_graphs = any(map(operator.is_, self.values, itertools.repeat(_IN_GRAPH)))

    @property
    def weights(self) -> frozenset[int]:
        """The tensors that are trained, by `id`: a snapshot has their contents, where they are at the host."""
        if self._weights is None:
            self._weights = frozenset(id(tensor) for tensor in self.tensors if tensor.is_leaf and tensor.requires_grad)
        return self._weights

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Those of the tensors that are parameters."""
        if self._parameters is None:
            self._parameters = [tensor for tensor in self.tensors if isinstance(tensor, torch.nn.Parameter)]
        return self._parameters

    def is_same(self) -> bool:
        """Whether the dicts have the contents that they had when last read, and no hook was added."""
        if any(self.empty):
            return False
        now = tuple(itertools.chain.from_iterable(map(dict.values, self._mappings())))
        return bool(identities(now) == self._identities)


class Collected:
    """What a walk has found, and the objects that it has met. With `is_whole` more is read of long containers."""

    def __init__(self, *, is_whole: bool = False) -> None:
        self.found = Reach()
        self._is_whole = is_whole
        self._has_left_out = False
        # Where nobody asks whether the walk was cut, for `left_out`.
        self._left: list[Any] = []
        self._seen: set[int] = set()
        # Keeps visited objects alive during the walk: ids are only unique among live objects.
        self._alive: list[Any] = []

    def is_full(self) -> bool:
        """Whether so many objects were met that the walk ends."""
        return len(self._seen) > 4 * _MAX_OBJECTS

    def has_left_out(self) -> bool:
        """Whether there was more than was looked at."""
        return self._has_left_out or self.is_full()

    def hold(self, holder: Holder, *, is_other: bool = False) -> bool:
        """Adds a holder with its contents; whether there was room for it."""
        if len(self.found.holders) >= _MAX_OBJECTS:
            self._has_left_out = True
            return False
        if is_other:
            self.found.others.append(len(self.found.holders))
        self.found.holders.append(holder)
        self.found.contents.append(holder.content(is_kept=True))
        return True

    def hold_dict(self, path: str, value: dict[Any, Any], *, is_attributes: bool, keeps_graphs: bool = False) -> None:
        """Adds a dict."""
        get = functools.partial(_same, value)
        names = Names(path, id(value), get, is_attributes=is_attributes, keeps_graphs=keeps_graphs)
        # The order of an OrderedDict is not that of the dict inside, which the comparison in one pass would see.
        is_other = isinstance(value, OrderedDict) and not is_attributes
        is_held = self.hold(names, is_other=is_other)
        if is_held and not is_other:
            self.found.dicts.append(value)
        if not is_held:
            self.leave(value)

    def leave(self, value: Any) -> None:
        """Notes an object for which there is no room."""
        if not self._is_whole:
            self._left.append(value)

    def finish(self, path: str) -> None:
        """Has what was left out looked at as a whole, if anything was."""
        if self._left:
            self.found.drawn.append(left_out(path, self._left))

    def hold_container(self, path: str, value: Any) -> None:
        """Adds a dict, a list, a deque or a set; a tuple has what it has."""
        if isinstance(value, dict):
            self.hold_dict(path, value, is_attributes=False)
        elif isinstance(value, set):
            self.hold(Members(path, value), is_other=True) or self.leave(value)
        elif isinstance(value, list | deque):
            self.hold(Items(path, value, is_whole=self._is_whole), is_other=True) or self.leave(value)
        if (more := many_items(path, value)) is not None:
            self.found.drawn.append(more)

    def hold_attributes(self, path: str, module: torch.nn.Module) -> None:
        """Adds the attributes of a module, without keeping the module, and what a scripted one has outside of Python."""
        if (scripted := scripted_attributes(path, module)) is not None:
            self.found.drawn.append(scripted[0])
            for place, tensor in scripted[1].items():
                if self.is_new(tensor):
                    self.found.tensors.append(tensor)
                    self.found.tensor_paths.append(place)
        reference = weakref.ref(module)
        if self.hold(Names(path, id(module), lambda: _attributes(reference), is_attributes=True)):
            self.found.modules.append(reference)

    def is_new(self, value: Any) -> bool:
        """Whether an object is met for the first time."""
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        self._alive.append(value)
        return True


def _attributes(reference: "weakref.ref[torch.nn.Module]") -> dict[str, Any] | None:
    module = reference()
    return None if module is None else vars(module)


def _same(value: Any) -> Any:
    return value
