"""Optimizer states sharded over ranks (ZeRO-1): each rank updates its share of the parameters, and sends them to the others.

Exact for optimizers whose update of a parameter reads nothing of the others. `state_dict()` has the states of all parameters on all ranks, as that of one card, and so has
`state` where the program reads it.
"""

import io
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tightfit.analysis.optimizer_algorithm import UPDATES_EACH_ALONE
from tightfit.effects.optimizer_marks import class_of_step
from tightfit.ranks.rank_group import RankGroup, number_of
from tightfit.ranks.sharded.kept_states import KeptStates
from tightfit.ranks.sharded.states_of_share import StatesOfShare
from tightfit.techniques.optimizer.updates.optimizer_steps import Innermost
from tightfit.techniques.wrappers.first_order import Refuse
from tightfit.torch_hooks.weak_references import WeakTable


class ShardedStates:
    """Hooks around the steps and the `state_dict` of one optimizer. It refers to the optimizer weakly."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, group: RankGroup, refuse: Refuse, tell: Callable[[str], None]
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._group, self._refuse = group, refuse
        self._kept = KeptStates(group, tell)
        # Whether the states of other ranks are there, since the program has read them.
        self._is_collected = False
        self._owner: WeakTable[torch.Tensor, int] = WeakTable()
        # Within the step: hooks of the program's, which clip say, see all parameters and gradients.
        self._innermost = Innermost(self._of_others)
        optimizer.register_step_pre_hook(self._before_step)
        after = optimizer.register_step_post_hook(self._after_step)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(after.id, last=False)
        optimizer.register_state_dict_pre_hook(self._before_state_dict)
        optimizer.register_state_dict_post_hook(self._after_state_dict)
        optimizer.register_load_state_dict_post_hook(lambda _: self._drop_others(are_kept=True))

    def owners(self) -> list[tuple[torch.Tensor, int]]:
        """The rank of each parameter, in the optimizer's order. New ones, the largest first, get the rank that has least so far; whose states a rank has stays with it."""
        optimizer = self._optimizer()
        assert optimizer is not None
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        held = [0] * self._group.size
        for parameter in parameters:
            if parameter in self._owner:
                held[self._owner[parameter]] += parameter.numel()
        # Of equals the first: sorting is stable.
        for parameter in sorted(parameters, key=lambda p: -p.numel()):
            if parameter not in self._owner:
                self._owner[parameter] = rank = held.index(min(held))
                held[rank] += parameter.numel()
        return [(parameter, self._owner[parameter]) for parameter in parameters]

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        if class_of_step(optimizer) not in UPDATES_EACH_ALONE:
            raise self._refuse(
                f"{type(optimizer).__name__} is not known to update each parameter independently, and its states "
                "cannot be sharded"
            )
        self._open(is_open=True)
        given = self._innermost.before(optimizer, args, kwargs)
        # Hooks of the program's follow.
        self._open(is_open=False)
        return given

    def _of_others(self) -> list[torch.Tensor]:
        """The parameters that the step of this rank leaves alone."""
        optimizer = self._optimizer()
        assert optimizer is not None
        owners = self.owners()
        self._group.agree("an optimizer's step", {
            "the optimizer that steps": number_of(type(optimizer).__name__),
            "the set of parameters that have a gradient": number_of([p.grad is None for p, _ in owners]),
            # Each rank updates with its own.
            "the optimizer's settings (a learning rate)": number_of([_settings(group) for group in optimizer.param_groups]),
        })  # fmt: skip
        if self._is_collected:
            # What the program keeps of them is renewed.
            self._drop_others(are_kept=True)
        self._open(is_open=True)
        return [parameter for parameter, rank in owners if rank != self._group.rank]

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._innermost.after(optimizer, args, kwargs)
        owners = self.owners()
        with torch.no_grad():
            for rank in range(self._group.size):
                updated = [p for p, owner in owners if owner == rank and p.grad is not None]
                self._group.links.send_from(rank, updated)
            self._kept.renew(owners, self._states_from)
        self._drop_others()

    def _open(self, *, is_open: bool) -> None:
        """Whether the states may be read."""
        optimizer = self._optimizer()
        assert optimizer is not None
        if not isinstance(optimizer.state, StatesOfShare):
            # At the first step, and after loading: some optimizers make their states when they are made.
            optimizer.state = StatesOfShare(optimizer.state, self._collect)
        optimizer.state.is_open = is_open

    def _before_state_dict(self, _: torch.optim.Optimizer) -> None:
        self._collect()

    def _collect(self) -> None:
        """The states of all ranks are there, until the next step."""
        optimizer = self._optimizer()
        assert optimizer is not None
        if threading.current_thread() is not threading.main_thread():
            raise self._refuse(
                "a thread reads the states of an optimizer, which are sharded and collected from all ranks in step"
            )
        self._open(is_open=True)
        owners = self.owners()
        self._group.agree("the states of an optimizer", {"the optimizer": number_of(type(optimizer).__name__)})
        for rank in range(self._group.size):
            theirs = [p for p, owner in owners if owner == rank]
            states = self._states_from(rank, theirs)
            if rank != self._group.rank:
                optimizer.state.update({p: state for p, state in zip(theirs, states, strict=True) if state})
        # In the order of the parameters, in which a run on one card enters them.
        in_order = [(p, optimizer.state.pop(p)) for p, _ in owners if p in optimizer.state]
        optimizer.state.update(in_order)
        self._is_collected = True

    def _states_from(self, rank: int, parameters: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        """The states of these parameters of one rank, on all ranks; empty ones where there are none."""
        optimizer, is_mine = self._optimizer(), rank == self._group.rank
        assert optimizer is not None
        buffer = io.BytesIO()
        if is_mine:
            # By position, since a parameter is another object on each rank; at the host, since each rank's card is its own.
            torch.save([_moved(optimizer.state[p], "cpu") if p in optimizer.state else {} for p in parameters], buffer)
        content = self._group.links.bytes_from(rank, buffer.getvalue())
        found = [] if is_mine else torch.load(io.BytesIO(content), weights_only=True)
        return [
            {
                # Where torch keeps it: the count of steps stays at the host unless the optimizer is capturable or fused.
                name: value.to(parameter.device) if isinstance(value, torch.Tensor) and value.dim() else value
                for name, value in state.items()
            }
            for parameter, state in zip(parameters, found or [{}] * len(parameters), strict=True)
        ]

    def _after_state_dict(self, *_: Any) -> None:
        self._drop_others(are_kept=True)

    def _drop_others(self, *, are_kept: bool = False) -> None:
        optimizer = self._optimizer()
        assert optimizer is not None
        self._open(is_open=True)
        theirs = [p for p, rank in self.owners() if rank != self._group.rank and p in optimizer.state]
        states = {parameter: optimizer.state.pop(parameter) for parameter in theirs}
        self._is_collected = False
        if are_kept:
            self._kept.note(states)
        self._open(is_open=False)


def _settings(group: dict[str, Any]) -> list[tuple[str, Any]]:
    """What a group says besides its parameters, as far as it is of numbers and texts; tensors of a card would be waited for."""

    def said(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return [said(each) for each in value]
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            return value.tolist()
        return value if isinstance(value, int | float | complex | str | None) else type(value).__name__

    return sorted((name, said(value)) for name, value in group.items() if name != "params")


def _moved(state: dict[str, Any], device: str) -> dict[str, Any]:
    return {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in state.items()}
