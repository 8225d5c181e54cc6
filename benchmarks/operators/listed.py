"""torch's own lists of tests: for each operator and module a few inputs, small and odd ones (no elements, no dimensions, broadcast, strided).

They are part of an installed torch (`torch.testing._internal`) and need `pip install expecttest`.
"""

import dataclasses
import itertools
import os
import pickle
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

_MOST_INPUTS = 60
# What torch says of inputs that a call does not take.
REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, AttributeError)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of one operator: `run` with other tensors in the places of `tensors`, in their order."""

    name: str
    operator: Any
    leaves: tuple[Any, ...]
    tree: Any
    places: tuple[int, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The dense tensors that it is given."""
        return [self.leaves[place] for place in self.places]

    @property
    def settings(self) -> str:
        """What else it is given."""
        return str([leaf for leaf in self.leaves if not isinstance(leaf, torch.Tensor)])

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The result."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        first, args, kwargs = tree_unflatten(leaves, self.tree)
        return self.operator.op(first, *args, **kwargs)


def operators() -> list[tuple[str, Any]]:
    """Names, and what torch knows of them."""
    from torch.testing._internal.common_methods_invocations import op_db

    return sorted(
        (f"{each.name}.{each.variant_test_name}".removesuffix("."), each) for each in op_db
    )  # fmt: skip


def calls(name: str, operator: Any, most: int, dtype: torch.dtype = torch.float32, *, grad: bool = False) -> list[Call]:
    """At most `most` calls, spread over torch's list of inputs; none where the operator does not take that dtype."""
    if dtype not in operator.supported_dtypes("cpu"):
        return []
    inputs = list(itertools.islice(operator.sample_inputs("cpu", dtype, requires_grad=grad), _MOST_INPUTS))
    found = []
    for each in inputs[:: max(1, -(-len(inputs) // most))]:
        leaves, tree = tree_flatten((each.input, each.args, each.kwargs))
        places = [n for n, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.layout is torch.strided]
        found.append(Call(name=name, operator=operator, leaves=tuple(leaves), tree=tree, places=tuple(places)))
    return found


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a result, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def in_forks(
    names: Sequence[str], work: Callable[[str], list[Any]], seconds: int
) -> Iterator[tuple[str, list[Any] | str]]:
    """What `work` finds for each name, in a process of its own: some kernels of the host write past their memory where sizes do not agree. A text says how
    one has ended that did not return."""
    for name in names:
        with tempfile.NamedTemporaryFile() as file:
            child = os.fork()
            if not child:
                signal.alarm(seconds)
                code = 1
                try:
                    with open(file.name, "wb") as out:
                        pickle.dump(work(name), out)
                    code = 0
                finally:
                    os._exit(code)
            _, status = os.waitpid(child, 0)
            yield name, f"ended with status {status}" if status else pickle.loads(file.read())
