"""Keeps the states of an optimizer of torch.optim quantised between its steps; each is dequantised for the update of its parameter.

The optimizer stays the script's own and does the arithmetic. Any other operator that reads or writes a state sees it dequantised; a copy and a
pickle of the optimizer have dequantised states. So have its checkpoints, in float32 as those of a plain run, and on the host, where they take no
device memory; loaded states are quantised again.
"""

import functools
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, final

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakTensorKeyDictionary

from tightfit.errors import ApplyError
from tightfit.techniques.lazy_tensors.lazy_tensor import AbstractElementSource, LazyTensor
from tightfit.techniques.optimizer.states.checkpoint_copies import CheckpointCopies
from tightfit.techniques.optimizer.states.decoding_states import DecodingStates, is_shared, num_holders
from tightfit.techniques.optimizer.states.state_codecs import AbstractCodec, Encoded
from tightfit.techniques.optimizer.states.states_ahead import StatesAhead
from tightfit.techniques.optimizer.updates.backward_updates import Updates
from tightfit.techniques.optimizer.updates.optimizer_kernels import check_kernel, is_dense, set_kernels
from tightfit.techniques.optimizer.updates.optimizer_steps import (
    UpdateOne,
    check_separable,
    groups_by_parameter,
    update_alone,
    update_within_step,
)
from tightfit.techniques.optimizer.updates.update_settings import UpdateSettings
from tightfit.techniques.session import Session
from tightfit.techniques.wrappers.first_order import Refuse
from tightfit.techniques.wrappers.tensors_of_tensors import check_plain

# What checkpoints in memory have been given, with the states that they were made from, and the number of updates on the host by then.
_SAVED_FROM: MutableMapping[torch.Tensor, "tuple[weakref.ref[AbstractElementSource] | None, int]"] = (
    WeakTensorKeyDictionary()
)
_NOT_SAVED: "tuple[weakref.ref[AbstractElementSource] | None, int]" = None, 0


@final
class EncodedState(AbstractElementSource):
    """One state quantised by `codec`."""

    def __init__(self, codec: AbstractCodec, name: str, value: torch.Tensor) -> None:
        self._codec = codec
        self._name = name
        self._shape, self._dtype = value.shape, value.dtype
        # Fused kernels go through the memory of weights and states side by side.
        self._stride = value.stride() if is_dense(value) else None
        self._coming: Encoded | None = None
        self.given = CheckpointCopies()
        """Copies in checkpoints in memory, which are the state itself in the plain run."""
        self.encoded = codec.encode(name, value)

    @property
    def num_bytes(self) -> int:
        """Of what `begin` brings."""
        return self._codec.num_bytes(self._shape, self._dtype)

    def begin(self) -> None:
        """Begins to bring what the next `whole` needs."""
        if self._coming is None:
            self._coming = self._codec.begin(self.encoded, self._shape, self._dtype)

    def forget(self) -> None:
        """Drops what was begun to be brought."""
        if self._coming is not None:
            # Its memory is given to others only when it has come.
            self._decoded()

    # A program may read and write states in inference mode, whose tensors updates could not write to.

    @torch.inference_mode(False)
    def whole(self) -> torch.Tensor:
        whole = self._decoded()
        written = self.given.written(whole, is_exact=self._codec.is_exact) if self.given else None
        if written is None:
            return whole
        # What is encoded is referred to until it has been copied; what is returned is the program's or the update's alone.
        self.was_written(torch.empty_like(whole).copy_(written))
        return whole.copy_(written)

    @torch.inference_mode(False)
    def was_written(self, whole: torch.Tensor) -> None:
        self.forget()
        self.encoded = self._codec.encode(self._name, whole)
        self.given.refresh(whole)

    @torch.inference_mode(False)
    def was_updated(self) -> None:
        """It was updated where it is encoded."""
        if self.given:
            self.given.refresh(self._decoded())

    def _decoded(self) -> torch.Tensor:
        coming, self._coming = self._coming, None
        encoded = self.encoded if coming is None else coming
        whole = self._codec.decode(self._name, encoded, self._shape, self._dtype)
        if self._stride is None or whole.stride() == self._stride:
            return whole
        return whole.new_empty_strided(self._shape, self._stride).copy_(whole)

    def held(self) -> Sequence[torch.Tensor]:
        return self.encoded.main, self.encoded.rest


class UpdatesElsewhere(Protocol):
    """Updates of parameters whose states stay encoded."""

    def taken(self, parameters: Iterable[torch.Tensor], groups: Mapping[torch.Tensor, int]) -> Sequence[torch.Tensor]:
        """Those of them that `update` can be called with; `groups` are the indices of the parameters' groups."""

    def update(self, parameters: Sequence[torch.Tensor], groups: Mapping[torch.Tensor, int]) -> None:
        """Updates them."""


class EncodedStates:
    """Steps `optimizer` parameter by parameter; between steps, the states that `codec` takes are quantised, those of `only` these parameters if they are given.

    With `window_bytes`, what decoding needs is brought ahead of the updates, in the order that they are expected in. `update_one` is the update itself, by
    default the optimizer's own.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        codec: AbstractCodec,
        window_bytes: int | None = None,
        refuse: Refuse = ApplyError,
        *,
        only: Container[torch.Tensor] | None = None,
        update_one: UpdateOne | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._refuse = refuse
        self._only = only
        # Of states that are updated where they are.
        self._num_updates_on_host = 0
        self._codec = codec
        self._update_whole = update_alone(optimizer) if update_one is None else update_one
        self.on_host: UpdatesElsewhere | None = None
        """Updates what it takes in place of the optimizer's implementation on the card."""
        self._ahead: StatesAhead | None = None
        if window_bytes is not None:
            # By a function of the optimizer: what belongs to each other in a circle would wait for the garbage collector.
            self._ahead = StatesAhead(codec, functools.partial(_encoded, optimizer), window_bytes)

    def __call__(self) -> list[torch.Tensor]:
        """Updates all parameters that have a gradient, and returns them."""
        groups = groups_by_parameter(self._optimizer)
        updated = [parameter for parameter in groups if parameter.grad is not None]
        taken = [] if self.on_host is None else self.on_host.taken(updated, groups)
        of_host = set(taken)
        here = [parameter for parameter in updated if parameter not in of_host]
        with self.expecting(here):
            for parameter in here:
                self.update(parameter, groups[parameter])
        if self.on_host is not None:
            self._num_updates_on_host += bool(taken)
            sources = [source for parameter in taken for source in _encoded(self._optimizer, parameter)]
            for source in sources:
                if source.given:
                    # Takes over what the program has written to a copy.
                    source.whole()
            self.on_host.update(taken, groups)
            for source in sources:
                source.was_updated()
        return updated

    @contextmanager
    def expecting(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """Inside, these parameters are updated in this order."""
        if self._ahead is not None:
            self._ahead.expect(parameters)
        try:
            yield
        finally:
            if self._ahead is not None:
                self._ahead.forget()
            self._codec.settle()

    def update(self, parameter: torch.Tensor, group: int) -> None:
        """Updates one parameter, with its states dequantised meanwhile."""
        is_expected = self._ahead is not None and self._ahead.before(parameter)
        if self._ahead is not None and parameter not in self._optimizer.state:
            # Its states are about to be made.
            self._codec.settle()
        given = self._given(parameter)
        held = {} if self._codec.is_exact else _held(self._optimizer.state.get(parameter, {}))
        self.decode(parameter)
        # By their ids: what has another name is not encoded.
        places = {name: id(dict.get(self._optimizer.state[parameter], name)) for name in (*given, *held)}
        try:
            self._update_whole(parameter, group)
        # An update that raises must not leave one parameter's states whole: the next step would run out of
        # memory.
        finally:
            given = {
                name: copies
                for name, copies in given.items()
                if self._written_to(parameter, name, places[name], copies)
            }
            _write_to_held(self._optimizer.state.get(parameter, {}), held, places)
            self.encode(parameter, settles=not is_expected)
            for name, copies in given.items():
                if isinstance(lazy := dict.get(self._optimizer.state[parameter], name), LazyTensor):
                    lazy.source.given = copies  # pyrefly: ignore[missing-attribute]
        if self._ahead is not None and is_expected:
            self._ahead.after(parameter)

    def _given(self, parameter: torch.Tensor) -> dict[str, CheckpointCopies]:
        state = self._optimizer.state.get(parameter, {})
        lazy = {name: value.source for name, value in dict.items(state) if isinstance(value, LazyTensor)}
        return {name: s.given for name, s in lazy.items() if isinstance(s, EncodedState) and s.given}

    def _written_to(self, parameter: torch.Tensor, name: str, place: int, copies: CheckpointCopies) -> bool:
        """Writes a state to its copies if it is the tensor that it was; whether it is."""
        state = self._optimizer.state.get(parameter, {})
        if id(dict.get(state, name)) != place:
            return False
        copies.refresh(dict.__getitem__(state, name))
        return True

    def encode(self, parameter: torch.Tensor, *, settles: bool = True, is_loaded: bool = False) -> None:
        """Quantises the states of one parameter, which were just loaded or updated; `settles`: once what earlier ones have kept on the card is freed."""
        if parameter not in self._optimizer.state:
            return
        # Before this function has a name for it too.
        is_held = num_holders(self._optimizer.state, parameter) > 0
        state = self._optimizer.state[parameter]
        names = [name for name, value in dict.items(state) if self._is_whole(name, value, parameter)]
        if self._codec.is_exact and names and not isinstance(state, DecodingStates):
            if is_held:
                # Of a dict that the program has a name for there is no other.
                return
            state = self._optimizer.state[parameter] = DecodingStates(state)
        # What the program has a name of its own for stays what it is; but who loads a checkpoint has it at hand, and codes are for that too.
        if self._codec.is_exact or not is_loaded:
            names = [name for name in names if not is_shared(state, name)]
        if names and settles:
            self._codec.settle()
        for name in names:
            whole = dict.__getitem__(state, name)
            dict.__setitem__(state, name, LazyTensor(EncodedState(self._codec, name, whole), whole))

    def decode(self, parameter: torch.Tensor) -> None:
        """Dequantises the states of one parameter."""
        state = self._optimizer.state.get(parameter, {})
        for name, value in list(dict.items(state)):
            if isinstance(value, LazyTensor):
                state[name] = value.whole()

    def _is_whole(self, name: str, value: Any, parameter: torch.Tensor) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and not isinstance(value, LazyTensor)
            and not is_traceable_wrapper_subclass(value)
            # SGD's momentum of sparse gradients is sparse.
            and value.layout == torch.strided
            # Codes are of real numbers.
            and (self._codec.is_exact or not value.is_complex())
            # Step counters are states too, of one element.
            and value.shape == parameter.shape
            and (self._only is None or parameter in self._only)
            and self._codec.takes(name, parameter.shape)
        )

    def saved(self, _optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint with dequantised states, on the host."""
        # A program may keep other things beside the states of parameters, such as a count.
        of_parameters = {index: state for index, state in state_dict["state"].items() if isinstance(state, dict)}
        states = {index: {n: _on_host(v) for n, v in dict.items(state)} for index, state in of_parameters.items()}
        for index, state in of_parameters.items():
            for name, value in dict.items(state):
                if isinstance(value, LazyTensor):
                    if isinstance(value.source, EncodedState):
                        states[index][name] = value.source.given.the_one(states[index][name])
                    _SAVED_FROM[states[index][name]] = weakref.ref(value.source), self._num_updates_on_host
        return {**state_dict, "state": {**state_dict["state"], **states}}

    def loads(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Checks that what is loaded is no checkpoint in memory of a state that has changed since.

        Raises:
            ApplyError: it is one, or one of another optimizer's.
        """
        own = {id(value.source) for state in optimizer.state.values() for value in _lazy(state)}
        for state in state_dict["state"].values():
            for value in dict.values(state) if isinstance(state, dict) else ():
                saved_from, num_updates = (
                    _SAVED_FROM.get(value, _NOT_SAVED) if isinstance(value, torch.Tensor) else _NOT_SAVED
                )
                if saved_from is None or (id(saved_from()) in own and num_updates == self._num_updates_on_host):
                    continue
                raise self._refuse(
                    "the program loads a state_dict() taken before an update or from another optimizer; without a "
                    "copy the plain run would load the live states themselves, already updated or shared; load "
                    "copy.deepcopy(optimizer.state_dict())"
                )

    def loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Quantises loaded states."""
        for parameter in groups_by_parameter(optimizer):
            self.encode(parameter, is_loaded=True)
        self._codec.settle()


def _encoded(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> list[EncodedState]:
    state = optimizer.state.get(parameter, {})
    sources = [value.source for value in dict.values(state) if isinstance(value, LazyTensor)]
    return [source for source in sources if isinstance(source, EncodedState)]


def _held(state: dict[str, Any]) -> dict[str, LazyTensor]:
    """The states that the program has names of its own for, as it sees them."""
    names = [name for name, value in dict.items(state) if isinstance(value, LazyTensor)]
    return {name: dict.__getitem__(state, name) for name in names if num_holders(state, name)}


def _write_to_held(state: dict[str, Any], held: Mapping[str, LazyTensor], places: Mapping[str, int]) -> None:
    """Writes states back to these, where they are the tensors that they were before the update."""
    for name, lazy in held.items():
        if id(whole := dict.get(state, name)) == places[name] and isinstance(whole, torch.Tensor):
            lazy.source.was_written(whole)
            dict.__setitem__(state, name, lazy)


def _lazy(state: Any) -> Iterator[LazyTensor]:
    return (
        (value for value in dict.values(state) if isinstance(value, LazyTensor))
        if isinstance(state, dict)
        else iter(())
    )


@torch.inference_mode(False)
def _on_host(value: Any) -> Any:
    return value.whole().cpu() if isinstance(value, LazyTensor) else value


def encode_states(
    session: Session,
    codec: AbstractCodec,
    technique: str,
    settings: Mapping[str, Any],
    *,
    window_bytes: int | None = None,
    elsewhere: Callable[[torch.optim.Optimizer], UpdatesElsewhere] | None = None,
) -> None:
    """Keeps the states of all the session's optimizers quantised by `codec` until it is undone; `window_bytes` is that of `EncodedStates`, and with
    `elsewhere` the parameters that it takes are updated there.

    With the setting `in_backward` each parameter is updated as soon as its gradient is complete, which is freed then; `clips` says that the script
    clips gradients by their norm, for which the backward pass runs twice. With `kernel: fused` the optimizer runs its fused implementation.

    Raises:
        ApplyError: an optimizer is not known to update each parameter by itself, has no fused implementation, or holds parameters that are made of other tensors.
    """
    given = UpdateSettings.of(settings)
    for optimizer in session.optimizers:
        check_separable(optimizer, technique)
        check_plain(groups_by_parameter(optimizer), technique)
        if given.kernel == "fused":
            check_kernel(optimizer, session.model, "fused")
    refuse = functools.partial(session.verdict.refuse, technique=technique)
    states = {optimizer: EncodedStates(optimizer, codec, window_bytes, refuse) for optimizer in session.optimizers}
    for optimizer, encoded in states.items():
        encoded.on_host = elsewhere(optimizer) if elsewhere is not None else None
    if given.kernel == "fused":
        set_kernels(session, session.optimizers, "fused", has_states_of_ours=True)
    for optimizer, encoded in states.items():
        encode_now(session, optimizer, encoded)
        if not given.in_backward:
            update_within_step(session, optimizer, encoded)
    if given.in_backward:
        updates = {optimizer: encoded.update for optimizer, encoded in states.items()}
        expecting = {optimizer: encoded.expecting for optimizer, encoded in states.items()}
        Updates(session, updates, updates_all=True, expecting=expecting).install()


def _end(optimizer: torch.optim.Optimizer, encoded: EncodedStates) -> None:
    """Has ordinary states in ordinary dicts, which `torch.load` reads with `weights_only`; a dict that the program has a name for stays the one that it is."""
    for parameter in list(optimizer.state):
        if not isinstance(dict.__getitem__(optimizer.state, parameter), dict):
            continue
        encoded.decode(parameter)
        is_held = num_holders(optimizer.state, parameter) > 0
        state = optimizer.state[parameter]
        if isinstance(state, DecodingStates) and not is_held:
            optimizer.state[parameter] = state.copy()


def encode_now(session: Session, optimizer: torch.optim.Optimizer, encoded: EncodedStates) -> None:
    """Quantises the states that there are, and has checkpoints of the optimizer as without it, until the session is undone."""

    session.when_undone(functools.partial(_end, optimizer, encoded))
    encoded.loaded(optimizer)
    # The lazy tensors of the states would be dequantised one by one on the device by whatever serialises
    # the checkpoint.
    session.hook(functools.partial(optimizer.register_state_dict_post_hook, prepend=True), encoded.saved)
    session.hook(optimizer.register_load_state_dict_pre_hook, encoded.loads)
    session.hook(optimizer.register_load_state_dict_post_hook, encoded.loaded)
