"""Micro-batches of one step that do the same are traced twice in each step, and the tape repeated for the others.

A micro-batch is a call of a model and the backward pass from what it has returned. The next one is answered without running it where the last two have left
the same rows on the tape, and nothing that the model can read has changed since: no attribute, no random state of
the host, no weight that is trained or not, no shape. What the program does between, and the loss that it computes itself, is run as always, so the tape is that of
a trace that runs every batch, to the row. Where a batch that was answered turns out to go on otherwise, the trace is begun again and runs them all.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten

from tightfit.capture.dispatch.values.known_values import ToldValues
from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.steps.micro_batches.answered_batches import AnsweredBatches
from tightfit.capture.steps.micro_batches.answered_call import Layout, Returned, layout_of, returned_by
from tightfit.capture.steps.micro_batches.batch_state import BatchState
from tightfit.capture.steps.micro_batches.deferred_results import Gone
from tightfit.capture.steps.micro_batches.graph_entries import Edge, entries
from tightfit.capture.steps.micro_batches.micro_batch import BatchPlaces, Kept, MicroBatch, observed, order_of_frees
from tightfit.capture.steps.micro_batches.object_trees import PLAIN
from tightfit.capture.steps.micro_batches.repeated_rows import TapePlace, place_on
from tightfit.effects.state import Snapshot
from tightfit.effects.values.saved_hooks import top_saved_hooks

NUM_ALIKE = 2
"""So many micro-batches are traced in each step, and so many must have been alike."""

Key = tuple[Any, ...]


@dataclasses.dataclass(slots=True)
class _History:
    """The last micro-batch of `module` with one key that could be repeated, with its places, the state that it was run in, and the order in which its like has freed
    what it has kept; how many in a row were like it; and `num_calls` of the step with the number `step`.
    """

    module: weakref.ref[torch.nn.Module]
    last: MicroBatch | None = None
    places: BatchPlaces | None = None
    state: Snapshot | None = None
    order: tuple[Kept, ...] = ()
    num_alike: int = 0
    step: int = -1
    num_calls: int = 0


@dataclasses.dataclass(slots=True, kw_only=True)
class _Arguments:
    """The tensors that a call is given: their storages on the tape, and the known values, of which `told` knows what was read."""

    told: ToldValues
    values: tuple[bytes | None, ...]
    storages: tuple[int, ...]


@dataclasses.dataclass(slots=True, kw_only=True)
class _Open:
    """A call whose backward pass has not begun. Its nodes have the sequence numbers from `first_node` up to but not including `end_of_nodes`; `edges` are those of
    the tensors that it has returned with a node; `are_gone` is of the results that are not computed.
    """

    history: _History
    state: Snapshot
    randomness: bytes
    arguments: _Arguments
    begin: TapePlace
    end: TapePlace
    first_node: int
    end_of_nodes: int
    returned: Returned
    edges: tuple[Edge, ...]
    are_gone: tuple[Gone, ...]


class AlikeBatches:
    """Runs or answers the calls of root modules with gradients. `differs` ends the trace, which is begun again without this. `runs_all` says whether techniques
    were put on a model that may do something else in the last micro-batch of a step: then all are run.
    """

    def __init__(self, gpu: VirtualGpu, differs: Callable[[], NoReturn], runs_all: Callable[[], bool]) -> None:
        self._runs_all = runs_all
        self.answers = AnsweredBatches(gpu, differs)
        self._gpu = gpu
        self._histories: dict[Key, _History] = {}
        self._states: weakref.WeakKeyDictionary[torch.nn.Module, BatchState] = weakref.WeakKeyDictionary()
        self._open: _Open | None = None

    def call(self, module: torch.nn.Module, args: Any, kwargs: Any, step: int, run: Callable[[], Any]) -> Any:
        """The result of a call of `module` with gradients, in the step with that number; `run` runs it."""
        self.answers.settle()
        self._open = None
        leaves, structure = tree_flatten((args, kwargs))
        key = self._key(module, leaves, structure)
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # Whatever runs the call holds none of its arguments: the model may take them out of a list, and free them.
        del leaves
        if key is None:
            del given
            return run()
        history = self._histories.get(key)
        # Another module may have got the address of one that is gone.
        if history is None or history.module() is not module:
            history = self._histories[key] = _History(weakref.ref(module))
        if history.step != step:
            history.step, history.num_calls = step, 0
        history.num_calls += 1
        state = self._states.setdefault(module, BatchState(self._gpu.known_values))
        # In a program with one batch for a step nothing is ever repeated, and nothing looked at.
        if history.num_calls < NUM_ALIKE:
            state.begin_step(module)
            del given
            return run()
        values = tuple(self._value(tensor) for tensor in given)
        last, then = history.last, history.state
        if (
            last is not None
            and then is not None
            and min(history.num_alike, history.num_calls - 1) >= NUM_ALIKE
            and all(values[number] == value for number, value in last.values)
            and state.is_same(module, then)
        ):
            self._gpu.recorder.assume(
                self._gpu.attribution.where(),
                f"the micro-batches of a step are alike here: {NUM_ALIKE} of each step were traced, and repeated for the others",
            )
            return self.answers.call(last, history.order, given)
        arguments = _Arguments(told=ToldValues(given), values=values, storages=self.answers.storages_of(given))
        del given
        return self._trace(history, state, arguments, run)

    def begin_update(self) -> None:
        """An optimizer is about to step. What the program puts in the place of a part of its model behind it, the tape must have freed: no state is kept."""
        self.answers.settle()
        for state in self._states.values():
            state.forget()
        for history in self._histories.values():
            history.state = None

    def backward(self, roots: Sequence[Any], args: Sequence[Any], kwargs: Any, run: Callable[[], Any]) -> Any:
        """Runs a backward pass; with the arguments of `torch.autograd.graph._engine_run_backward` after its roots."""
        opened, self._open = self._open, None
        is_plain = not any(args[1:4]) and kwargs.get("accumulate_grad", True) and not _hooks_saved_tensors()
        if self.answers.is_waiting:
            return self.answers.backward(roots, run, is_plain=is_plain)
        if opened is None or not all(is_gone() for is_gone in opened.are_gone):
            return run()
        found = entries(roots, opened.first_node, opened.end_of_nodes) if is_plain else None
        if not found or not found.keys() <= set(opened.edges):
            return run()
        begins: list[TapePlace] = []
        layouts: dict[Edge, Layout | None] = {}

        def note(number: int, gradients: Sequence[torch.Tensor | None]) -> None:
            if not begins:
                begins.append(place_on(self._gpu.recorder))
            layouts.update({(number, n): None if g is None else layout_of(g) for n, g in enumerate(gradients)})

        for node in set(found.values()):
            node.register_prehook(functools.partial(note, node._sequence_nr()))
        # What a tensor that was returned gets from within the call is part of it.
        reached = [edge if edge in found else None for edge in opened.edges]
        # The graph is the program's alone.
        del node, found
        with self._listening(opened.arguments.told):
            out = run()
        if begins:
            self._compare(opened, begins[0], tuple(None if edge is None else layouts.get(edge) for edge in reached))
        return out

    def _key(self, module: torch.nn.Module, leaves: Sequence[Any], structure: Any) -> Key | None:
        """All but the state that a call depends on; None for one that is always run."""
        if self._runs_all():
            return None
        in_transform = torch._C._functorch.peek_interpreter_stack() is not None
        if torch.jit.is_tracing() or in_transform or self._gpu.has_side_streams or _hooks_saved_tensors():
            return None
        described = [_described(leaf) for leaf in leaves]
        parameters = list(module.parameters())
        # Weights that are no leaves, such as those of an unrolled inner loop, are others in each call.
        if None in described or any(map(_has_hooks, parameters)) or not all(p.is_leaf for p in parameters):
            return None
        storages = {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)}
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        modes = (autocast, torch.is_autocast_cache_enabled(), self._gpu.recorder.stream, *_settings())
        trained = tuple((parameter.requires_grad, parameter.grad is None) for parameter in parameters)
        line = self._gpu.attribution.line()
        return (id(module), line, len(storages), modes, trained, str(structure), *described)

    def _value(self, tensor: torch.Tensor) -> bytes | None:
        """The values of a tensor on the card, if they are known."""
        if not self._gpu.known_values.known(tensor):
            return None
        with torch._C._DisableTorchDispatch():
            return bytes(self._gpu.known_values.values(tensor).flatten().view(torch.uint8).numpy())

    @contextlib.contextmanager
    def _listening(self, told: ToldValues) -> Iterator[None]:
        self._gpu.known_values.told = told
        try:
            yield
        finally:
            self._gpu.known_values.told = None

    def _trace(
        self,
        history: _History,
        state: BatchState,
        arguments: _Arguments,
        run: Callable[[], Any],
    ) -> Any:
        module = history.module()
        assert module is not None
        before = state.snapshot(module)
        if before is None:
            return run()
        recorder, randomness = self._gpu.recorder, state.randomness()
        begin, first_node = place_on(recorder), torch.autograd._get_sequence_nr()
        with self._listening(arguments.told):
            result = run()
        end, end_of_nodes = place_on(recorder), torch.autograd._get_sequence_nr()
        found = returned_by(self._gpu, result, begin.storages)
        if found is None or state.randomness() != randomness or state.has_changed(module, before):
            return result
        returned, edges, are_gone = found
        self._open = _Open(
            history=history,
            state=before,
            randomness=randomness,
            arguments=arguments,
            begin=begin,
            end=end,
            first_node=first_node,
            end_of_nodes=end_of_nodes,
            returned=returned,
            edges=edges,
            are_gone=are_gone,
        )
        return result

    def _compare(self, opened: _Open, begin: TapePlace, gradients: tuple[Layout | None, ...]) -> None:
        """The backward pass of a call is over, whose part of it has begun at a place, with these gradients: what the micro-batch has done is compared with the one
        before."""
        recorder, history, told = self._gpu.recorder, opened.history, opened.arguments.told.told
        module = history.module()
        state = None if module is None else self._states.get(module)
        if module is None or state is None or told & ToldValues.DRAWN:
            return
        places = BatchPlaces(begin=opened.begin, end=opened.end, backward=begin, end_of_backward=place_on(recorder))
        read = tuple(
            (n, value) for n, value in enumerate(opened.arguments.values) if value is not None and told & 2 << n
        )
        batch = observed(recorder, places, opened.returned, opened.arguments.storages, read, gradients)
        if batch is None or state.randomness() != opened.randomness or state.has_changed(module, opened.state):
            return
        # What autocast keeps beyond the backward pass goes when its context ends, and not with the graph.
        if batch.kept and torch.is_autocast_enabled("cuda"):
            return
        order = None
        if history.last is not None and history.places is not None:
            order = order_of_frees(recorder, history.last, history.places)
        is_alike = batch == history.last and order is not None and (history.num_alike == 1 or order == history.order)
        history.num_alike = history.num_alike + 1 if is_alike else 1
        history.order = order or ()
        history.last, history.places, history.state = batch, places, opened.state


def _described(leaf: Any) -> Any:
    """All of an argument that a call can depend on, but for values; None if it is not known."""
    if isinstance(leaf, FakeTensor):
        if not leaf.is_cuda or leaf.layout != torch.strided or leaf.requires_grad or leaf.is_inference():
            return None
        return ("tensor", leaf.dtype, tuple(leaf.size()), leaf.stride(), int(leaf.storage_offset()))
    return ("plain", type(leaf), leaf) if isinstance(leaf, PLAIN) else None


def _settings() -> tuple[Any, ...]:
    """The settings of torch, and the modes that the program has entered, by which a call runs other operators."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return (
        *(torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()),
        *(cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        *(
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        *(torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
    )


def _has_hooks(parameter: torch.Tensor) -> bool:
    """Whether the program is told of the gradient of a weight."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _hooks_saved_tensors() -> bool:
    return top_saved_hooks() is not None
