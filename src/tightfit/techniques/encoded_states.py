"""An optimizer of torch.optim whose states are kept in a smaller form between its steps: each is restored for the update of its parameter.

The optimizer stays the script's own and does the arithmetic. Its checkpoints have the states in float32, as those of a plain run, and on the
host, where they take no device memory; what is loaded is made small again.
"""

from typing import Any

import torch

from tightfit.techniques.optimizer_steps import check_separable, groups_by_parameter, only, replace_step, step_of
from tightfit.techniques.session import Session
from tightfit.techniques.state_codecs import AbstractCodec, Encoded

_REST = "_rest"


class EncodedStates:
    """Steps `optimizer` parameter by parameter; between steps, the states that `codec` takes are in its form."""

    def __init__(self, optimizer: torch.optim.Optimizer, codec: AbstractCodec) -> None:
        self._optimizer = optimizer
        self._codec = codec
        self._step = step_of(optimizer)

    def __call__(self) -> None:
        for parameter, group in groups_by_parameter(self._optimizer).items():
            if parameter.grad is None:
                continue
            self.decode(parameter)
            try:
                with only(self._optimizer, group, parameter):
                    self._step()
            finally:
                self.encode(parameter)

    def encode(self, parameter: torch.Tensor) -> None:
        """Makes the states of one parameter small."""
        state = self._optimizer.state.get(parameter, {})
        for name in [n for n, v in state.items() if self._is_whole(n, v, parameter)]:
            encoded = self._codec.encode(name, state[name].float())
            state[name], state[name + _REST] = encoded.main, encoded.rest

    def decode(self, parameter: torch.Tensor) -> None:
        """Makes the states of one parameter whole again."""
        self._optimizer.state[parameter].update(
            found := self.decoded(self._optimizer.state.get(parameter, {}), parameter)
        )
        for name in found:
            del self._optimizer.state[parameter][name + _REST]

    def decoded(self, state: dict[str, Any], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The states that are in a smaller form, whole and in the type of their parameter, by name."""
        names = [name.removesuffix(_REST) for name in state if name.endswith(_REST)]
        return {
            name: self._codec.decode(name, Encoded(main=state[name], rest=state[name + _REST]), parameter.shape).to(
                parameter.dtype
            )
            for name in names
        }

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
                whole = self.decoded(states[index], parameter)
                kept = {n: v for n, v in states[index].items() if not n.endswith(_REST)}
                states[index] = kept | {name: value.cpu() for name, value in whole.items()}
        return {**state_dict, "state": states}

    def loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes what was loaded small."""
        for parameter in groups_by_parameter(optimizer):
            self.encode(parameter)


def encode_states(session: Session, codec: AbstractCodec, technique: str) -> None:
    """Keeps the states of all the session's optimizers in the form of `codec` until it is undone.

    Raises:
        ApplyError: an optimizer is not known to update each parameter by itself.
    """
    for optimizer in session.optimizers:
        check_separable(optimizer, technique)
    for optimizer in session.optimizers:
        states = EncodedStates(optimizer, codec)

        def undo(states: EncodedStates = states, optimizer: torch.optim.Optimizer = optimizer) -> None:
            for parameter in list(optimizer.state):
                states.decode(parameter)

        session.when_undone(undo)
        states.loaded(optimizer)
        replace_step(session, optimizer, states)
        session.when_undone(optimizer.register_state_dict_post_hook(states.saved).remove)
        session.when_undone(optimizer.register_load_state_dict_post_hook(states.loaded).remove)
