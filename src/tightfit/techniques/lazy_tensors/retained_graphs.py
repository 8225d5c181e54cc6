"""A backward pass whose graph is retained and run again, once the script has read, scaled, cleared or used its gradients.

The first run keeps the norm and the form of each gradient (`gradient_forms`), and at the host a checksum of its bits. A later run computes the same gradients one after the other, for updates or because they
are read; only parameters whose gradient is still wanted get one, so that nothing else is accumulated twice. The gradients of both runs are compared.

A parameter may be updated once its gradient is complete and nothing else refers to its memory: tensors that the graph saved of it on the way to its
gradient are freed by then, so a remaining view may be read later in the pass. Then its gradient is kept for the optimizer step.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.effects.ambient import Ambient
from tightfit.effects.random_states import AllRandom
from tightfit.effects.values.contents import checksum_of
from tightfit.errors import ApplyError
from tightfit.techniques.lazy_tensors.deferred_gradients import (
    REMEDY,
    Deferred,
    add_to_zeros,
    defer_gradient,
    deferred_gradient,
)
from tightfit.techniques.lazy_tensors.gradient_forms import GradientForms
from tightfit.techniques.lazy_tensors.lazy_tensor import carry_attributes
from tightfit.techniques.lazy_tensors.programs_code import ProgramsCode
from tightfit.techniques.lazy_tensors.repeated_pass import as_before, drawing_as
from tightfit.techniques.lazy_tensors.saved_and_shared import saved_and_shared
from tightfit.techniques.lazy_tensors.unchanged import INTEGERS, Contents
from tightfit.techniques.lazy_tensors.waiting_gradients import WaitingGradients
from tightfit.torch_hooks.backward import BackwardPass
from tightfit.torch_hooks.manifest import SET_VERSIONS, STORAGE_USES

# The parameter and the object that stands for its memory in Python.
_USES_OF_ITS_OWN = 2

Told = Callable[[torch.Tensor], None]

# Gradients that are summed in another order from run to run, as some kernels on a card do, have norms that differ by rounding only.
_SAME_AT_HOST = 1e-6
_SAME_ON_A_CARD = 1e-3
_ROUNDINGS = 64
_WRITTEN = (
    "a parameter was modified between the backward pass and the optimizer's step, and the second backward "
    f"pass would see the change; {REMEDY}"
)


class _Comparison:
    """What is known of the gradients of a first run, and whether those of another one are equal to them.

    At the host their bits are. Where these are others, and on a card, norms and forms must be the same but for rounding. Before an update its gradient must be known to
    be the same, so the host waits for two numbers of each parameter; those of the first run are read together, and compared here: on the device a comparison is twenty
    kernels, each of which is the processor's time of a step.
    """

    def __init__(self, forms: GradientForms) -> None:
        self._form_of = forms.of
        self._forms: dict[torch.Tensor, torch.Tensor] = {}
        self._bits: dict[torch.Tensor, int | None] = {}
        # Of the first run, once they are read: the norm and the form.
        self._first: dict[torch.Tensor, tuple[torch.Tensor, float, float]] = {}
        self._found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._has_other_bits = False
        self.is_strict = False
        """Whether no rounding is allowed for: a weight was written to past autograd, and by a small step gradients are others by as little."""

    def keep(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Keeps what is known of the first gradient of `parameter`."""
        self._forms[parameter] = self._form_of(gradient)
        self._bits[parameter] = checksum_of(gradient)

    def forget(self) -> None:
        """Drops the comparisons that were made."""
        self._found.clear()
        self._has_other_bits = False

    def found_other(self) -> bool:
        """Whether a gradient differed since this was asked last. Waits for the device."""
        if self._has_other_bits:
            return True
        found, self._found = self._found, []
        norms, forms = (_values([each[place] for each in found]) for place in (1, 2))
        for (parameter, _, _), norm, form in zip(found, norms, forms, strict=True):
            _, first_norm, first_form = self._first[parameter]
            share = 0.0 if self.is_strict else _share(parameter)
            # A norm in half precision may be infinite where no element is.
            size = first_norm if math.isfinite(first_norm) else abs(first_form)
            # The form finds gradients of another direction and the same norm. Written so that a NaN in both, as in a step that a scaler will skip, counts as the same.
            if not _is_close(norm, first_norm, share) or abs(form - first_form) > share * size:
                return True
        return False

    def check(self, refuse: Callable[[str], ApplyError]) -> None:
        """Checks that all gradients compared so far are equal to those of the first run.

        Raises:
            ApplyError: they were not.
        """
        if self.found_other():
            raise refuse(
                _WRITTEN
                if self.is_strict
                else "the backward pass, run a second time, gave other gradients: something in it changes from call "
                f"to call; {REMEDY}"
            )

    def compared(
        self, parameter: torch.Tensor, deferred: Deferred, waiting: Mapping[torch.Tensor, Deferred]
    ) -> torch.Tensor:
        """The recomputed gradient, compared with the first one, and with its recorded changes applied. `waiting` are all that are recomputed."""
        assert parameter.grad is not None
        self.compare(parameter, parameter.grad, deferred, waiting)
        for operator, other in deferred.changes:
            operator(parameter.grad, other)
        return parameter.grad

    def compare(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        deferred: Deferred,
        waiting: Mapping[torch.Tensor, Deferred],
    ) -> None:
        """Compares a gradient with the first one, of which norm and form are known."""
        if deferred.norm is None or isinstance(gradient, FakeTensor):
            return
        bits = self._bits.get(parameter)
        if bits is not None and bits == checksum_of(gradient):
            return
        if bits is not None and self.is_strict:
            self._has_other_bits = True
            return
        if parameter not in self._first or self._first[parameter][0] is not deferred.norm:
            self._read_first({**waiting, parameter: deferred})
        self._found.append((parameter, _norm(gradient), self._form_of(gradient)))

    def _read_first(self, waiting: Mapping[torch.Tensor, Deferred]) -> None:
        known = {parameter: each.norm for parameter, each in waiting.items() if each.norm is not None}
        known = {parameter: norm for parameter, norm in known.items() if parameter in self._forms}
        values = zip(_values([*known.values()]), _values([self._forms[each] for each in known]), strict=True)
        for (parameter, norm), (norm_value, form) in zip(known.items(), values, strict=True):
            self._first[parameter] = norm, norm_value, form


def _share(parameter: torch.Tensor) -> float:
    """By which share of its norm a gradient may be another one and the same but for rounding."""
    if parameter.device.type != "cpu":
        return _SAME_ON_A_CARD
    return min(_SAME_AT_HOST, _ROUNDINGS * torch.finfo(parameter.dtype).eps)


def _is_close(one: float, other: float, share: float) -> bool:
    """As `torch.isclose`, with NaN equal to itself."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return True
    return math.isfinite(one - other) and abs(one - other) <= share * abs(other)


def _values(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The values of tensors of one element, with one wait for all of a device and type."""
    found = [0.0] * len(tensors)
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault((tensor.device, tensor.dtype), []).append(place)
    with torch.no_grad():
        for own in places.values():
            values = (
                torch.stack([tensors[place] for place in own]).tolist() if len(own) > 1 else [tensors[own[0]].item()]
            )
            for place, value in zip(own, values, strict=True):
                found[place] = value
    return found


class KeptPass:
    """The retained graph of `backward`, and its lazy gradients.

    `buffers` are those of the model: writes of a further run (batch norms in a recomputation) are undone. `others` are tensors that the pass may
    read and the program may write to, such as its batch. `code` is the program's own that runs in the pass, if there is any.
    """

    def __init__(
        self,
        backward: BackwardPass,
        buffers: Collection[torch.Tensor],
        others: Collection[torch.Tensor],
        refuse: Callable[[str], ApplyError],
        forms: GradientForms,
        code: ProgramsCode | None = None,
    ) -> None:
        self.backward = backward
        self._code = code
        self._others = others
        self._contents: Contents | None = None
        self._weights: Contents | None = None
        self.gradients = WaitingGradients()
        self._buffers = buffers
        self._refuse = refuse
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._comparison = _Comparison(forms)
        self._leaves: frozenset[int] | None = None
        self._drawn_from: AllRandom | None = None
        """Where code of the program's draws within the pass."""
        self._settings = Ambient.now()

    def run_first(
        self,
        parameters: Collection[torch.Tensor],
        zeroed: Mapping[torch.Tensor, torch.Tensor],
        make_all: Callable[[], None],
    ) -> Any:
        """Runs the pass and replaces the gradients of `parameters` by lazy ones; those in `zeroed` held these zeros, to which they are added.

        `make_all` is called by a lazy gradient whose elements are read.
        """

        def keep(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            # A sparse gradient (of an embedding) is small already, and has no lazy form; nor has one that is conjugated or negated lazily, which torch's Adam refuses.
            if gradient is None or gradient.layout != torch.strided or gradient.is_conj() or gradient.is_neg():
                if parameter in zeroed:
                    add_to_zeros(parameter)
                return
            deferred = Deferred(gradient, _norm(gradient), make_all, self._refuse)
            self._comparison.keep(parameter, gradient)
            if parameter in zeroed:
                # As an addition to zeros would: negative zeros become positive ones.
                deferred.changes.append((torch.ops.aten.add_.Scalar, 0.0))
            self.gradients.add(parameter, deferred)
            defer_gradient(parameter, deferred)
            carry_attributes(zeroed.get(parameter), parameter.grad)

        before = AllRandom.now()
        try:
            with (
                self._code.first_run() if self._code is not None else nullcontext(),
                told_of_gradients(parameters, keep),
            ):
                result = self.backward.run(keeps_graph=True)
        except BaseException:
            self.gradients.fail()
            raise
        if not before.is_same(AllRandom.now()):
            self._drawn_from = before
        given = [t for t in self.backward.args[1] if isinstance(t, torch.Tensor)]
        self._versions = [(t, t._version) for t in (*parameters, *given)]
        read = [*parameters, *given, *self._buffers, *self._others]
        self._weights = Contents((*parameters, *given))
        shared = saved_and_shared(self.backward.nodes(), read)
        self._contents = Contents((*self._buffers, *self._others, *shared))
        return result

    def make_all(self) -> None:
        """Materialises the waiting gradients on their parameters."""
        waiting = self.gradients.now
        if not waiting:
            return

        def made(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            waiting[parameter].is_made(self._comparison.compared(parameter, waiting[parameter], waiting))

        self._run_again(waiting, made, is_last=True)
        self._comparison.check(self._refuse)

    def goes_to(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether the pass leads to one of them: an update of it, by whomever, is seen by a further run."""
        if self._leaves is None:
            self._leaves = frozenset(map(id, self.backward.leaves()))
        return any(id(parameter) in self._leaves for parameter in parameters)

    def shares_graph_with(self, backward: BackwardPass) -> bool:
        """Whether another pass goes through nodes of this graph."""
        mine = set(self.backward.nodes())
        return any(node in mine for node in backward.nodes())

    def use(
        self, update: Told, mine: Collection[torch.Tensor], why: str, *, through_host: bool
    ) -> dict[torch.Tensor, None]:
        """Recomputes the waiting gradients, and calls `update` with each parameter of `mine` while its gradient exists, which is freed afterwards.

        The gradients of other parameters are materialised, and so are those of parameters whose memory something else refers to. With
        `through_host` nothing is updated before all gradients are computed: they wait in host memory, and return one by one. Returns the
        parameters that were updated.

        Raises:
            ApplyError: a gradient is not that of the first run; its parameter is not updated.
        """
        waiting, updated = self.gradients.now, dict[torch.Tensor, None]()
        # What it holds would otherwise live longer than in a pass of the program's own.
        self._contents = None
        on_host: dict[torch.Tensor, torch.Tensor] = {}

        def update_and_free(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
            deferred = waiting[parameter]
            norm = _norm(gradient) if deferred.norm is None or deferred.changes else deferred.norm
            update(parameter)
            updated[parameter] = None
            deferred.is_used(why, norm)
            defer_gradient(parameter, deferred)

        def used(parameter: torch.Tensor) -> None:
            deferred = waiting[parameter]
            gradient = self._comparison.compared(parameter, deferred, waiting)
            self._comparison.check(self._refuse)
            if parameter in mine and through_host:
                on_host[parameter] = gradient.cpu()
                defer_gradient(parameter, deferred)
            elif parameter not in mine or is_held_elsewhere(parameter):
                deferred.is_made(gradient)
            else:
                update_and_free(parameter, gradient)

        self._run_again(waiting, used, is_last=True)
        for parameter in list(on_host):
            standing = parameter.grad
            gradient = parameter.grad = on_host.pop(parameter).to(parameter.device)
            update_and_free(parameter, gradient)
            carry_attributes(standing, parameter.grad)
        return updated

    def may_be_other(self) -> bool:
        """Whether a tensor that the pass is known to read was written to since its first run."""
        each = (self._weights, self._contents)
        return any(contents is None or contents.have_changed() for contents in each)

    def try_out(self) -> bool:
        """Runs the pass once more as a trial, with each parameter overwritten as soon as its gradient is complete; returns whether the gradients are
        the same, so that parameters could be updated there.
        """
        waiting = self.gradients.now
        set_versions = SET_VERSIONS.value()
        before = {parameter: parameter._version for parameter in waiting}
        disturbed: list[tuple[torch.Tensor, torch.Tensor]] = []

        def compared(parameter: torch.Tensor) -> None:
            deferred = waiting[parameter]
            assert parameter.grad is not None
            self._comparison.compare(parameter, parameter.grad, deferred, waiting)
            defer_gradient(parameter, deferred)
            # As an update would: a node that still needs this parameter raises torch's error about its version,
            # or gives other gradients.
            bits, key = _bits_and_key(parameter)
            disturbed.append((bits.bitwise_xor_(key), key))
            # torch compares the versions of saved tensors when a node reads them: with another one, a node that
            # still needs this parameter raises instead of computing with wrong numbers.
            set_versions((parameter,), (before[parameter] + 1,))

        try:
            with torch.no_grad():
                self._run_again(waiting, compared, is_last=False, is_trial=True)
            return not self._comparison.found_other()
        except Exception:  # noqa: BLE001 - the program's own functions may raise anything at numbers that are none
            return False
        finally:
            for bits, key in reversed(disturbed):
                bits.bitwise_xor_(key)
            set_versions(tuple(before), tuple(before.values()))
            self._comparison.forget()

    def check_unchanged(self) -> None:
        """Checks that no parameter was written to since the pass.

        Raises:
            ApplyError: one was, so the pass cannot be run again.
        """
        if any(tensor._version != version for tensor, version in self._versions):
            raise self._refuse(_WRITTEN)

    def _run_again(
        self, waiting: Mapping[torch.Tensor, Deferred], told: Told, *, is_last: bool, is_trial: bool = False
    ) -> None:
        self.check_unchanged()
        self._comparison.is_strict = not is_trial and self._weights is not None and self._weights.had_changed()
        keeps_graph = None if is_last else True
        standing = {parameter: parameter.grad for parameter in waiting}
        taken_off = [p for p, deferred in waiting.items() if deferred_gradient(p) is not deferred]
        came: set[torch.Tensor] = set()

        def tell(parameter: torch.Tensor) -> None:
            # torch tells of a parameter as well for which nothing has come this time.
            if parameter.grad is None:
                return
            came.add(parameter)
            told(parameter)

        # A parameter that was frozen in between still gets its gradient.
        frozen = [parameter for parameter in waiting if not parameter.requires_grad]
        for parameter in waiting:
            # Emptied first, or the engine would add to the lazy gradient that stands there.
            parameter.grad = None
            parameter.requires_grad_(True)
        try:
            # A script may step inside of `inference_mode`, in which no graph can be run.
            with (
                _without_hooks(waiting),
                told_of_gradients(waiting, tell),
                as_before(self._buffers),
                self._as_first(),
                drawing_as(self._drawn_from),
                self._settings.put_back(),
                torch.inference_mode(mode=False),
            ):
                self.backward.run_again(keeps_graph=keeps_graph, inputs=tuple(waiting))
        except BaseException as error:
            for parameter in waiting:
                if parameter not in came:
                    parameter.grad = standing[parameter]
            if is_trial or isinstance(error, ApplyError) or not isinstance(error, Exception):
                raise
            # An assertion says nothing.
            words = next(iter(str(error).splitlines()), type(error).__name__)
            raise self._refuse(f"the second run of the backward pass raised an error ({words}); {REMEDY}") from error
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
            for parameter in taken_off:
                parameter.grad = standing[parameter]
        for parameter in came:
            carry_attributes(standing[parameter], parameter.grad)
        missing = [parameter for parameter in waiting if parameter not in came]
        for parameter in missing:
            parameter.grad = standing[parameter]
        if missing:
            raise self._refuse(f"the backward pass, run a second time, did not reach the same parameters; {REMEDY}")

    def _as_first(self) -> AbstractContextManager[None]:
        if self._code is None:
            return nullcontext()
        return self._code.as_first(
            lambda lost: self._refuse(
                "the backward pass cannot run a second time: it runs code of the program (a checkpoint) by which "
                f"{lost}; {REMEDY}"
            )
        )


@contextmanager
def _without_hooks(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Hides the hooks on parameters: a pass over some that have any is not kept, so these came after the first run, and belong to the program's next pass."""
    tables = [t for p in parameters for t in (p._backward_hooks, p._post_accumulate_grad_hooks) if t]
    hidden = [(table, dict(table)) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in hidden:
            table.update(hooks)


@contextmanager
def told_of_gradients(parameters: Iterable[torch.Tensor], told: Told) -> Iterator[None]:
    """Calls `told` with each of `parameters` whose gradient has just been accumulated."""
    told_of = list(parameters)
    without = [parameter for parameter in told_of if parameter._post_accumulate_grad_hooks is None]
    handles = [parameter.register_post_accumulate_grad_hook(told) for parameter in told_of]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter in without:
            # Where torch finds an empty table it takes that as known to the engine, which it no longer is after `torch.utils.swap_tensors`: a hook that the
            # program registers then would never be called.
            if not parameter._post_accumulate_grad_hooks:
                parameter._post_accumulate_grad_hooks = None


def is_held_elsewhere(parameter: torch.Tensor) -> bool:
    """Whether anything but `parameter` refers to its memory: a view, an alias, an array, a graph that has saved one."""
    if isinstance(parameter, FakeTensor):
        return False
    storage = parameter.untyped_storage()
    return STORAGE_USES.call(storage._cdata) > _USES_OF_ITS_OWN


def _bits_and_key(parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of a parameter, and a key whose XOR with them changes every element and can be undone by applying it again.

    Elements of typical magnitude become NaN, so that not even a product with zero hides a read.
    """
    whole = parameter.detach()
    whole = torch.view_as_real(whole) if whole.is_complex() else whole
    integer = INTEGERS[whole.element_size()]
    wide = torch.promote_types(whole.dtype, torch.float32)
    mean = torch.linalg.vector_norm(whole, 1, dtype=wide) / max(1, whole.numel())
    infinity = torch.full((), torch.inf, dtype=whole.dtype, device=whole.device).view(integer)
    exponent = mean.to(whole.dtype).view(integer) & infinity
    return whole.view(integer), (exponent ^ infinity) | 1


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.linalg.vector_norm(gradient)
