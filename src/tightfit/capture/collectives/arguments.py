"""The arguments of torch's operators for collectives, in one form: what kind it is, what is sent, what is received, and among whom.

`c10d` has the operators behind `torch.distributed`, which write to tensors of the program and return a `Work` (torch/csrc/distributed/c10d/Ops.cpp);
`_c10d_functional` those of DTensor and of `torch.distributed._functional_collectives`, which return new tensors (Functional.cpp).
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import OpOverload
from torch.distributed import distributed_c10d

from tightfit.tape import CollectiveKind as Kind

IN_PLACE = "c10d"
FUNCTIONAL = "_c10d_functional"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveForm:
    """How an operator names its arguments: those that are sent (a tensor, a list, or a list of lists), those that are received, and the rank that a
    collective with one has. `is_one_each`: what is received is in one tensor for each that is sent, side by side, and not in a list.
    """

    kind: Kind
    sent: str
    received: str
    peer: str = ""
    is_one_each: bool = True


_FORMS = {
    "allreduce_": CollectiveForm(kind=Kind.ALL_REDUCE, sent="tensors", received="tensors"),
    "allreduce_coalesced_": CollectiveForm(kind=Kind.ALL_REDUCE, sent="tensors", received="tensors"),
    "broadcast_": CollectiveForm(kind=Kind.BROADCAST, sent="tensors", received="tensors", peer="root_rank"),
    "reduce_": CollectiveForm(kind=Kind.REDUCE, sent="tensors", received="tensors", peer="root_rank"),
    "allgather_": CollectiveForm(
        kind=Kind.ALL_GATHER, sent="input_tensors", received="output_tensors", is_one_each=False
    ),
    "_allgather_base_": CollectiveForm(kind=Kind.ALL_GATHER, sent="input_tensor", received="output_tensor"),
    "allgather_coalesced_": CollectiveForm(
        kind=Kind.ALL_GATHER, sent="input_list", received="output_lists", is_one_each=False
    ),
    "allgather_into_tensor_coalesced_": CollectiveForm(kind=Kind.ALL_GATHER, sent="inputs", received="outputs"),
    "reduce_scatter_": CollectiveForm(
        kind=Kind.REDUCE_SCATTER, sent="input_tensors", received="output_tensors", is_one_each=False
    ),
    "_reduce_scatter_base_": CollectiveForm(kind=Kind.REDUCE_SCATTER, sent="input_tensor", received="output_tensor"),
    "reduce_scatter_tensor_coalesced_": CollectiveForm(kind=Kind.REDUCE_SCATTER, sent="inputs", received="outputs"),
    "alltoall_": CollectiveForm(
        kind=Kind.ALL_TO_ALL, sent="input_tensors", received="output_tensors", is_one_each=False
    ),
    "alltoall_base_": CollectiveForm(kind=Kind.ALL_TO_ALL, sent="input", received="output"),
    "gather_": CollectiveForm(
        kind=Kind.GATHER, sent="input_tensors", received="output_tensors", peer="root_rank", is_one_each=False
    ),
    "scatter_": CollectiveForm(
        kind=Kind.SCATTER, sent="input_tensors", received="output_tensors", peer="root_rank", is_one_each=False
    ),
    "send": CollectiveForm(kind=Kind.SEND, sent="tensors", received="", peer="dst"),
    "recv_": CollectiveForm(kind=Kind.RECEIVE, sent="", received="tensors", peer="src"),
    "recv_any_source_": CollectiveForm(kind=Kind.RECEIVE, sent="", received="tensors"),
    "barrier": CollectiveForm(kind=Kind.BARRIER, sent="", received=""),
    "monitored_barrier_": CollectiveForm(kind=Kind.BARRIER, sent="", received=""),
}
"""Of `c10d`."""

_FUNCTIONAL_KINDS = {
    "all_reduce": Kind.ALL_REDUCE,
    "all_gather_into_tensor": Kind.ALL_GATHER,
    "reduce_scatter_tensor": Kind.REDUCE_SCATTER,
    "all_to_all_single": Kind.ALL_TO_ALL,
    "broadcast": Kind.BROADCAST,
}
"""Of `_c10d_functional`, by the beginning of their names; `_coalesced` has lists, and `_` or `_out` at the end writes to an argument."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One call. `group` is the process group; `sent` and `received` are flat, for a list of lists its tensors one after another. `reduce` is the name of the reduction ("sum"), empty without one; `peer` a rank within
    the group, -1 without one; `sizes` are the numbers of rows that an all-to-all sends to each rank, and receives, empty where all are equal. `is_async`: it runs beside the stream that it was called on.
    """

    kind: Kind
    group: Any
    sent: tuple[torch.Tensor, ...]
    received: tuple[torch.Tensor, ...]
    is_one_each: bool
    reduce: str = ""
    peer: int = -1
    sizes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    is_async: bool = True

    @property
    def num_bytes(self) -> int:
        """The bytes of the whole buffer, as NCCL's own tests count them: what all ranks have gathered, what is reduced before it is scattered, else what
        is sent or received here.
        """
        return max(_num_bytes(self.sent), _num_bytes(self.received))


def operators() -> Iterator[OpOverload]:
    """The operators whose calls `collective_of` and `functional_of` read, as far as this release of torch has them."""
    names = [
        schema.name
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith((IN_PLACE, FUNCTIONAL + ":"))
    ]
    for name in dict.fromkeys(names):
        namespace, _, own = name.partition("::")
        if (namespace == IN_PLACE and own in _FORMS) or (namespace == FUNCTIONAL and functional_kind(own) is not None):
            yield getattr(getattr(torch.ops, namespace), own).default


def functional_kind(name: str) -> Kind | None:
    """The kind of an operator of `_c10d_functional`."""
    return next((kind for begin, kind in _FUNCTIONAL_KINDS.items() if name.startswith(begin)), None)


def bound(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by name, with its defaults."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    return {**defaults, **given, **kwargs}


def collective_of(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Collective:
    """The call of an operator of `c10d`."""
    values = bound(func, args, kwargs)
    form = _FORMS[func._schema.name.partition("::")[2]]
    reduce = values.get("reduce_op")
    return Collective(
        kind=form.kind,
        group=dist.ProcessGroup.unbox(values["process_group"]),
        sent=tuple(flat(values[form.sent])) if form.sent else (),
        received=tuple(flat(values[form.received])) if form.received else (),
        is_one_each=form.is_one_each,
        reduce="" if reduce is None else _name_of(reduce.op()),
        peer=int(values[form.peer]) if form.peer else -1,
        sizes=(tuple(values.get("input_split_sizes", ())), tuple(values.get("output_split_sizes", ()))),
        is_async=bool(values.get("async_op", True)),
    )


def functional_of(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Collective:
    """The call of an operator of `_c10d_functional` that has returned `out`."""
    values = bound(func, args, kwargs)
    kind = functional_kind(func._schema.name.partition("::")[2])
    assert kind is not None
    group: Any = values["group_name"]
    return Collective(
        kind=kind,
        group=distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group,  # pyrefly: ignore[bad-argument-type]
        sent=tuple(flat(values.get("input", values.get("inputs")))),
        received=tuple(flat(out)),
        is_one_each=True,
        reduce=values.get("reduce_op", ""),
        peer=values.get("src", -1),
        sizes=(tuple(values.get("input_split_sizes", ())), tuple(values.get("output_split_sizes", ()))),
    )


def _name_of(reduce: Any) -> str:
    names = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    return next((name.lower() for name in names if reduce == getattr(dist.ReduceOp, name)), "premul_sum")


def flat(values: Any) -> Iterator[torch.Tensor]:
    """The tensors of a tensor, a list of them, or a list of lists."""
    if isinstance(values, torch.Tensor):
        yield values
    else:
        for value in values:
            yield from flat(value)


def _num_bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
