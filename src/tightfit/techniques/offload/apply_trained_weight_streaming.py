"""Puts `trained_weight_streaming` on live objects: see `tightfit.techniques.offload.trained_weight_streaming` for what it is and where it comes from."""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from tightfit.engine.descriptors import close_gone
from tightfit.engine.disk.disk_copies import DiskSpace
from tightfit.engine.disk.disk_sizes import buffer_bytes_for, in_pages
from tightfit.engine.slab_notes import notes_on
from tightfit.engine.weights.streamed_weights import StreamedWeights, Twin
from tightfit.engine.weights.trained_files import TrainedFiles
from tightfit.errors import ApplyError
from tightfit.techniques.offload.apply_weight_streaming import stream_weights
from tightfit.techniques.offload.shown_states import ShownStates
from tightfit.techniques.offload.streamable import streamable
from tightfit.techniques.offload.twin_updates import update_twins
from tightfit.techniques.optimizer.at_host.host_codec import HostCodec
from tightfit.techniques.optimizer.states.quantized_states import EncodedStates, encode_now
from tightfit.techniques.optimizer.states.state_sizes import LOST_STATES, MIN_ON_DISK
from tightfit.techniques.optimizer.updates.optimizer_kernels import (
    UPDATED_ON_HOST,
    goes_wrong_at_host,
    has_momentum,
    is_dense,
)
from tightfit.techniques.optimizer.updates.optimizer_steps import (
    beside,
    check_separable,
    groups_by_parameter,
    step_of,
    update_within_step,
)
from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption
from tightfit.techniques.wrappers.far_tiers import by_tier, disk_space_for
from tightfit.torch_hooks.weak_references import WeakTable

_NAME = "trained_weight_streaming"
_LOST = "; what was trained since the last checkpoint is lost: load that, and leave weights on disk out (a smaller --disk), or choose another disk with --disk-folder"
# The implementation on the host; it takes no flags that are for a card.
_FLAGS = {"fused": True, "foreach": False, "capturable": False}


def apply_trained_weight_streaming(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Moves the weights of the blocks, their gradients and their optimizer states to the host, and wraps the forwards of the blocks.

    Raises:
        ApplyError: a block is not there or has nothing that can be streamed, the parameters are on several devices, an optimizer cannot be stepped apart, or the
            host has too little memory.
    """
    choice, *others = chosen
    if others:
        places = [each.where for each in chosen]
        raise ApplyError(
            f"the plan has {_NAME} at {' and '.join(places)}; it is for one model at a time", places=places
        )
    for optimizer in session.optimizers:
        check_separable(optimizer, _NAME)
        if any(group.get("capturable") for group in optimizer.param_groups):
            raise ApplyError(
                f"{type(optimizer).__name__}(capturable=True) updates on the card alone; leave {_NAME} out of the plan"
            )
    places = [f"{choice.where}.{path}" for path in choice.settings["blocks"]]
    smallest_bytes = int(choice.settings["smallest_bytes"])
    blocks = {}
    for place in places:
        module = session.module(place)
        blocks[module] = (place, streamable(session.model, module, smallest_bytes, with_trained=True))
    if not any(parameters for _, parameters in blocks.values()):
        raise ApplyError(f"the blocks of {choice.where} have no weights that can be streamed", places=[choice.where])
    _check_fused(session, [p for _, parameters in blocks.values() for p in parameters])
    disk = _weights_on_disk(session, choice, [p for _, parameters in blocks.values() for p in parameters])
    streamed = stream_weights(
        session,
        blocks,
        (),
        host_bytes=int(choice.settings["host_bytes"]),
        technique=_NAME,
        are_trained=True,
        disk=disk,
        on_disk=() if disk is None else blocks,
    )
    moved = WeakTable[torch.Tensor, None]()
    for _, parameters in blocks.values():
        for parameter in parameters:
            moved[parameter] = None
    codec = _states_on_disk(session, choice, streamed.device)
    shown = ShownStates(streamed.device) if codec is None and streamed.twins() else None
    for optimizer in session.optimizers:
        _states_to(optimizer, moved, torch.device("cpu"), shown)
        session.when_undone(functools.partial(_states_back, weakref.ref(optimizer), moved, shown))
        is_fused = choice.settings.get("kernel") == "fused" and type(optimizer).__name__ in UPDATED_ON_HOST
        at_once = int(choice.settings.get("at_once_bytes", 0))
        updates = _Updates(optimizer, streamed, moved, shown, is_fused=is_fused, at_once_bytes=at_once)
        if codec is not None:
            refuse = functools.partial(session.verdict.refuse, technique=_NAME)
            window = int(choice.settings["window_bytes"])
            updates.encoded = EncodedStates(optimizer, codec, window, refuse, only=moved, update_one=updates.update_one)
            encode_now(session, optimizer, updates.encoded)
        update_within_step(session, optimizer, updates)


def _check_fused(session: Session, parameters: Collection[torch.Tensor]) -> None:
    """Checks that no optimizer of the program's would update what is at the host by an implementation that goes wrong there.

    Raises:
        ApplyError: one would.
    """
    for optimizer in session.optimizers:
        held = [p for group in optimizer.param_groups if group.get("fused") for p in group["params"]]
        wrong = {p for p in held if goes_wrong_at_host(optimizer, p.dtype)}
        found = next((p.dtype for p in parameters if p in wrong), None)
        if found is not None:
            raise ApplyError(
                f"torch's fused {type(optimizer).__name__} goes wrong at the host in {found}; leave fused=True out, or {_NAME}"
            )


def _weights_on_disk(session: Session, choice: ChosenOption, parameters: Collection[torch.Tensor]) -> DiskSpace | None:
    tier = str(choice.settings.get("weights", "host"))
    if tier not in ("host", "disk"):
        raise ApplyError(f"weights={tier!r} is neither host nor disk", places=[choice.where])
    if tier == "host":
        return None
    num_bytes = sum(in_pages(p.untyped_storage().nbytes()) for p in parameters)
    verdict = session.verdict
    return DiskSpace(
        num_bytes=num_bytes,
        buffer_bytes=buffer_bytes_for(num_bytes),
        folder=session.disk_folder,
        on_failure=lambda how: verdict.refuse(f"weights {how}", technique=_NAME),
        lost=_LOST,
    )


def _states_on_disk(session: Session, choice: ChosenOption, card: torch.device) -> HostCodec | None:
    _, on_disk = by_tier([choice])
    if not on_disk:
        return None
    disk = disk_space_for(session, on_disk, _NAME, "optimizer states", LOST_STATES)
    assert disk is not None
    disk = dataclasses.replace(disk, buffer_bytes=buffer_bytes_for(disk.num_bytes))
    least = int(choice.settings.get("least_elements", MIN_ON_DISK))
    codec = HostCodec(torch.device("cpu"), 0, least_elements=least, disk=disk, card=card)
    # When no state is on disk any more.
    session.when_undone(close_gone)
    session.notes.extend(notes_on(card, [codec.slab], "optimizer states"))
    return codec


def _states_to(
    optimizer: torch.optim.Optimizer,
    moved: WeakTable[torch.Tensor, None],
    device: torch.device | None,
    shown: ShownStates | None,
) -> None:
    """Moves the states of parameters to `device`, or to where the parameter is; at the host they may be `shown` as tensors of the card."""
    # Step counters of a fused optimizer are beside the parameters, those of others always at the host.
    moves_counters = any(group.get("fused") for group in optimizer.param_groups)
    # Of a table that is refused to the program (`ranks/sharded`) too.
    for parameter, states in list(dict.items(optimizer.state)):
        if isinstance(parameter, torch.Tensor) and parameter in moved and isinstance(states, dict):
            for name, value in list(dict.items(states)):
                if isinstance(value, torch.Tensor) and (value.shape == parameter.shape or moves_counters):
                    states[name] = value.to(parameter.device if device is None else device)
            if shown is not None and device is not None:
                shown.put(states, dict(dict.items(states)), parameter)


def _states_back(
    optimizer_of: "weakref.ref[torch.optim.Optimizer]", moved: WeakTable[torch.Tensor, None], shown: ShownStates | None
) -> None:
    optimizer = optimizer_of()
    if optimizer is None:
        return
    if shown is not None:
        for parameter in [p for p in optimizer.state if isinstance(p, torch.Tensor) and p in moved]:
            shown.take_back(optimizer.state[parameter])
    _states_to(optimizer, moved, None, shown)


class _Updates:
    """The updates of what is at the host, within the step of one optimizer: by its own implementation, or by the fused one for the host."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        streamed: StreamedWeights,
        moved: Collection[torch.Tensor] | WeakTable[torch.Tensor, None],
        shown: ShownStates | None,
        *,
        is_fused: bool,
        at_once_bytes: int = 0,
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._step = step_of(optimizer)
        self._streamed = streamed
        self._moved = moved
        self._shown = shown
        self._is_fused = is_fused
        # Of weights that are on disk so many are in memory at a time, or one.
        self._at_once_bytes = at_once_bytes
        self.encoded: EncodedStates | None = None
        """Of states that are on disk between the steps: updates are made one by one, while the states of the next parameters come."""

    def __call__(self) -> Iterable[torch.Tensor]:
        """Has all weights and gradients at the host; the parameters that are updated here, which the step itself is to skip."""
        self._streamed.end_pass()
        self._streamed.check_views()
        optimizer = self._live()
        twins = self._twins()
        if self.encoded is not None:
            return self._one_by_one(optimizer, self.encoded)
        if isinstance(self._streamed.files, TrainedFiles):
            return self._from_disk(optimizer, self._streamed.files)
        if twins:
            own = groups_by_parameter(optimizer)
            taken = [p for p in own if p in self._moved and p in twins and p.grad is not None]
            update_twins(optimizer, self._step, {p: twins[p] for p in taken}, self._flags_for, self._shown)
            return taken
        groups = [
            self._fused(group, taken) for group in optimizer.param_groups for taken in self._taken_together(group)
        ]
        if groups:
            self._step(beside(optimizer, groups, optimizer.state))
        return [parameter for group in groups for parameter in group["params"]]

    def _taken_together(self, group: dict[str, Any]) -> list[list[torch.Tensor]]:
        state = self._live().state
        taken = [p for p in group["params"] if self._can_be_fused(p, group)]
        later = [p for p in taken if has_momentum(state.get(p, {}))]
        first = [p for p in taken if not has_momentum(state.get(p, {}))]
        return [each for each in (later, first) if each]

    def _from_disk(self, optimizer: torch.optim.Optimizer, files: TrainedFiles) -> list[torch.Tensor]:
        """Updates the weights that are on disk, as many at a time as may be in memory."""
        group_of, parts = groups_by_parameter(optimizer), files.away()
        if self._streamed.device.type == "cuda":
            # A weight that was written to on the card may be on its way.
            torch.cuda.current_stream(self._streamed.device).synchronize()
        taken = [p for p in group_of if p in self._moved and p in parts and p.grad is not None]
        # Gradients that others refer to are on the card.
        apart = [p for p in taken if p.grad is not None and p.grad.device != p.device]
        for parameter in apart:
            with files.updated([parts[parameter]]):
                twin = Twin(weight=parameter.detach(), gradient=None)
                update_twins(optimizer, self._step, {parameter: twin}, self._flags_for, None)
        for some in _at_once([p for p in taken if p not in set(apart)], self._at_once_bytes):
            groups: list[dict[str, Any]] = []
            for index, group in enumerate(optimizer.param_groups):
                own = {**group, "params": [p for p in some if group_of[p] == index]}
                fused = [self._fused(group, together) for together in self._taken_together(own)]
                done = {p for each in fused for p in each["params"]}
                rest = {**own, "params": [p for p in own["params"] if p not in done]}
                groups += [each for each in (*fused, rest) if each["params"]]
            with files.updated([parts[p] for p in some]):
                self._step(beside(optimizer, groups, optimizer.state))
        return taken

    def _one_by_one(self, optimizer: torch.optim.Optimizer, encoded: EncodedStates) -> list[torch.Tensor]:
        groups = groups_by_parameter(optimizer)
        taken = [parameter for parameter in groups if parameter in self._moved and parameter.grad is not None]
        with encoded.expecting(taken):
            for parameter in taken:
                encoded.update(parameter, groups[parameter])
        return taken

    def update_one(self, parameter: torch.Tensor, group: int) -> None:
        """Updates one parameter, whose states are at the host."""
        optimizer = self._live()
        if (twin := self._streamed.twins().get(parameter)) is not None:
            update_twins(optimizer, self._step, {parameter: twin}, self._flags_for, self._shown)
            return
        own = optimizer.param_groups[group]
        given = self._fused(own, [parameter]) if self._can_be_fused(parameter, own) else {**own, "params": [parameter]}
        files = self._streamed.files
        part = files.away().get(parameter) if isinstance(files, TrainedFiles) else None
        with files.updated([part]) if isinstance(files, TrainedFiles) and part else contextlib.nullcontext():
            self._step(beside(optimizer, [given], optimizer.state))

    def _twins(self) -> dict[torch.Tensor, Twin]:
        twins = self._streamed.twins()
        if twins and self._streamed.device.type == "cuda":
            # Kernels write to what is at the host too: a norm's factor, a scaler's.
            torch.cuda.current_stream(self._streamed.device).synchronize()
        return twins

    def _flags_for(self, twin: torch.Tensor, states: Any, group: dict[str, Any]) -> dict[str, Any]:
        optimizer = self._live()
        is_fused = (
            self._is_fused
            and getattr(optimizer, "grad_scale", None) is None
            and not goes_wrong_at_host(optimizer, twin.dtype)
        )
        return self._fused(group, [twin]) if is_fused and _can_be_fused(twin, states, group) else group

    def _live(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def _can_be_fused(self, parameter: torch.Tensor, group: dict[str, Any]) -> bool:
        optimizer = self._live()
        # A fused optimizer of the program's unscales gradients itself.
        if not self._is_fused or getattr(optimizer, "grad_scale", None) is not None or parameter not in self._moved:
            return False
        if goes_wrong_at_host(optimizer, parameter.dtype):
            return False
        return _can_be_fused(parameter, optimizer.state.get(parameter, {}), group)

    def _fused(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> dict[str, Any]:
        return {**group, **{name: value for name, value in _FLAGS.items() if name in group}, "params": parameters}


def _at_once(parameters: Sequence[torch.Tensor], num_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Some after others, each time up to `num_bytes`, or one."""
    some: list[torch.Tensor] = []
    for parameter in parameters:
        if some and sum(p.untyped_storage().nbytes() for p in (*some, parameter)) > num_bytes:
            yield some
            some = []
        some.append(parameter)
    if some:
        yield some


def _can_be_fused(parameter: torch.Tensor, states: Any, group: dict[str, Any]) -> bool:
    gradient = parameter.grad
    if gradient is None or "fused" not in group or group.get("capturable"):
        return False
    if gradient.layout != torch.strided or gradient.dtype != parameter.dtype or not parameter.is_floating_point():
        return False
    if not is_dense(parameter) or gradient.stride() != parameter.stride() or gradient.device != parameter.device:
        return False
    if any(isinstance(value, torch.Tensor) for name, value in group.items() if name != "params"):
        return False
    return all(
        type(value) is torch.Tensor and value.stride() == parameter.stride()
        for value in dict.values(states)
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    )
