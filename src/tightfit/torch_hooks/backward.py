"""Notifies owners (plans, recordings) of the backward passes that reach their parameters.

`torch.autograd` has no hook for the beginning of a backward pass, so its entry to the engine is replaced (`Replaced`). For each pass the graph is
walked from its roots to the leaves, until every owner is known to be concerned. Only those owners are called, around the pass; every other
pass runs as torch would have run it, with its arguments untouched.
"""

import dataclasses
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from tightfit.errors.faults import note
from tightfit.torch_hooks.manifest import ACCUMULATE_GRAD, GRAPH_TASK_ID, KEEPS_GRAPH, RUN_BACKWARD
from tightfit.torch_hooks.node_hooks import has_hooks
from tightfit.torch_hooks.replaced import Leave, Replaced

# The node that adds a gradient to a leaf. It alone has the leaf itself, as `variable`.
_AccumulateGrad: type = ACCUMULATE_GRAD.value()


class BackwardOwner(Protocol):
    """An object that is called around backward passes. It is held weakly: its user keeps it alive, and must keep it out of reference cycles through C++."""

    def concerned_parameters(self) -> Container[torch.Tensor] | None:
        """The leaf tensors whose gradients this owner handles, as a set or the keys of a dict; None for every pass of the process."""
        ...

    def around_backward(self, backward: "BackwardPass") -> Any:
        """Runs the pass by `backward.run()`, once, and returns its result."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackwardPass:
    """One call of the engine.

    `accumulates` is False for `torch.autograd.grad`, which returns gradients and adds them to nothing. `inputs` are the tensors or edges that
    alone get gradients; empty where all leaves do. A pass is nested when it runs inside another one, as in a recomputation; of a part when it
    runs in `of_a_part`; and shared when it reaches parameters of another owner as well.
    """

    roots: Sequence[Any]
    inputs: Sequence[Any]
    keeps_graph: bool
    creates_graph: bool
    accumulates: bool
    is_nested: bool
    is_of_part: bool
    is_shared: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    _owner: "weakref.ref[BackwardOwner]"
    _next: Callable[..., Any]
    _innermost: Callable[..., Any]

    def run(self, *, keeps_graph: bool | None = None) -> Any:
        """Runs the pass with its own arguments, except `keeps_graph` if it is given."""
        return self._next(*self._args(keeps_graph), **self.kwargs)

    def run_again(self, *, keeps_graph: bool | None = None, inputs: tuple[Any, ...] | None = None) -> Any:
        """Runs a pass that retained its graph once more, with the owners around it that it concerns by then, except the one that holds this pass.

        With `inputs`, only these leaves get gradients.
        """
        owners = [owner for owner in _REPLACED.owners() if owner is not self._owner()]
        args = self._args(keeps_graph)
        return _run(owners, self._innermost, args if inputs is None else (*args[:4], inputs, *args[5:]), self.kwargs)

    def leaves(self) -> list[torch.Tensor]:
        """The leaves that get a gradient, each once, except those that only a recomputation leads to."""
        return list(dict.fromkeys(_leaves(self.roots, self.inputs)))

    def nodes(self) -> Iterator[Any]:
        """The nodes of the graph, each once."""
        return nodes_behind(self.roots)

    def _args(self, keeps_graph: bool | None) -> tuple[Any, ...]:
        if keeps_graph is None or keeps_graph == self.keeps_graph:
            return self.args
        return (*self.args[:2], keeps_graph, *self.args[3:])


class _Parts(threading.local):
    """How many `of_a_part` this thread is inside of; another thread may train another model meanwhile."""

    number = 0


_PARTS = _Parts()


@contextmanager
def of_a_part() -> Iterator[None]:
    """Inside, backward passes are those of micro-batches of a pass that the program will run: their gradients are not yet the final ones."""
    _PARTS.number += 1
    try:
        yield
    finally:
        _PARTS.number -= 1


def keeps_graph() -> bool:
    """Whether the backward pass that is running retains its graph, so that it may be run once more."""
    # -1 outside of the engine, as torch/utils/module_tracker.py (`is_bw`) relies on too. Code that is not in a
    # pass has no graph that is about to be freed.
    return GRAPH_TASK_ID.call() == -1 or bool(KEEPS_GRAPH.call())


def leaves_with_hooked_accumulators() -> list[torch.Tensor]:
    """The leaves whose gradient accumulators have hooks, put on before anybody watched: they stay from step to step while something refers to the accumulator."""
    return [each.variable for each in gc.get_objects() if type(each) is _AccumulateGrad and has_hooks(each)]


def on_backward(owner: BackwardOwner) -> Leave:
    """Calls `owner` around the backward passes that concern it, until the returned function is called or the owner is collected.

    Of several owners that a pass concerns, the first to enter is the outermost, but those that want all passes are around the others.

    Raises:
        ApplyError: this torch has no such entry to the engine.
    """
    return _REPLACED.enter(owner)


def _put(inner: Callable[..., Any], owners: Callable[[], list[BackwardOwner]]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
        return _run(owners(), inner, args, kwargs)

    return _engine_run_backward


_REPLACED: Replaced[BackwardOwner] = Replaced(RUN_BACKWARD, _put)


def _run(owners: Sequence[BackwardOwner], inner: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    run = inner
    # Wrapped from the innermost outwards, so the owner that entered first sees the pass first and last.
    of_all, concerned = _concerned(owners, args)
    for owner in reversed([*of_all, *concerned]):
        run = functools.partial(_around, owner, run, inner, len(concerned) > 1)
    return run(*args, **kwargs)


def _around(
    owner: BackwardOwner,
    run: Callable[..., Any],
    innermost: Callable[..., Any],
    is_shared: bool,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    # torch/autograd/graph.py: the roots; torch/autograd/__init__.py: gradients, keep_graph, create_graph, inputs.
    backward = BackwardPass(
        roots=args[0],
        inputs=args[4],
        keeps_graph=bool(args[2]),
        creates_graph=bool(args[3]),
        accumulates=bool(kwargs.get("accumulate_grad")),
        # Reentrant checkpointing runs a pass of its own inside a node of the outer one (torch/utils/checkpoint.py,
        # `CheckpointFunction.backward`): an owner must not take that for the program's pass.
        is_nested=GRAPH_TASK_ID.call() != -1,
        is_of_part=bool(_PARTS.number),
        is_shared=is_shared,
        args=args,
        kwargs=kwargs,
        # A pass may be kept to be run again; it must not keep a dropped model alive.
        _owner=weakref.ref(owner),
        _next=run,
        _innermost=innermost,
    )
    try:
        return owner.around_backward(backward)
    except Exception as error:
        # A fault of ours; the program may swallow it.
        note(error, "the run")
        raise


def _concerned(
    owners: Sequence[BackwardOwner], args: tuple[Any, ...]
) -> tuple[list[BackwardOwner], list[BackwardOwner]]:
    """The owners that want all passes, and the owners whose parameters this one reaches, from the outermost to the innermost."""
    wanted = [(owner, owner.concerned_parameters()) for owner in owners]
    of_all = [owner for owner, parameters in wanted if parameters is None]
    missing = [(owner, parameters) for owner, parameters in wanted if parameters is not None]
    found: set[int] = set()
    leaves = _leaves(args[0], args[4])
    # The walk is lazy: it ends at the first leaf of each owner. Only a pass of a model without an owner is
    # walked to its end (docs/adr/0007).
    while missing and (leaf := next(leaves, None)) is not None:
        found.update(id(owner) for owner, parameters in missing if leaf in parameters)
        missing = [(owner, parameters) for owner, parameters in missing if id(owner) not in found]
    return of_all, [owner for owner in owners if id(owner) in found]


def _leaves(roots: Collection[Any], inputs: Collection[Any]) -> Iterator[torch.Tensor]:
    """The leaves that get a gradient: of `inputs` those that are leaves, or all that the graph leads to."""
    if inputs:
        yield from (leaf for leaf in map(_leaf, inputs) if leaf is not None)
        return
    # In `weight.backward(gradient)` the root is a leaf itself, and there is no node to find it by.
    yield from (root for root in roots if isinstance(root, torch.Tensor) and root.grad_fn is None)
    yield from (node.variable for node in nodes_behind(roots) if isinstance(node, _AccumulateGrad))


def nodes_behind(roots: Collection[Any]) -> Iterator[Any]:
    """The nodes of the graph behind `roots`, tensors or nodes, each once."""
    # An explicit stack, as recurrent models have graphs deeper than Python's recursion limit.
    waiting = [node for node in map(_node, roots) if node is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _leaf(given: Any) -> torch.Tensor | None:
    if isinstance(given, torch.Tensor):
        return given if given.grad_fn is None else None
    # What is neither a tensor nor its leaf is a `torch.autograd.graph.GradientEdge`, which `inputs=` takes too.
    return given.node.variable if isinstance(given.node, _AccumulateGrad) else None


def _node(root: Any) -> Any:
    return root.grad_fn if isinstance(root, torch.Tensor) else root.node
