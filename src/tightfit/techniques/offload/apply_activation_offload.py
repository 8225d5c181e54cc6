"""Puts `activation_offload` on live objects: see `tightfit.techniques.offload.activation_offload` for what it is and where it comes from."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tightfit.effects.ambient import (
    are_saved_tensor_hooks_refused,
    may_saved_tensors_be_written,
    takes_saved_tensor_hooks,
)
from tightfit.engine.saved_storage import SavedStorage
from tightfit.engine.saved_tensors import SavedTensors
from tightfit.errors import ApplyError
from tightfit.techniques.offload.relative_places import place_from
from tightfit.techniques.session import Session, Verdict
from tightfit.techniques.technique import Choice, check_each
from tightfit.techniques.wrappers.forwards import OnlyHere
from tightfit.torch_hooks.manifest import GRAPH_TASK_ID, TOP_SAVED_HOOKS

_NAME = "activation_offload"
_WORD = 8
_PIECE = 1 << 20


def apply_activation_offload(session: Session, chosen: Sequence[Choice]) -> None:
    """Wraps the forward of each block, and of each that follows one.

    Raises:
        ApplyError: a place is not there, the parameters are on several devices, or the host has too little memory.
    """
    moving = dict(check_each(chosen, lambda choice: (session.module(choice.where), choice)))
    borders = dict.fromkeys(check_each(chosen, lambda choice: session.module(_following(choice))))
    device = _device_of(session)
    checks = _Checks(session.verdict, session.check_steps * len(moving))
    saved = SavedTensors(
        device,
        sum(int(choice.settings["host_bytes"]) for choice in chosen),
        smallest_bytes=min(int(choice.settings["smallest_bytes"]) for choice in chosen),
        statistics=session.statistics,
        when_left=checks.left,
        when_back=checks.back,
    )
    session.when_undone(saved.end)
    if device.type == "cuda" and not saved.slab.is_registered:
        session.notes.append(
            "the host memory for activations could not be page-locked (a limit on locked memory?): copies will be slow"
        )
    for module in {**moving, **borders}:
        choice = moving.get(module)
        where = "" if choice is None else choice.where
        session.wrap_forward(module, _Around(saved, session.verdict, where=where, moves=choice is not None).run)


def _following(choice: Choice) -> str:
    return place_from(choice.where, str(choice.settings["following"]))


def _device_of(session: Session) -> torch.device:
    devices = {parameter.device for parameter in session.model.parameters()}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "none"
        raise ApplyError(f"activations are offloaded from one device, and the parameters of this model are on {found}")
    return devices.pop()


class _Around(OnlyHere):
    """The wrapper around a block's forward. Belongs to one model: a copy saves its tensors by itself."""

    def __init__(self, saved: SavedTensors, verdict: Verdict, *, where: str, moves: bool) -> None:
        self._saved = saved
        self._verdict = verdict
        self._where = where
        self._moves = moves

    def run(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Calls `forward`, whose saved tensors are offloaded."""
        if _is_left_alone():
            return forward(*args, **kwargs)
        try:
            with self._saved.call(moves=self._moves):
                return forward(*args, **kwargs)
        except RuntimeError as error:
            if not are_saved_tensor_hooks_refused(error):
                raise
            raise self._verdict.refuse(
                f"{self._where or 'a block that follows an offloaded one'} transforms code (torch.func) that takes no hooks for saved tensors; "
                "leave offload out: tightfit plan --without activation_offload",
                technique=_NAME,
                places=[self._where] if self._where else [],
            ) from error


def _is_left_alone() -> bool:
    """Whether nothing is saved here, others have hooks for what is, or hooks cannot be."""
    return (
        torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or may_saved_tensors_be_written()
        or not takes_saved_tensor_hooks()
        # A checkpoint around the block, or offload of the program's own.
        or TOP_SAVED_HOOKS.value()(False) is not None
        # What is computed again in a backward pass is needed at once.
        or GRAPH_TASK_ID.value()() != -1
    )


class _Checks:
    """Compares checksums of what left the card with those of what came back, in the first `num_left` storages' calls."""

    def __init__(self, verdict: Verdict, num_calls: int) -> None:
        self._verdict = verdict
        self._num_calls = num_calls
        self._calls: set[int] = set()

    def left(self, storage: SavedStorage, whole: torch.Tensor) -> None:
        """Notes the checksum of a storage that leaves."""
        number = storage.call.number
        if number in self._calls or len(self._calls) < self._num_calls:
            self._calls.add(number)
            storage.checksum = _checksum(whole)

    def back(self, storage: SavedStorage, whole: torch.Tensor) -> None:
        """Compares it with that of what has come back.

        Raises:
            ApplyError: they differ.
        """
        expected, storage.checksum = storage.checksum, None
        if expected is not None and not torch.equal(_checksum(whole), expected):
            raise self._verdict.refuse(
                "an activation came back from the host with other values; leave offload out: tightfit plan --without activation_offload",
                technique=_NAME,
            )


def _checksum(whole: torch.Tensor) -> torch.Tensor:
    """Two sums of the bytes `whole`, one of which changes when words change places; int64, shape (2,). Sums of integers are exact in any order."""
    with torch.no_grad():
        words = whole[: len(whole) // _WORD * _WORD].view(torch.int64)
        rest = whole[len(words) * _WORD :].sum(dtype=torch.int64)
        total = torch.stack([rest, rest])
        # In pieces: the products take as much memory as what they are made of.
        for number, piece in enumerate(words.split(_PIECE), 1):
            places = torch.arange(1, len(piece) + 1, device=piece.device)
            total += torch.stack([piece.sum(), (piece * places).sum() * number])
        return total
