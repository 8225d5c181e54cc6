"""Decides whether a module (or a function of tensors) may be run on parts of one dimension of its inputs: the proof and further conditions.

Besides what `row_flow` proves of the operators: there are no side effects, no user hook sees the parts, no autograd function is the
user's own, and gradients flow only to the inputs and the parameters.
"""

import contextlib
import dataclasses
import functools
import logging
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn.modules import module as of_all
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from tightfit.effects.ambient import takes_saved_tensor_hooks
from tightfit.effects.global_settings import cached_weights_as_they_are
from tightfit.effects.independence import indexing_rules, product_rules  # noqa: F401 - enter their rules
from tightfit.effects.independence.functions import Functions
from tightfit.effects.independence.left_behind import Left, depends_on_rows
from tightfit.effects.independence.left_tensors import LeftTensor
from tightfit.effects.independence.operations import GIVEN, are_alike, compare
from tightfit.effects.independence.row_flow import FakeRun, Flow, NeedsValues
from tightfit.effects.independence.row_states import key_of
from tightfit.effects.independence.rows import Mixes, RowLayout, Unsteady
from tightfit.effects.independence.rules import RULES
from tightfit.effects.outside_calls import Unwatched
from tightfit.effects.state import RegionState, restore
from tightfit.effects.users_code import is_users_class, is_users_file
from tightfit.effects.values.copied_buffers import in_copies
from tightfit.errors.faults import is_ours

_OF_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", *_OF_BACKWARD)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FollowedRun:
    """The run with all rows, its inputs and its result, and the results of runs with fewer rows by their number; and the tensors that it has left where they can be reached. The nodes of
    its graph have autograd's numbers from `first_node` on."""

    flow: Flow
    inputs: Sequence[torch.Tensor]
    result: Any
    of_parts: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    first_node: int = 0
    left: Sequence[LeftTensor] = ()


class Leaves(Mixes):
    """A side effect that does not depend on the rows, such as a cache that the first call fills: `proof` holds for that call, and later calls need
    another proof."""

    def __init__(self, message: str, proof: FollowedRun, *, is_of_draws: bool, is_steady: bool) -> None:
        super().__init__(message)
        self.is_steady = is_steady
        self.proof = proof
        # Whether nothing else was left than generators that were drawn from, as often for any number of rows.
        self.is_of_draws = is_of_draws


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """The subject of a proof: `call(inputs)`, where `dims` has for each of `inputs` the dimension of its rows, or None.

    `module` is the module that it runs, which with `writes_buffers` may write to its buffers what is the same for any rows; `around` a context for each run, whose value is passed to `call` too.
    """

    call: Callable[..., Any]
    inputs: Sequence[torch.Tensor]
    dims: Sequence[int | None]
    module: torch.nn.Module
    is_contiguous: bool = False
    allows_randomness: bool = False
    allows_votes: bool = False
    shares_draws: bool = False
    joins_left: bool = False
    writes_buffers: bool = False
    around: Callable[[FakeRun], contextlib.AbstractContextManager[Any]] = lambda _: contextlib.nullcontext()


class Unfollowed(Mixes):
    """The run ended with an error of its own, or fake tensors cannot replace the tensors that it works on."""


def prove(subject: Computation, num_rows: int, parts: Iterable[int], reads: Sequence[Any] | None = None) -> FollowedRun:
    """Runs the subject on fake tensors with each of these numbers of rows.

    Raises:
        Mixes: it is not proved that parts give what the whole gives.
        NeedsValues: it reads values, and there are no `reads`.
    """
    # Parts of every length that will run: a last part that is shorter may take another path in Python.
    sizes = sorted({size for size in parts if size != num_rows}) or [max(1, num_rows // 2)]
    if num_rows < 2:
        raise Mixes("has one row, and cannot be split")
    tensors = [*subject.inputs, *subject.module.parameters(), *subject.module.buffers()]
    first_node = torch.autograd._get_sequence_nr()
    settings = {
        "fake": _fake_mode_for(tensors),
        "device": next((device for t in tensors if (device := _device(t)).type != "cpu"), None),
        "reads": reads,
        "allows_randomness": subject.allows_randomness,
        "allows_votes": subject.allows_votes,
        "shares_draws": subject.shares_draws,
    }
    runs = [FakeRun(size, **settings) for size in sizes]
    flow = Flow(num_rows, runs[0], RULES, **settings)
    try:
        inputs, result, of_parts, lefts = _followed(subject, runs, flow)
    except (Leaves, Unfollowed):
        raise
    except Mixes as error:
        _check_steady(subject, runs[0], FakeRun(sizes[0], **settings), num_rows, error)
        raise
    proof = FollowedRun(flow=flow, inputs=inputs, result=result, of_parts=of_parts, first_node=first_node)
    left = lefts[-1]
    told = next((str(each) for each in lefts if str(each)), "")
    if told:
        why = depends_on_rows(flow, lefts, joins_left=subject.joins_left)
        if why:
            # What is written past torch only a proof sees, and no snapshot of a call.
            kind = Unsteady if any(each.is_in_place for each in left.found) else Mixes
            raise kind(f"{why} in a forward, and each part would see what the part before it left")
        is_of_draws = all(each.is_of_draws() for each in lefts)
        proof = dataclasses.replace(proof, left=left.tensors)
        raise Leaves(
            f"{told} in a forward, which would happen once for each part",
            proof,
            is_of_draws=is_of_draws,
            is_steady=left.is_steady(),
        )
    return proof


def _followed(
    subject: Computation, runs: Sequence[FakeRun], flow: Flow
) -> tuple[Sequence[torch.Tensor], Any, dict[int, Any], list[Left]]:
    """The inputs and the result of `flow`, the results of the others by their numbers of rows, and what each has left, that of `flow` at last."""
    lefts, of_parts = list[Left](), dict[int, Any]()
    for run in runs:
        _, of_parts[run.num_rows], left = _run(subject, run, flow.num_rows)
        lefts.append(left)
        with Unwatched():
            compare(runs[0], run)
            _compare_results(run, of_parts[run.num_rows], runs[0], of_parts[runs[0].num_rows])
    inputs, result, left = _run(subject, flow, flow.num_rows)
    with Unwatched():
        for run in runs:
            compare(flow, run)
            _compare_results(flow, result, run, of_parts[run.num_rows])
    return inputs, result, of_parts, [*lefts, left]


def _check_steady(subject: Computation, first: FakeRun, again: FakeRun, num_rows: int, error: Mixes) -> None:
    """Raises Unsteady in the place of `error` where a run with as many rows as the first differs from it: by something that is restored for no run."""
    # An operator was inserted that one row leaves out.
    if first.num_inserted:
        return
    with contextlib.suppress(Mixes, NeedsValues):
        _run(subject, again, num_rows)
    try:
        with Unwatched():
            compare(first, again)
    except Mixes:
        raise Unsteady(
            f"does something else in every run, because of state that cannot be restored ({error})"
        ) from None


def _compare_results(one: FakeRun, result: Any, other: FakeRun, its: Any) -> None:
    """Raises Mixes where two runs return results of other operators. Other numbers of results are the caller's matter."""
    is_renumbered = bool(one.num_inserted or other.num_inserted)
    for pair in zip(tree_leaves(result), tree_leaves(its), strict=False):
        if not all(isinstance(each, torch.Tensor) for each in pair):
            continue
        if not are_alike(one.sources.of(pair[0]), other.sources.of(pair[1]), is_renumbered=is_renumbered):
            raise Mixes(f"returns another result for {one.num_rows} rows than for {other.num_rows}")


def _run(subject: Computation, run: FakeRun, num_rows: int) -> tuple[Sequence[torch.Tensor], Any, Left]:
    """The inputs, the result, and the state that was changed."""
    with (
        _as_it_was(subject.module) as left,
        _buffers_in_copies(subject, run),
        # With gradients, since code asks for them (`requires_grad`, `is_grad_enabled`), and `check_graph` walks
        # the graph.
        torch.enable_grad(),
        _without_modes(),
        _uncompiled(),
        _without_cache(),
        cached_weights_as_they_are(),
        _remembers_calls(run.fake),
        _quiet(),
        _saved_by_number(),
    ):
        inputs = [
            _input(run, t, d, num_rows, subject.is_contiguous)
            for t, d in zip(subject.inputs, subject.dims, strict=True)
        ]
        run.given = [tuple(tensor.shape) for tensor in inputs]
        run.sources.name([*left.tensors_before, *subject.module.parameters(), *subject.module.buffers()], "outside")
        run.sources.name(inputs, GIVEN)
        result: Any = None
        try:
            with subject.around(run) as context, Functions(run, ATOMS), run:
                result = subject.call(inputs) if context is None else subject.call(inputs, context)
        except (Mixes, NeedsValues):
            raise
        except DynamicOutputShapeException as error:
            raise Mixes(f"{error.func} has a size that depends on values{_line(error)}{_instead(error.func)}") from None
        except UnsupportedOperatorException as error:
            raise Mixes(f"{error.func} cannot be followed{_line(error)}") from None
        except Exception as error:
            if is_ours(error):
                raise
            if run.failure is None:
                raise Unfollowed(
                    f"it cannot be followed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                ) from error
        if run.failure is not None:
            raise run.failure
    return inputs, result, left


def _instead(func: Any) -> str:
    """What to do in place of an operator whose size depends on values, as the end of a sentence."""
    if "pack" in str(func):
        return ": give the layer the padded batch, and pick what it returns at each length by gather"
    return ": keep all rows, and choose by torch.where or by a product with a mask"


def _line(error: BaseException) -> str:
    places = [f for f in traceback.extract_tb(error.__traceback__) if is_users_file(f.filename)]
    return f" at {places[-1].filename.rpartition('/')[2]}:{places[-1].lineno}" if places else ""


def _input(run: FakeRun, tensor: torch.Tensor, dim: int | None, num_rows: int, is_contiguous: bool) -> torch.Tensor:
    if dim is None:
        return tensor
    strides = (
        # An expanded input has strides of 0, which no pattern of rows describes: it is laid out densely, as a
        # part of it would be.
        tensor.stride()
        if all(tensor.stride()) and not is_contiguous
        else torch.empty(tensor.shape, device="meta").stride()
    )
    with run.fake:
        made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=_device(tensor))
        if run.num_rows != num_rows:
            made = made.narrow(dim, 0, run.num_rows)
            made = dense(made) if is_contiguous else made
    if isinstance(run, Flow):
        run.rows.put(made, RowLayout(dim=dim))
    return made.requires_grad_(tensor.requires_grad or (is_contiguous and made.is_floating_point()))


def dense(part: torch.Tensor) -> torch.Tensor:
    """`part`, laid out as a tensor of its shape that is made anew.

    A part of a sequence in a batch of one is contiguous as it is, with the stride of the whole in its first dimension. Some operators look at that:
    a product with a frozen weight becomes one of batches (`should_fold` in ATen/native/LinearAlgebra.cpp), another kernel with other sums.
    """
    part = part.contiguous()
    return part.view(-1).view(part.shape) if 1 in part.shape else part


def _device(tensor: torch.Tensor) -> torch.device:
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


@contextlib.contextmanager
def _buffers_in_copies(subject: Computation, run: FakeRun) -> Iterator[None]:
    """Lets the subject write to copies of its buffers.

    Raises:
        Mixes: what it has written may depend on the rows.
    """
    if not subject.writes_buffers:
        yield
        return
    with in_copies(subject.module) as copied:
        run.may_write = dict.fromkeys(map(key_of, copied.tensors), "")
        yield
    if isinstance(run, Flow):
        for tensor, told in run.written(copied.tensors):
            if run.rows.depends(tensor):
                raise Mixes(told)


@contextlib.contextmanager
def _as_it_was(module: torch.nn.Module) -> Iterator[Left]:
    """Restores the state that the module can reach. The yielded object then has what was changed, if anything."""
    state, left = RegionState(), Left()
    before = state.snapshot(module, reads_all=True)
    left.tensors_before = before.reach.tensors
    caches = [(path, cache, cache.cache_info().misses) for path, cache in before.reach.caches]
    # Factories on the host draw for real, and the program's own draws must not be moved.
    generator = torch.get_rng_state()
    try:
        yield left
    finally:
        left.take(before, state.snapshot(module, reads_all=True))
        restore(before)
        for path, cache, misses in caches:
            if cache.cache_info().misses != misses:
                # Its entries from this run may be fake tensors, which a real run must not find.
                cache.cache_clear()
                left.filled.append(f"{path} was filled")
        torch.set_rng_state(generator)


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Runs compiled functions as they are written: torch would remember to skip the code that it meets among fake tensors, also in real runs."""
    # In a trace `torch._dynamo` alone may be a stand-in (`capture/patches/eager`): nothing is compiled then.
    is_there = "torch._dynamo.eval_frame" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_there else contextlib.nullcontext()


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Switches autocast's cache off, which would retain fake weights."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def _saved_by_number() -> Iterator[None]:
    """Hides tensors saved for backward from a checkpoint around this code. A node has their numbers: one that had its own result would keep itself."""
    if not takes_saved_tensor_hooks():
        yield
        return
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> int:
        saved.append(tensor)
        return len(saved) - 1

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, saved.__getitem__):
            yield
    finally:
        saved.clear()


@contextlib.contextmanager
def _remembers_calls(fake: FakeTensorMode) -> Iterator[None]:
    """Has fake tensors remember calls: blocks that are alike, and runs with other rows, repeat them. The virtual GPU has a cache of its own in its stead,
    which is not in use here."""
    before = fake.cache_enabled
    fake.cache_enabled = True
    try:
        yield
    finally:
        fake.cache_enabled = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's log of what fake tensors cannot do, and warnings, which the real run gives as well."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = before


def check_hooks(module: torch.nn.Module, *, is_inside: bool = True, allows_forward: bool = False) -> None:
    """Raises Mixes if a module inside `module` (or, without `is_inside`, that itself) has a user hook, which would see parts; with `allows_forward`, one of a backward pass."""
    for name, part in module.named_modules():
        if part is module and is_inside:
            continue
        for kind in _OF_BACKWARD if allows_forward else _HOOKS:
            for hook in getattr(part, kind).values():
                if not _is_of_library(hook):
                    raise Mixes(f"{name or type(part).__name__} has a hook, which would see parts")
    if are_all_hooked_backward():
        raise Mixes("all modules have a backward hook, which would see parts")


def are_all_hooked_backward() -> bool:
    """Whether the program has put a hook on the backward passes of all modules (`register_module_full_backward_hook`), which a proof without one does not meet."""
    return _are_of_program((*of_all._global_backward_hooks.values(), *of_all._global_backward_pre_hooks.values()))


def are_all_hooked_forward() -> bool:
    """Whether the program has put a hook on the forwards of all modules (`register_module_forward_hook`)."""
    return _are_of_program((*of_all._global_forward_hooks.values(), *of_all._global_forward_pre_hooks.values()))


def _are_of_program(hooks: Iterable[Any]) -> bool:
    return not all(map(_is_of_library, hooks))


def _is_of_library(hook: Any) -> bool:
    function = hook.func if isinstance(hook, functools.partial) else hook
    function = function.__func__ if isinstance(function, types.MethodType) else function
    if isinstance(function, types.FunctionType):
        return not is_users_file(function.__code__.co_filename)
    return not is_users_class(type(function))


def check_graph(result: Any, allowed: Iterable[torch.Tensor], *, since: int | None = None) -> set[int]:
    """The `id` of each leaf that gradients flow to from `result`. With `since`, a number of autograd's, other leaves are allowed, but no nodes that are older.

    Raises:
        Mixes: they flow to other leaves than `allowed`, or through a user's own autograd function.
    """
    known = {id(tensor) for tensor in allowed}
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    reached = {id(leaf) for leaf in leaves if leaf.is_leaf and leaf.requires_grad}
    if reached - known:
        raise Mixes("it returns a leaf tensor that is not its own")
    waiting = [leaf.grad_fn for leaf in leaves]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            reached.add(id(variable))
            if id(variable) not in known and since is None:
                raise Mixes("gradients flow through it to tensors that are not its own")
        elif since is not None and node._sequence_nr() < since:
            raise Mixes(
                "gradients flow through it to a tensor computed before it (a weight made of other weights): compute "
                "that tensor within its forward"
            )
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            function: type = vars(type(node))["_forward_cls"]
            if function is torch.utils.checkpoint.CheckpointFunction:
                raise Mixes("it uses a reentrant checkpoint, which does not support backward passes to selected inputs")
            if is_users_class(function):
                raise Mixes(f"its backward pass is that of {function.__name__}, a custom autograd function")
        waiting.extend(following for following, _ in node.next_functions)
    return reached


def _one_hot(flow: Flow, tensor: torch.Tensor, num_classes: int = -1) -> RowLayout | None:
    if num_classes < 0:
        raise Mixes("has a size that depends on values")
    return flow.rows.layout(tensor)


def _embedding_bag(
    flow: Flow,
    indices: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    *others: Any,
    per_sample_weights: torch.Tensor | None = None,
    scale_grad_by_freq: bool = False,
    **_: Any,
) -> RowLayout | None:
    """Each row of indices is a bag; bags that `offsets` cut out of one row are followed by no rule."""
    if indices.dim() != 2 or offsets is not None or others or scale_grad_by_freq or flow.rows.is_uniform(indices):
        raise Mixes("takes bags of indices that cannot be followed")
    layout = flow.rows.layout(indices)
    if layout is None or layout.dim or flow.rows.depends(weight):
        raise Mixes("takes bags of indices that cannot be followed")
    if per_sample_weights is not None and flow.rows.layout(per_sample_weights) != layout:
        raise Mixes("combines rows with other rows")
    return layout


ATOMS: dict[Any, Callable[..., RowLayout | None]] = {
    torch.nn.functional.one_hot: _one_hot,
    torch.nn.functional.embedding_bag: _embedding_bag,
}


def _fake_mode_for(tensors: Iterable[Any]) -> FakeTensorMode:
    """The virtual GPU's mode if the tensors are on it, else a new one."""
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    # torch hands out null as the address of a tensor without data. On a card a kernel that the code launches itself would write there.
    mode._allow_unsafe_data_ptr_access = False
    return mode


def _without_modes() -> Any:
    """A context without the active dispatch modes, which must not see the operators of a proof."""
    return _disable_current_modes()
