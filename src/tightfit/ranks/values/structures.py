"""The containers that arguments and outputs of a model come in, and their leaves, in one order."""

import copy
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def leaves_of(value: Any) -> Iterator[Any]:
    """What lists, tuples, mappings, dataclasses and namespaces hold, in their order; anything else is a leaf."""
    if isinstance(value, Mapping):
        held = value.values()
    elif isinstance(value, list | tuple):
        held = value
    elif (attributes := attributes_of(value)) is not None:
        held = attributes.values()
    else:
        yield value
        return
    for item in held:
        yield from leaves_of(item)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The fields of an object that is nothing but them, a dataclass or a namespace; None of others."""
    if type(value) is types.SimpleNamespace:
        return dict(vars(value))
    if not dataclasses.is_dataclass(value) or isinstance(value, type | Mapping | list | tuple):
        return None
    names = [field.name for field in dataclasses.fields(value)]
    # What it has computed of its fields would be of a part.
    if set(getattr(value, "__dict__", ())) - set(names) or not all(hasattr(value, name) for name in names):
        return None
    return {name: getattr(value, name) for name in names}


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure, of the same types, with `change` around each leaf."""
    if isinstance(value, Mapping):
        return _mapping(value, {key: mapped(item, change) for key, item in value.items()})
    if isinstance(value, list | tuple):
        kind: Callable[..., Any] = type(value)
        each = [mapped(item, change) for item in value]
        # Named tuples take their items one by one.
        return kind(*each) if hasattr(value, "_fields") else kind(each)
    attributes = attributes_of(value)
    if attributes is None:
        return change(value)
    return _object(value, {name: mapped(item, change) for name, item in attributes.items()})


def _mapping(value: Any, items: dict[Any, Any]) -> Any:
    # Outputs and batches of libraries are classes of their own, with attributes that the program may use.
    if type(value) is dict:
        return items
    if hasattr(value, "to_tuple"):
        return type(value)(**items)
    same = copy.copy(value)
    same.update(items)
    return same


def _object(value: Any, attributes: dict[str, Any]) -> Any:
    if isinstance(value, types.SimpleNamespace):
        return types.SimpleNamespace(**attributes)
    # Not by its constructor, which may check or compute.
    same = object.__new__(type(value))
    for name, item in attributes.items():
        object.__setattr__(same, name, item)
    return same
