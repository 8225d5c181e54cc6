"""Runs calls of blocks with what they save for backward going to the host, for every technique that moves some of it.

All of them share the engine of their session, since the calls before and after a call are the clock of its copies.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tightfit.capture.observe.host_python import spends
from tightfit.cost.host_python import HostWork
from tightfit.effects.ambient import (
    are_saved_tensor_hooks_refused,
    may_saved_tensors_be_written,
    modes_of_program,
    takes_saved_tensor_hooks,
)
from tightfit.effects.bytecode.asked_of_saved import told
from tightfit.effects.state import devices_of
from tightfit.effects.values.saved_hooks import top_saved_hooks
from tightfit.engine.disk.disk_copies import DiskSpace
from tightfit.engine.saved.block_call import Selection
from tightfit.engine.saved.saved_storage import SavedStorage
from tightfit.engine.saved.saved_tensors import SavedTensors
from tightfit.engine.slab_notes import notes_on
from tightfit.errors import ApplyError
from tightfit.techniques.wrappers.forwards import Around, OnlyHere, through
from tightfit.torch_hooks.manifest import GRAPH_TASK_ID
from tightfit.torch_hooks.weak_references import WeakTable

if TYPE_CHECKING:
    from tightfit.techniques.session import Session, Verdict

_WORD = 8
_PIECE = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MovedCalls:
    """The calls of one module that move what `selection` names of all that is saved inside; `inside` runs around its forward, where the hooks are on."""

    module: torch.nn.Module
    where: str
    selection: Selection
    inside: Around = through


def selection_of(settings: Mapping[str, Any]) -> Selection:
    """What a choice with these settings moves."""
    counts = tuple((int(num_bytes), int(number)) for num_bytes, number in settings.get("storages", ()))
    share = float(settings.get("share", 1.0))
    return Selection(
        smallest_bytes=int(settings["smallest_bytes"]),
        to_disk=settings.get("tier") == "disk",
        counts=counts,
        share=share,
    )


def offload_calls(
    session: "Session",
    technique: str,
    moved: Sequence[MovedCalls],
    following: Sequence[torch.nn.Module],
) -> None:
    """Wraps the forwards of the modules, and those of the modules that are called after them, whose calls are the time of their copies.

    `engine_of` has to be called before.
    """
    shared: _Shared = session.shared[_Shared]
    shared.checks.num_calls += session.check_steps * len(moved)
    for each in moved:
        around = _Around(
            shared.saved, session.verdict, technique, where=each.where, selection=each.selection, inside=each.inside
        )
        session.wrap_forward(each.module, around.run)
        shared.borders[each.module] = None
    for module in following:
        # The end of a call that moves something is a border too.
        if module not in shared.borders:
            shared.borders[module] = None
            session.wrap_forward(module, _Around(shared.saved, session.verdict, technique).run)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class _Shared:
    """What the techniques of one session have together. `borders` are the modules that are wrapped."""

    saved: SavedTensors
    checks: "_Checks"
    # A block that the program takes out of its model is gone with its weights.
    borders: WeakTable[torch.nn.Module, None] = dataclasses.field(default_factory=WeakTable)


def engine_of(session: "Session", host_bytes: int, disk: DiskSpace | None = None) -> SavedTensors:
    """The engine of a session, with so much more host memory, and with this space on disk.

    Raises:
        ApplyError: the parameters are on several devices, or the host has too little memory or the disk too little space.
    """
    shared = session.shared.get(_Shared)
    if shared is not None:
        shared.saved.moves.add_host_memory(host_bytes)
    else:
        device = _device_of(session)
        checks = _Checks(session.verdict)
        saved = SavedTensors(
            device,
            host_bytes,
            statistics=session.statistics,
            when_left=checks.left,
            when_back=checks.back,
            refuse=checks.refuse,
        )
        shared = session.shared[_Shared] = _Shared(saved=saved, checks=checks)
        session.when_undone(saved.end)
    if disk is not None:
        shared.saved.moves.add_disk(disk)
    slabs = (
        [shared.saved.moves.slab]
        if shared.saved.moves.disk is None
        else [shared.saved.moves.slab, shared.saved.moves.disk]
    )
    notes = notes_on(_device_of(session), slabs, "activations")
    session.notes.extend(note for note in notes if note not in session.notes)
    return shared.saved


def _device_of(session: "Session") -> torch.device:
    devices = devices_of(session.model.parameters())
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "none"
        raise ApplyError(f"activations are offloaded from one device, and the parameters of this model are on {found}")
    return devices.pop()


class _Around(OnlyHere):
    """The wrapper around a block's forward. Belongs to one model: a copy saves its tensors by itself."""

    def __init__(
        self,
        saved: SavedTensors,
        verdict: "Verdict",
        technique: str,
        *,
        where: str = "",
        selection: Selection | None = None,
        inside: Around = through,
    ) -> None:
        self._saved = saved
        self._verdict = verdict
        self._technique = technique
        self._where = where
        self._selection = selection
        self._inside = inside

    def run(self, forward: Around, /, *args: Any, **kwargs: Any) -> Any:
        """Calls `forward`, whose saved tensors are offloaded."""
        if self._is_left_alone():
            return self._inside(forward, *args, **kwargs)
        if self._selection is not None:
            spends(HostWork.OFFLOADED_CALL)
        try:
            with self._saved.call(self._selection, label=self._technique):
                result = self._inside(forward, *args, **kwargs)
        except RuntimeError as error:
            if not are_saved_tensor_hooks_refused(error):
                raise
            raise self._verdict.refuse(
                f"{self._where or 'a block that follows an offloaded one'} runs a torch.func transform that does not "
                f"support saved-tensor hooks; leave offload out: tightfit plan --without {self._technique}",
                technique=self._technique,
                places=[self._where] if self._where else [],
            ) from error
        if self._saved.question:
            raise self._verdict.refuse(
                f"{self._where or 'a block that follows an offloaded one'} {told(self._saved.question)}; "
                f"leave offload out: tightfit plan --without {self._technique}",
                technique=self._technique,
                places=[self._where] if self._where else [],
            )
        return result

    def _is_left_alone(self) -> bool:
        """Whether nothing is saved here, others have hooks for what is, or hooks cannot be."""
        if (
            torch.compiler.is_compiling()
            or torch.jit.is_tracing()
            or not torch.is_grad_enabled()
            or torch._C._functorch.peek_interpreter_stack() is not None
            or may_saved_tensors_be_written()
            or not takes_saved_tensor_hooks()
            # What is computed again in a backward pass is needed at once.
            or GRAPH_TASK_ID.call() != -1
            # They would see what is asked of saved tensors, and the operators that take these along.
            or modes_of_program()
        ):
            return True
        # A checkpoint around the block, or offload of the program's own.
        hooks = top_saved_hooks()
        return hooks is not None and not self._saved.is_only_border(hooks)


class _Checks:
    """Compares checksums of what left the card with those of what came back, in the first `num_calls` calls."""

    def __init__(self, verdict: "Verdict") -> None:
        self.num_calls = 0
        self._verdict = verdict
        self._calls: set[int] = set()

    def refuse(self, technique: str, why: str) -> ApplyError:
        """The error to raise in a backward pass that cannot be finished."""
        return self._verdict.refuse(
            f"{why}, and offload runs different ones; leave offload out: tightfit plan --without {technique}",
            technique=technique,
        )

    def left(self, storage: SavedStorage, whole: torch.Tensor) -> None:
        """Notes the checksum of a storage that leaves."""
        number = storage.call.number
        if number in self._calls or len(self._calls) < self.num_calls:
            self._calls.add(number)
            storage.checksum = _checksum(whole)

    def back(self, storage: SavedStorage, whole: torch.Tensor) -> None:
        """Compares it with that of what has come back.

        Raises:
            ApplyError: they differ.
        """
        expected, storage.checksum = storage.checksum, None
        if expected is not None and not torch.equal(_checksum(whole), expected):
            technique = storage.call.label
            raise self._verdict.refuse(
                "an activation came back from host memory with other values; leave offload out: tightfit plan "
                f"--without {technique}",
                technique=technique,
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
