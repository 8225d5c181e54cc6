"""Proves that a model can be run on micro-batches: each example has its own outputs, and the loss is one mean or sum over them.

The proof is repeated after any change of shape, mode or module. The model runs on fake tensors, once with a part of the examples and once with all.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from tightfit.effects.call_trails import WRITTEN_OUTSIDE, CallTrail
from tightfit.effects.code import Code
from tightfit.effects.independence.row_flow import FakeRun, Flow, NeedsValues
from tightfit.effects.independence.row_proof import Computation, FollowedRun, Leaves, check_graph, check_hooks, prove
from tightfit.effects.independence.row_states import Mixed, loss_state
from tightfit.effects.independence.rows import Mixes, RowLayout, Unsteady
from tightfit.effects.independence.totals import ROWS, Total, is_sum
from tightfit.effects.optimizer_marks import OptimizerMarks
from tightfit.effects.state import DRAWN, RegionState, Snapshot, differences, restore, structural_differences
from tightfit.effects.values.fingerprints import paused
from tightfit.techniques.micro_batches.batches import AbstractBatch
from tightfit.techniques.micro_batches.divisors import Divisor
from tightfit.techniques.micro_batches.led_parts import decisions_of_whole
from tightfit.techniques.micro_batches.loss_means import Decision, LossWatch, Term
from tightfit.techniques.micro_batches.split_outputs import find_loss, items_of
from tightfit.techniques.wrappers.first_order import Refuse
from tightfit.techniques.wrappers.forwards import plain_forwards
from tightfit.techniques.wrappers.repeated_proofs import RepeatedProofs
from tightfit.techniques.wrappers.without_node_hooks import without_node_hooks

_MAX_SHAPES, _MAX_WAYS = 1024, 64
Way = tuple[int, int, int]
"""How a part went through the code: its number of examples, the shape of its loss's graph, and the functions of torch that it called."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Proved:
    """The result of a proof: `joined` are the keys of the outputs that have a row for each example; `means` as in `Total`.

    It holds for the data-dependent branches in `decisions`. `is_of_first`: for a first part that had a side effect, after which another proof
    is needed.
    """

    joined: frozenset[Any]
    means: frozenset[int]
    decisions: tuple[Any, ...] = ()
    is_of_first: bool = False
    shapes: set[Way] = dataclasses.field(default_factory=set)

    def holds_for(self, decisions: Sequence[Any], shape: Way) -> bool:
        """Whether it is a proof for these decisions, and for parts of so many examples that go this way.

        The first way for a number of examples is that of the proof: the same code has gone it.
        """
        if all(num_examples != shape[0] for num_examples, *_ in self.shapes):
            self.shapes.add(shape)
        return self.decisions == tuple(decisions) and shape in self.shapes


Judge = Callable[[FollowedRun, torch.nn.Module], Proved]
"""Says what a run that was followed proves about the model, or raises Mixes."""
_INSTEAD = (
    " (iterators and separate numpy generators cannot be rewound: draw from the global generator of torch, "
    "Python or numpy)"
)
_OF_ALL = ("Python's random", "numpy.random")


class BatchProofs:
    """The proofs for one model, which it refers to weakly, by the shapes of its batches. `of_loop` are attributes of it that the training loop sets. `judge` says what a
    run that was followed proves; by default its loss has to be one mean or sum over the batch. `is_alone`: each part runs in a process of its own. Numbers that are
    drawn alike for any examples are the same in all of them, and what a part leaves behind is put together from all."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        allows_randomness: bool,
        refuse: Refuse,
        unseen: Callable[[], contextlib.AbstractContextManager[Any]],
        of_loop: Collection[str] = (),
        judge: Judge | None = None,
        is_alone: bool = False,
        repeats: RepeatedProofs | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._judge = judge or _judged
        self._ignored = {*_OF_ALL, *(f"{type(model).__name__}.{name}" for name in of_loop)}
        self._allows_randomness = allows_randomness
        self._is_alone = is_alone
        self._refuse = refuse
        self._unseen = unseen
        self._repeats = repeats or RepeatedProofs("micro_batches", [])
        self._state = RegionState()
        self._before: Snapshot | None = None
        self.at_call: Snapshot | None = None
        """The state before the first part of the batch that runs, for `put_back`; None once a backward pass has begun."""
        self._classes: list[tuple[torch.nn.Module, type]] = []
        self._code: Code | None = None
        self.is_unsteady = False
        """Whether this batch has met a state that nobody can put back."""
        self.has_left = False
        """Whether the part that ran before the last proof has left something behind, which the next part finds."""
        # By batch and parts, and then by decisions; the last that was used is the last one.
        self._known: dict[Any, dict[tuple[Any, ...], Proved]] = {}

    @property
    def names_outside(self) -> bool:
        """Whether code of the model names something by which it may reach outside of the process's memory, or was not looked at yet."""
        return self._before is None or self._before.reach.names_outside

    def of(self, batch: AbstractBatch, parts: Sequence[tuple[int, int]]) -> Proved | None:
        """The known proof for such a batch, if there is one."""
        now = self._state.snapshot(self._owner(), is_kept=True)
        is_new = self._code is None or not self._code.is_same()
        if is_new or (self._before is not None and _is_changed(self._owner(), self._before, now)):
            self._known.clear()
        self._before = self.at_call = now
        self.is_unsteady = False
        self._classes = _classes_of(self._owner())
        known = self._known.get(_key(batch, parts))
        return next(reversed(known.values())) if known else None

    def with_decisions(
        self,
        batch: AbstractBatch,
        parts: Sequence[tuple[int, int]],
        decisions: Sequence[Any],
        shape: Way,
    ) -> Proved | None:
        """The known proof for such a batch with these decisions and for parts that go this way, if there is one."""
        known = self._known.get(_key(batch, parts), {})
        found = known.pop(tuple(decisions), None)
        # Put at the end, since `of` takes the last one that was used.
        if found is not None:
            known[found.decisions] = found
        return found if found is not None and found.holds_for(decisions, shape) else None

    def decisions_of_whole(
        self, forward: Callable[..., Any], batch: AbstractBatch, number: int
    ) -> tuple[Decision, ...] | None:
        """What the whole batch decides, up to decision `number`; None where that cannot be had, or not without leaving something behind."""
        # What is drawn at random is drawn anew, and a metric counts what each forward gives it.
        if self._allows_randomness or any(map(_is_metric, self._owner().modules())):
            return None
        first_change = self.changes_from_now()
        found = decisions_of_whole(forward, batch, number, unseen=self._unseen)
        return None if first_change() else found

    def begin_anew(self) -> None:
        """The state now is that in which a proof begins which was made before: what a part has left is put together."""
        self._before = self._state.snapshot(self._owner(), is_kept=True)

    def changed(self) -> str:
        """The first change of the model's state since `of` was called, in words, or nothing."""
        found = [] if self._before is None else differences(self._before, self._state.snapshot(self._owner()))
        return str(found[0]) if found else ""

    def changes_from_now(self) -> Callable[[], str]:
        """A function that says in words what of the model's state has changed since now, but for the random states of all; nothing where nothing has."""
        before = self._state.snapshot(self._owner(), is_kept=True)
        marks = OptimizerMarks(before.reach.optimizers)

        def first_change() -> str:
            found = differences(before, self._state.snapshot(self._owner()))
            # An array of numpy's is looked at as generators are.
            told = next((str(each) for each in found if each.path not in self._ignored), "")
            return told or ("an optimizer that the model can reach was changed" if marks.change() else "")

        return first_change

    def prove(
        self,
        forward: Callable[..., Any],
        batch: AbstractBatch,
        parts: Sequence[tuple[int, int]],
        decisions: Sequence[Any],
        reads: Sequence[Any] | None,
        shape: Way,
        *,
        may_leave: bool,
        led: Sequence[Decision] = (),
    ) -> Proved:
        """Proves that `forward` gives the same for the parts of a batch as for the whole, for these decisions, of which `led` are those of the whole, and values read.

        It was run on one part since `of` was called, or since the last proof. Side effects of that run must not depend on the part: so the proof
        starts from the state before it, and if it had side effects, another one starts from the state that the next part finds.

        Raises:
            ApplyError: it is not proved.
        """
        model = self._owner()
        key = _key(batch, parts)
        now = self._state.snapshot(model, is_kept=True)
        self.has_left = self._before is not None and _is_changed(model, self._before, now)
        if len(parts) < 2:
            proved = Proved(joined=_all_rows(batch), means=frozenset({ROWS}))
        else:
            if may_leave:
                self._refuse_used_up(now)
            is_left = may_leave and self.has_left
            has_drawn = self._is_alone and self._before is not None and _has_drawn(self._before, now)
            before = self._before if is_left or has_drawn else None
            try:
                # Metrics are muted in the state that the proof begins in: another state has other tables of attributes.
                with (
                    self._repeats.counted(key),
                    self._unseen(),
                    plain_forwards(),
                    _as_in(before, now),
                    _without_metrics(model),
                ):
                    proved = _proved(
                        model,
                        forward,
                        batch,
                        parts,
                        reads,
                        self._judge,
                        allows_randomness=self._allows_randomness,
                        may_leave=is_left,
                        led=led,
                        is_alone=self._is_alone,
                    )
            except (Mixes, NeedsValues) as error:
                self.is_unsteady |= isinstance(error, Unsteady)
                raise self._refuse(
                    "parts of the batch may not give the same result as the whole: "
                    f"{str(error) or 'values are read'}; leave micro_batches out"
                ) from None
        self._before = self._state.snapshot(model, is_kept=True)
        if proved.is_of_first:
            return proved
        self._code = self._before.reach.code
        # Padded text has a new length in nearly every batch; those that were proved first are let go.
        if len(self._known) >= _MAX_SHAPES:
            del self._known[next(iter(self._known))]
        proved = dataclasses.replace(proved, decisions=tuple(decisions))
        proved.shapes.add(shape)
        known = self._known.setdefault(key, {})
        earlier = known.get(proved.decisions)
        is_alike = earlier is not None and _says_the_same(earlier, proved)
        # Where the code takes one way or another by turns, and not each time another.
        if earlier is not None and is_alike and len(earlier.shapes) < _MAX_WAYS:
            proved.shapes.update(earlier.shapes)
        if len(known) >= _MAX_WAYS:
            known.clear()
        known[proved.decisions] = proved
        return proved

    def _refuse_used_up(self, now: Snapshot) -> None:
        """Refuses what the run of the first part has left behind and no proof can begin before, as it cannot be put back: a first item, a class."""
        lost = [] if self._before is None else differences(self._before, now)
        taken = [each for each in lost if each.is_in_place and each.tensor is None]
        instead = _INSTEAD if taken and taken[0].what == DRAWN else ""
        used_up = [str(each) for each in taken]
        used_up += [
            f"an object of {before.__name__} became one of another class"
            for part, before in self._classes
            if type(part) is not before
        ]
        if used_up:
            raise self._refuse(
                f"parts of the batch may not give the same result as the whole: {used_up[0]} in the forward of the "
                f"first part{instead}; leave micro_batches out"
            )

    def _owner(self) -> torch.nn.Module:
        model = self._model()
        assert model is not None
        return model


def _proved(
    model: torch.nn.Module,
    forward: Callable[..., Any],
    batch: AbstractBatch,
    parts: Sequence[tuple[int, int]],
    reads: Sequence[Any] | None,
    judge: Judge,
    *,
    allows_randomness: bool,
    may_leave: bool,
    led: Sequence[Decision],
    is_alone: bool,
) -> Proved:
    check_hooks(model, is_inside=False, allows_forward=is_alone)
    split: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor) -> torch.Tensor:
        split.append(tensor)
        return tensor

    batch.part(0, batch.num_examples, collect)

    def call(inputs: Sequence[torch.Tensor], watch: "_ProofWatch") -> tuple[Any, "_ProofWatch"]:
        waiting = iter(inputs)
        args, kwargs = batch.part(0, watch.num_examples, lambda _: next(waiting))
        return forward(*args, **kwargs), watch

    # Where each part is alone with its sums, others know those of all.
    watching: dict[str, Any] = {"allows_randomness": allows_randomness, "led": led}
    watching |= {"shares_draws": is_alone, "has_divisors": is_alone}

    @contextlib.contextmanager
    def watched(run: FakeRun) -> "Iterator[_ProofWatch]":
        with without_node_hooks(run), _ProofWatch(run, **watching) as watch:
            yield watch

    subject = Computation(
        call=call,
        inputs=split,
        dims=[0] * len(split),
        module=model,
        allows_randomness=allows_randomness,
        allows_votes=True,
        shares_draws=is_alone,
        joins_left=is_alone,
        writes_buffers=is_alone,
        around=watched,
    )
    try:
        proof = prove(subject, batch.num_examples, [end - begin for begin, end in parts], reads)
    except Leaves as error:
        if not may_leave and not (is_alone and error.is_of_draws):
            raise
        may_leave = may_leave and not (is_alone and error.is_steady)
        proof = error.proof
    return dataclasses.replace(judge(proof, model), is_of_first=may_leave)


def _judged(proof: FollowedRun, model: torch.nn.Module) -> Proved:
    """What is joined and averaged, from a run that was followed.

    Raises:
        Mixes: the loss is not one mean or sum over the batch.
    """
    output, _ = proof.result
    loss_key, loss = find_loss(output)
    state = proof.flow.rows.state(loss)
    if not isinstance(state, Total):
        why = f" ({state.reason})" if isinstance(state, Mixed) else ""
        raise Mixes(f"its loss is not one mean or sum over the batch{why}")
    check_graph(loss, [*proof.inputs, *model.parameters()])
    joined = set()
    for key, value in items_of(output).items():
        if key != loss_key and isinstance(value, torch.Tensor) and _has_rows(proof.flow, value):
            joined.add(key)
    return Proved(joined=frozenset(joined), means=state.means)


@contextlib.contextmanager
def beside(proofs: BatchProofs, unseen: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Around further runs of ours behind that of a part: the next part finds what that has left, beside the model too, and not what these leave."""
    now = proofs._state.snapshot(proofs._owner(), is_kept=True)
    try:
        with unseen(), paused():
            yield
    finally:
        restore(now)


def put_back(proofs: BatchProofs, calls: CallTrail | None) -> str:
    """Puts the model's state back to that of when `proofs.of` was called; the first change that stays, in words, or nothing. `calls` are what has run since."""
    if proofs.is_unsteady:
        return "state that a snapshot does not cover"
    before = proofs.at_call
    if calls is not None and calls.written_outside(() if before is None else before.reach.tensors):
        return WRITTEN_OUTSIDE
    if before is None:
        return ""
    model, state = proofs._owner(), proofs._state
    found = differences(before, state.snapshot(model))
    if found and not before.gone():
        restore(before)
        found = differences(before, state.snapshot(model))
    return str(found[0]) if found else ""


def _is_changed(model: torch.nn.Module, before: Snapshot, now: Snapshot) -> bool:
    found = structural_differences(before, now)
    if not found:
        return False
    # A metric's counters change in every step, and would make every step prove anew.
    metrics = tuple(f"{type(model).__name__}.{name}" for name, part in model.named_modules() if _is_metric(part))
    return any(not str(each).startswith(metrics) for each in found) if metrics else True


def _has_drawn(before: Snapshot, now: Snapshot) -> bool:
    """Whether the first part has drawn numbers, which a proof has to draw again."""
    return any(each.what == DRAWN for each in differences(before, now))


def _says_the_same(one: Proved, other: Proved) -> bool:
    """Whether two proofs say the same of what the model returns, whichever way they are of."""
    of_no_way = {"decisions": (), "shapes": set()}
    return dataclasses.replace(one, **of_no_way) == dataclasses.replace(other, **of_no_way)


def _classes_of(model: torch.nn.Module) -> list[tuple[torch.nn.Module, type]]:
    """The modules with their classes, but lazy ones, which change theirs when they have seen a shape."""
    return [(part, type(part)) for part in model.modules() if not isinstance(part, LazyModuleMixin)]


@contextlib.contextmanager
def _as_in(before: Snapshot | None, now: Snapshot) -> Iterator[None]:
    """Restores the state `before` for a block, if it is given, and `now` afterwards."""
    if before is None:
        yield
        return
    restore(before)
    try:
        yield
    finally:
        restore(now)


class _ProofWatch(LossWatch):
    """Marks losses over rows in the run of a proof."""

    def __init__(self, run: FakeRun, **settings: Any) -> None:
        super().__init__(run.num_rows, **settings)
        self._run = run

    def run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._run.atom(func, args, kwargs)

    def divided(self, loss: torch.Tensor, divisor: Divisor, result: torch.Tensor) -> None:
        flow = self._run
        # The sum itself, to which nobody has written.
        if isinstance(flow, Flow) and is_sum(flow.rows.state(loss)) and is_sum(flow.rows.state(divisor.base)):
            flow.rows.set(result, loss_state(len(self.terms) - 1))

    def noted(self, term: Term, inputs: Mapping[str, Any], *, is_of_classes: bool) -> None:
        super().noted(term, inputs, is_of_classes=is_of_classes)
        if not isinstance(self._run, Flow):
            return
        assert term.loss is not None
        try:
            _check_loss(self._run, inputs, is_of_classes=is_of_classes)
        except Mixes as error:
            reason = f"the loss function {error}"
            # CLIP and SimCLR compare each example with all others of the batch: the scores are (examples, examples), and parts would have fewer negatives.
            if term.is_contrastive:
                reason = "the loss has as many classes as the batch has examples: it compares them with each other"
            self._run.rows.set(term.loss, Mixed(reason=reason))
        else:
            self._run.rows.set(term.loss, loss_state(None if term.num_terms is None else len(self.terms) - 1))


def _check_loss(flow: Flow, inputs: Mapping[str, Any], *, is_of_classes: bool) -> None:
    """Raises Mixes if a loss function does not compare each row with its own target only."""
    scores, target, weight = inputs["input"], inputs["target"], inputs.get("weight")
    layout = flow.rows.layout(scores)
    if layout is None or flow.rows.is_uniform(scores):
        raise Mixes("gets scores that do not belong to one row each")
    for name in ("weight", "pos_weight"):
        other = inputs.get(name)
        if isinstance(other, torch.Tensor) and is_of_classes and flow.rows.state(other) is not None:
            raise Mixes("is given class weights that depend on the rows")
    if not is_of_classes:
        extra = [t for n in ("weight", "pos_weight") if isinstance(t := inputs.get(n), torch.Tensor)]
        flow.rows.broadcast([scores, target, *extra], max(scores.dim(), target.dim()))
        return
    # Dimension 1 has the classes (torch.nn.functional.cross_entropy), and in an input without a batch the only
    # one.
    classes = 1 if scores.dim() > 1 else 0
    if layout.dim == classes or (weight is not None and flow.rows.is_uniform(weight)):
        raise Mixes("treats the rows as classes")
    expected = layout if target.dim() == scores.dim() or layout.dim < classes else layout.at(layout.dim - 1)
    if flow.rows.layout(target) != expected:
        raise Mixes("compares rows with targets of other rows")


def _has_rows(flow: Flow, value: torch.Tensor) -> bool:
    try:
        return not flow.rows.is_uniform(value) and flow.rows.layout(value) == RowLayout(dim=0)
    except Mixes:
        return False


@contextlib.contextmanager
def _without_metrics(model: torch.nn.Module) -> Iterator[None]:
    """Mutes torchmetrics metrics for a block: they accumulate, so updates by parts add up to the same."""
    kept = []
    for module in model.modules():
        if _is_metric(module):
            own = vars(module)
            kept.append((own, {name: own[name] for name in ("update", "forward") if name in own}))
            own["update"] = own["forward"] = _nothing
    try:
        yield
    finally:
        for own, before in kept:
            del own["update"], own["forward"]
            own.update(before)


def _is_metric(module: torch.nn.Module) -> bool:
    return any(base.__module__.partition(".")[0] == "torchmetrics" for base in type(module).__mro__)


def _nothing(*_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros((), device="cpu")


class _AllRows(frozenset[Any]):
    """Contains every key: the outputs of a batch that is one part are complete."""

    def __contains__(self, key: object) -> bool:
        return True


def _all_rows(_: AbstractBatch) -> frozenset[Any]:
    return _AllRows()


def _key(batch: AbstractBatch, parts: Sequence[tuple[int, int]]) -> Any:
    shapes: list[Any] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append((tensor.shape, tensor.dtype))
        return tensor

    rest = batch.part(0, batch.num_examples, note)
    plain = [
        v if isinstance(v, bool | int | float | str | None) else type(v).__name__ for v in (*rest[0], *rest[1].values())
    ]
    # Under autocast the same module runs other operators.
    device = batch.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    sizes = tuple({e - b for b, e in parts})
    return tuple(shapes), tuple(rest[1]), tuple(plain), sizes, len(parts), autocast, batch.rest_key()
