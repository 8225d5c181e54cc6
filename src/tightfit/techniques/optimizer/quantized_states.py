"""Keeps the states of an optimizer of torch.optim quantised between its steps; each is dequantised for the update of its parameter.

The optimizer stays the script's own and does the arithmetic. Any other operator that reads or writes a state sees it dequantised; a copy and a
pickle of the optimizer have dequantised states. So have its checkpoints, in float32 as those of a plain run, and on the host, where they take no
device memory; loaded states are quantised again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from tightfit.techniques.lazy_tensors.lazy_tensor import AbstractSource, LazyTensor
from tightfit.techniques.optimizer.backward_updates import Updates
from tightfit.techniques.optimizer.decoding_states import DecodingStates, is_shared, num_holders
from tightfit.techniques.optimizer.optimizer_kernels import check_kernel, set_kernel
from tightfit.techniques.optimizer.optimizer_settings import UpdateSettings
from tightfit.techniques.optimizer.optimizer_steps import (
    check_separable,
    groups_by_parameter,
    update_alone,
    update_within_step,
)
from tightfit.techniques.optimizer.state_codecs import AbstractCodec
from tightfit.techniques.session import Session


@final
class EncodedState(AbstractSource):
    """One state quantised by `codec`."""

    def __init__(self, codec: AbstractCodec, name: str, value: torch.Tensor) -> None:
        self._codec = codec
        self._name = name
        self._shape, self._dtype = value.shape, value.dtype
        self.encoded = codec.encode(name, value)

    def whole(self) -> torch.Tensor:
        return self._codec.decode(self._name, self.encoded, self._shape, self._dtype)

    def was_written(self, whole: torch.Tensor) -> None:
        self.encoded = self._codec.encode(self._name, whole)

    def held(self) -> Sequence[torch.Tensor]:
        return self.encoded.main, self.encoded.rest


class EncodedStates:
    """Steps `optimizer` parameter by parameter; between steps, the states that `codec` takes are quantised."""

    def __init__(self, optimizer: torch.optim.Optimizer, codec: AbstractCodec) -> None:
        self._optimizer = optimizer
        self._codec = codec
        self._update_whole = update_alone(optimizer)

    def __call__(self) -> list[torch.Tensor]:
        """Updates all parameters that have a gradient, and returns them."""
        groups = groups_by_parameter(self._optimizer)
        updated = [parameter for parameter in groups if parameter.grad is not None]
        for parameter in updated:
            self.update(parameter, groups[parameter])
        self._codec.settle()
        return updated

    def update(self, parameter: torch.Tensor, group: int) -> None:
        """Updates one parameter, with its states dequantised meanwhile."""
        self.decode(parameter)
        try:
            self._update_whole(parameter, group)
        # An update that raises must not leave one parameter's states whole: the next step would run out of
        # memory.
        finally:
            self.encode(parameter)

    def encode(self, parameter: torch.Tensor) -> None:
        """Quantises the states of one parameter."""
        if parameter not in self._optimizer.state:
            return
        # Before this function has a name for it too.
        is_held = num_holders(self._optimizer.state, parameter) > 0
        state = self._optimizer.state[parameter]
        names = [name for name, value in dict.items(state) if self._is_whole(name, value, parameter)]
        if self._codec.is_exact and names:
            if not isinstance(state, DecodingStates):
                if is_held:
                    # Of a dict that the program has a name for there is no other.
                    return
                state = self._optimizer.state[parameter] = DecodingStates(state)
            names = [name for name in names if not is_shared(state, name)]
        if names:
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
            # Step counters are states too, of one element.
            and value.shape == parameter.shape
            and self._codec.takes(name, parameter.shape)
        )

    def saved(self, _optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint with dequantised states, on the host."""
        states = {index: {n: _on_host(v) for n, v in dict.items(state)} for index, state in state_dict["state"].items()}
        return {**state_dict, "state": states}

    def loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Quantises loaded states."""
        for parameter in groups_by_parameter(optimizer):
            self.encode(parameter)
        self._codec.settle()


def _on_host(value: Any) -> Any:
    return value.whole().cpu() if isinstance(value, LazyTensor) else value


def encode_states(session: Session, codec: AbstractCodec, technique: str, settings: Mapping[str, Any]) -> None:
    """Keeps the states of all the session's optimizers quantised by `codec` until it is undone.

    With the setting `in_backward` each parameter is updated as soon as its gradient is complete, which is freed then; `clips` says that the script
    clips gradients by their norm, for which the backward pass runs twice. With `kernel: fused` the optimizer runs its fused implementation.

    Raises:
        ApplyError: an optimizer is not known to update each parameter by itself, or has no fused implementation.
    """
    given = UpdateSettings.of(settings)
    for optimizer in session.optimizers:
        check_separable(optimizer, technique)
        if given.kernel == "fused":
            check_kernel(optimizer, session.model, "fused")
    states = {optimizer: EncodedStates(optimizer, codec) for optimizer in session.optimizers}
    for optimizer, encoded in states.items():
        if given.kernel == "fused":
            set_kernel(session, optimizer, "fused")

        def undo(encoded: EncodedStates = encoded, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for parameter in list(optimizer.state):
                encoded.decode(parameter)

        session.when_undone(undo)
        encoded.loaded(optimizer)
        if not given.in_backward:
            update_within_step(session, optimizer, encoded)
        # The lazy tensors of the states would be dequantised one by one on the device by whatever serialises
        # the checkpoint.
        session.hook(optimizer.register_state_dict_post_hook, encoded.saved)
        session.hook(optimizer.register_load_state_dict_post_hook, encoded.loaded)
    if given.in_backward:
        updates = {optimizer: encoded.update for optimizer, encoded in states.items()}
        Updates(session, updates, updates_all=True).install()
