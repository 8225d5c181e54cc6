"""The objects that an object refers to, each with what is written to get there: `.name`, `['key']`, `[-1]`. No code of the program runs for it."""

import collections
import functools
import gc
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

Edge = tuple[str, Any]

_ATOMS = (
    int,
    float,
    bool,
    str,
    bytes,
    bytearray,
    complex,
    type(None),
    range,
    slice,
    type(...),
    torch.dtype,
    torch.device,
    torch.Size,
)
_SKIPPED = (
    *(
        types.CodeType,
        types.BuiltinFunctionType,
        types.ModuleType,
        types.WrapperDescriptorType,
        types.GetSetDescriptorType,
    ),
    *(
        types.MemberDescriptorType,
        weakref.ref,
        weakref.ProxyType,
        weakref.CallableProxyType,
        types.GenericAlias,
        type(int | str),
    ),
)
_BUILT_IN = (dict, list, tuple, set, frozenset, collections.deque)
_WITHOUT_OTHERS = (*_BUILT_IN, types.FunctionType, types.MethodType)
# Tables of torch's modules, whose entries are attributes for whoever reads the path.
_TABLES = ("_parameters", "_buffers", "_modules")
# The tensors that a sparse one is made of, by its layout: methods that hand them out as they are.
_COMPRESSED_ROWS = ("crow_indices", "col_indices", "values")
_COMPRESSED_COLUMNS = ("ccol_indices", "row_indices", "values")
_PARTS_OF_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _COMPRESSED_ROWS,
    torch.sparse_bsr: _COMPRESSED_ROWS,
    torch.sparse_csc: _COMPRESSED_COLUMNS,
    torch.sparse_bsc: _COMPRESSED_COLUMNS,
}
_MAX_ELEMENTS = 50_000
_MAX_KEY = 40


def is_of(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """As isinstance, by the type alone: some objects run code of their own when they are asked for their class."""
    return issubclass(type(value), kinds)


def is_atom(value: Any) -> bool:
    """Whether a value refers to nothing that could be a tensor."""
    return is_of(value, _ATOMS)


class SlotNames:
    """The slots of classes, each class looked through once. It refers to the classes, so it is kept for one walk."""

    def __init__(self) -> None:
        # By identity: the class of a class may run code of its own for its hash.
        self._members: dict[int, tuple[type, list[tuple[str, types.MemberDescriptorType]]]] = {}

    def of(self, value: Any) -> dict[int, str]:
        """The names of the slots of an object, by the identity of what is there."""
        kind, found = type(value), dict[int, str]()
        if id(kind) not in self._members:
            self._members[id(kind)] = (kind, list(_members(kind)))
        for name, member in self._members[id(kind)][1]:
            try:
                found.setdefault(id(member.__get__(value, kind)), name)
            except AttributeError:  # not filled
                continue
        return found


def _members(kind: type) -> Iterator[tuple[str, types.MemberDescriptorType]]:
    for each in kind.__mro__:
        for name, member in vars(each).items():
            if is_of(member, types.MemberDescriptorType):
                yield name, member


def edges_of(value: Any, slots: SlotNames | None = None) -> Iterator[Edge]:
    """What `value` refers to; nothing for what is not a part of a program's data, such as modules, weak references and our own objects.

    `slots` are those of the classes that the same walk has met before.
    """
    if is_of(value, _SKIPPED) or is_atom(value):
        return
    if is_of(value, dict):
        yield from _of_dict(value)
    elif is_of(value, (list, tuple, collections.deque)):
        yield from _of_sequence(value)
    elif is_of(value, (set, frozenset)):
        yield from (("{...}", element) for element in list(value)[:_MAX_ELEMENTS])
    elif is_of(value, type):
        yield from _of_class(value)
        return
    elif is_of(value, types.FunctionType):
        yield from _of_function(value)
    elif is_of(value, types.MethodType):
        yield ".__self__", value.__self__
        yield "", value.__func__
    elif is_of(value, types.TracebackType):
        yield ".tb_next", value.tb_next
        yield from _of_frame(value.tb_frame)
        return
    elif is_of(value, functools.partial):
        yield from ((".args" + label, each) for label, each in _of_sequence(value.args))
        yield ".func", value.func
    elif is_of(value, np.ndarray):
        yield from _of_array(value)
    elif is_of(value, torch.Tensor):
        yield from _of_tensor(value)
    elif is_of(value, torch.nn.Module):
        yield from _of_module(value)
        return
    yield from _of_instance(value, slots or SlotNames())


def _of_dict(value: dict[Any, Any]) -> Iterator[Edge]:
    for at, (key, each) in enumerate(list(dict.items(value))):
        if at >= _MAX_ELEMENTS:
            return
        yield _key(key), each
        if not is_atom(key):
            yield ".keys()", key


def _key(key: Any) -> str:
    # Only of plain keys: the `repr` of another one would run code of the program.
    text = repr(key) if type(key) in (str, int, float, bool, bytes) else f"<{type(key).__name__}>"
    return f"[{text}]" if len(text) <= _MAX_KEY else f"[{text[:_MAX_KEY]}...]"


def _of_sequence(value: Any) -> Iterator[Edge]:
    last = len(value) - 1
    # The newest first: that is where what grows is.
    for at in range(last, max(-1, last - _MAX_ELEMENTS), -1):
        element = value[at]
        if not is_atom(element):
            # An append may be one step ahead of what is looked at.
            is_near_end = last - at < 2 and not is_of(value, tuple)
            yield (f"[{at - last - 1}]" if is_near_end else f"[{at}]"), element


def _of_array(value: np.ndarray[Any, Any]) -> Iterator[Edge]:
    """What the memory of an array is that of (`tensor.numpy()`), and what an array of objects holds; Python's collector asks neither."""
    yield ".base", np.ndarray.base.__get__(value)
    if value.dtype == object and value.size <= _MAX_ELEMENTS:
        yield "[...]", np.ndarray.tolist(value)


def _of_tensor(value: torch.Tensor) -> Iterator[Edge]:
    """Its gradient, and the tensors of a sparse one."""
    # Any other tensor warns when it is asked for its gradient.
    if (value.is_leaf or value.retains_grad) and value.grad is not None:
        yield ".grad", value.grad
    yield from ((f".{part}()", each) for part, each in parts_of_sparse(value))


def parts_of_sparse(value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The tensors that a sparse one is made of, by the methods that give them; none of another one, nor of one of the program's own class."""
    # Asked for its layout, a tensor of another class may run code of the program.
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return []
    parts = _PARTS_OF_SPARSE.get(value.layout, ())
    return [(part, getattr(value, part)()) for part in parts]


def _of_class(value: type) -> Iterator[Edge]:
    if str(vars(value).get("__module__", "")).partition(".")[0] == "tightfit":
        return
    for name, each in list(vars(value).items()):
        if not name.startswith("__") or is_of(each, (types.FunctionType, functools._lru_cache_wrapper)):
            yield f".{name}", each


def _of_function(value: types.FunctionType) -> Iterator[Edge]:
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            yield f".<closure>.{name}", cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from ((".__defaults__" + label, each) for label, each in _of_sequence(value.__defaults__ or ()))
    yield from ((f".__kwdefaults__{_key(name)}", each) for name, each in (value.__kwdefaults__ or {}).items())
    yield from ((f".{name}", each) for name, each in vars(value).items())


def _of_frame(frame: types.FrameType) -> Iterator[Edge]:
    """The local variables of a frame that has ended; one that is running is a root of its own, and asking for its locals would keep them."""
    running = sys._getframe()
    while running is not None and running is not frame:
        running = running.f_back  # type: ignore[assignment]
    if running is None:
        yield from ((f".<frame of {frame.f_code.co_name}>.{name}", each) for name, each in list(frame.f_locals.items()))


def _of_module(module: torch.nn.Module) -> Iterator[Edge]:
    for name, each in list(_attributes(module).items()):
        if name in _TABLES and is_of(each, dict):
            for key, inner in list(dict.items(each)):
                yield (f"[{key}]" if str(key).isdigit() else f".{key}"), inner
        else:
            yield f".{name}", each


def _of_instance(value: Any, of_classes: SlotNames) -> Iterator[Edge]:
    """Attributes, and whatever else an object of a C type refers to."""
    attributes = _attributes(value)
    seen = {id(attributes), id(type(value))}
    for name, each in list(attributes.items()):
        seen.add(id(each))
        yield f".{name}", each
    if is_of(value, _WITHOUT_OTHERS):
        return
    slots, is_tensor = of_classes.of(value), is_of(value, torch.Tensor)
    for each in gc.get_referents(value):
        if id(each) not in seen and not is_atom(each):
            name = "grad_fn" if is_tensor and each is value.grad_fn else slots.get(id(each), "")
            # What a cache of functools holds is behind a dict that has no name.
            yield (f".{name}" if name else ".<cached>" if _is_cache(value) else ""), each


def _is_cache(value: Any) -> bool:
    return is_of(value, functools._lru_cache_wrapper)


def _attributes(value: Any) -> dict[str, Any]:
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found if is_of(found, dict) else {}
