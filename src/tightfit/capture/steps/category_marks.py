"""Marks storages as parameters, gradients, optimizer state or activations, from what modules, optimizers and backward passes hold."""

import gc
import itertools
import weakref
from collections.abc import Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.steps.graph_nodes import nodes_behind
from tightfit.capture.steps.weak_sequence import WeakSequence
from tightfit.capture.steps.weight_copies import weight_copies
from tightfit.tape import Category


class CategoryMarks:
    """The optimizers and root modules of the program, and the marks of what they hold. What a program drops is freed, also while it is watched."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self.optimizers: WeakSequence[torch.optim.Optimizer] = WeakSequence()
        self.had_optimizers = False
        self.roots: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()
        self._gpu = gpu
        self._leaves: dict[int, weakref.ref[torch.Tensor]] = {}
        self._first_operator = 0
        self._has_copies = False

    def _mark(self, tensors: Iterable[torch.Tensor | None], category: Category) -> None:
        categories, index_of = self._gpu.recorder.storages["category"], self._gpu.storages.index_of
        for tensor in tensors:
            for part in () if tensor is None else _with_inner(tensor):
                index = index_of(part)
                if index is not None:
                    categories[index] = category

    def watch_leaves(self, losses: Iterable[torch.Tensor]) -> None:
        """A script without optimizers and modules has parameters too: the leaves that its gradients are accumulated in."""
        if self.optimizers or self.roots:
            return
        for node in nodes_behind(loss.grad_fn for loss in losses):
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                self._leaves.setdefault(id(leaf), weakref.ref(leaf))

    def parameters(self) -> Iterable[torch.Tensor]:
        """The parameters of the optimizers, of the modules that the program has called itself, and leaves without either.

        Those of an unrolled inner loop are no leaves: they are made of others in each turn, and torch warns where such a one is asked for its gradient.
        """
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]
        for module in list(self.roots.values()):
            yield from (p for p in module.parameters() if p.is_leaf)
        for reference in self._leaves.values():
            leaf = reference()
            if leaf is not None:
                yield leaf

    def mark_parameters(self) -> None:
        """Marks the parameters that the program is known to train or to call."""
        self._mark(self.parameters(), Category.PARAMETERS)

    def mark_gradients(self) -> None:
        """Marks the gradients of all parameters."""
        self._mark((p.grad for p in self.parameters()), Category.GRADIENTS)

    def mark_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Marks the states of an optimizer."""
        # Of the dict's own class: states that are kept in another form would be made ordinary ones by who asks their own class.
        values = itertools.chain.from_iterable(dict.values(s) for s in optimizer.state.values() if isinstance(s, dict))
        self._mark((v for v in values if isinstance(v, torch.Tensor)), Category.OPTIMIZER_STATE)

    def mark_all(self) -> None:
        """Marks the parameters of all modules that there are, copies of weights, the states of optimizers, and gradients."""
        # Models that are never called as a root hold parameters too: an average of the weights, a target
        # network. By their types, since `isinstance` asks objects for `__class__`, which runs code in proxies and lazy modules;
        # and by sets, since there are half a million objects.
        objects = gc.get_objects()
        kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.nn.Module)}
        modules = [o for o in objects if type(o) in kinds]
        del objects
        tables = itertools.chain.from_iterable(
            (m.__dict__.get("_parameters", {}), m.__dict__.get("_buffers", {})) for m in modules
        )
        self._mark((t for table in tables for t in table.values()), Category.PARAMETERS)
        if not self._has_copies:
            # They are older than the first backward pass.
            self._has_copies = True
            self._mark(list(weight_copies(self._gpu, list(self.roots.values()))), Category.PARAMETERS)
        self.mark_parameters()
        for optimizer in self.optimizers:
            self.mark_state(optimizer)
        self.mark_gradients()

    def begin_forward(self) -> None:
        """What is allocated from here on, and waits for a backward pass, is an activation."""
        self._first_operator = self._gpu.recorder.num_operators

    def mark_activations(self) -> None:
        """Marks what was allocated in a forward pass and is alive when the backward pass begins as activations."""
        recorder = self._gpu.recorder
        categories, operators = recorder.storages["category"], recorder.storages["operator"]
        alive = self._gpu.storages.indices()
        waiting = [i for i in alive if categories[i] == Category.TEMPORARIES and operators[i] >= self._first_operator]
        for index in waiting:
            categories[index] = Category.ACTIVATIONS


def _with_inner(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The tensors that hold the memory of a tensor that may be a wrapper."""
    if type(tensor) is not FakeTensor and is_traceable_wrapper_subclass(tensor):
        return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [tensor]
