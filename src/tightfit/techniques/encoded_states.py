"""An optimizer of torch.optim whose states are kept in a smaller form between its steps: each is restored for the update of its parameter.

The optimizer stays the script's own and does the arithmetic. Its checkpoints have the states in float32, as those of a plain run, and on the
host, where they take no device memory; what is loaded is made small again.
"""

from collections.abc import Mapping
from typing import Any

import torch

from tightfit.techniques.optimizer_kernels import check_kernel, set_kernel
from tightfit.techniques.optimizer_steps import check_separable, groups_by_parameter, replace_step, update_alone
from tightfit.techniques.session import Session
from tightfit.techniques.state_codecs import AbstractCodec, Encoded
from tightfit.techniques.updates import Clipping, Updates

_REST = "_rest"


class EncodedStates:
    """Steps `optimizer` parameter by parameter; between steps, the states that `codec` takes are in its form."""

    def __init__(self, optimizer: torch.optim.Optimizer, codec: AbstractCodec) -> None:
        self._optimizer = optimizer
        self._codec = codec
        self._update_whole = update_alone(optimizer)

    def __call__(self) -> None:
        for parameter, group in groups_by_parameter(self._optimizer).items():
            if parameter.grad is not None:
                self.update(parameter, group)

    def update(self, parameter: torch.Tensor, group: int) -> None:
        """Updates one parameter, whose states are whole meanwhile."""
        self.decode(parameter)
        try:
            self._update_whole(parameter, group)
        finally:
            self.encode(parameter)

    def encode(self, parameter: torch.Tensor) -> None:
        """Makes the states of one parameter small."""
        state = self._optimizer.state.get(parameter, {})
        for name in [n for n, v in state.items() if n + _REST not in state and self._is_whole(n, v, parameter)]:
            encoded = self._codec.encode(name, state[name])
            state[name], state[name + _REST] = encoded.main, encoded.rest

    def decode(self, parameter: torch.Tensor) -> None:
        """Makes the states of one parameter whole again."""
        state = self._optimizer.state[parameter]
        for name in _names_encoded(state):
            state[name] = self._decoded(state, name, parameter)
            del state[name + _REST]

    def _decoded(self, state: dict[str, Any], name: str, parameter: torch.Tensor) -> torch.Tensor:
        encoded = Encoded(main=state[name], rest=state[name + _REST])
        return self._codec.decode(name, encoded, parameter.shape, parameter.dtype)

    def _is_whole(self, name: str, value: Any, parameter: torch.Tensor) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.shape == parameter.shape
            and self._codec.takes(name, parameter.shape)
        )

    def saved(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint with whole states, on the host."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        states = dict(state_dict["state"])
        for index, parameter in zip(indices, parameters, strict=True):
            if index in states:
                state = states[index]
                whole = {name: self._decoded(state, name, parameter).cpu() for name in _names_encoded(state)}
                states[index] = {n: v for n, v in state.items() if not n.endswith(_REST)} | whole
        return {**state_dict, "state": states}

    def loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes what was loaded small."""
        for parameter in groups_by_parameter(optimizer):
            self.encode(parameter)


def _names_encoded(state: dict[str, Any]) -> list[str]:
    return [name.removesuffix(_REST) for name in state if name.endswith(_REST)]


def encode_states(session: Session, codec: AbstractCodec, technique: str, settings: Mapping[str, Any]) -> None:
    """Keeps the states of all the session's optimizers in the form of `codec` until it is undone.

    With the setting `in_backward` each parameter is updated as soon as its gradient is there, which is freed then; `clips` says that the script
    clips gradients by their norm, for which the backward pass runs twice. With `kernel: fused` the optimizer runs its fused implementation.

    Raises:
        ApplyError: an optimizer is not known to update each parameter by itself, or has no fused implementation.
    """
    is_fused = settings.get("kernel") == "fused"
    in_backward, clips = (settings.get(name) in (True, "True") for name in ("in_backward", "clips"))
    for optimizer in session.optimizers:
        check_separable(optimizer, technique)
        if is_fused:
            check_kernel(optimizer, session.model, "fused")
    clipping = Clipping(session) if in_backward and clips else None
    for optimizer in session.optimizers:
        if is_fused:
            set_kernel(session, optimizer, "fused")
        states = EncodedStates(optimizer, codec)

        def undo(states: EncodedStates = states, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for parameter in list(optimizer.state):
                states.decode(parameter)

        session.when_undone(undo)
        states.loaded(optimizer)
        if in_backward:
            Updates(session, optimizer, states.update, clipping).install()
        else:
            replace_step(session, optimizer, states)
        session.when_undone(optimizer.register_state_dict_post_hook(states.saved).remove)
        session.when_undone(optimizer.register_load_state_dict_post_hook(states.loaded).remove)
