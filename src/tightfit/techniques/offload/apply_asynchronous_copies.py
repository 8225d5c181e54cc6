"""Puts `asynchronous_copies` on a program: see `tightfit.techniques.offload.asynchronous_copies` for what it is and where it comes from."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch

from tightfit.engine.batch_copies import BatchCopies
from tightfit.engine.host_slab import unregister_gone
from tightfit.engine.slab_notes import notes_on
from tightfit.errors import ApplyError
from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption, the_only
from tightfit.techniques.wrappers.first_order import are_transforms_active
from tightfit.techniques.wrappers.forwards import OnlyHere
from tightfit.torch_hooks.manifest import GRAPH_TASK_ID, NUM_DISPATCH_MODES
from tightfit.torch_hooks.tensor_moves import on_tensor_moves


def apply_asynchronous_copies(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Makes the program's copies to the model's card.

    Raises:
        ApplyError: the model has no parameters, or they are on several devices.
    """
    settings = the_only(chosen).settings
    devices = {parameter.device for parameter in session.model.parameters()} - {torch.device("cpu")}
    if len(devices) > 1:
        raise ApplyError("the parameters are on several devices; leave asynchronous_copies out")
    device = next(iter(devices), torch.device("cpu"))
    copies = BatchCopies(
        host_bytes=int(settings["host_bytes"]), card_bytes=int(settings.get("card_bytes", 0)), device=device
    )
    owner = ProgramCopies(copies, device, session.statistics, session.notes.append)
    session.when_undone(unregister_gone)
    session.when_undone(copies.end)
    # The model's forward keeps the owner, which torch's names hold weakly.
    session.wrap_forward(session.model, owner.around_forward)
    session.when_undone(on_tensor_moves(owner))
    if device.type != "cuda":
        # On the host a tensor is its own copy.
        owner.end()


@final
class ProgramCopies(OnlyHere):
    """Makes the copies of dense tensors from the host to `device` that the program asks for outside of its model, with the values that they have when it asks.

    Nothing is made where somebody would see another operation than torch's own (autograd, modes, transforms of torch.func, subclasses), and nothing any more once the program
    orders its work by the waiting itself: by streams of its own, or copies to the host that are waited for by nothing else.
    """

    def __init__(
        self,
        copies: BatchCopies,
        device: torch.device,
        statistics: "dict[str, int]",
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._copies = copies
        self._device = device
        self._statistics = statistics
        self._tell = tell
        self._is_over = False
        self._inside = threading.local()
        # A trace has modes of its own.
        self._num_modes = _num_modes()

    def end(self) -> None:
        """Leaves all copies to torch from now on."""
        self._is_over = True

    def around_forward(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What the model's forward copies by itself is left to torch: it may be run again."""
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        was_inside = getattr(self._inside, "value", False)
        self._inside.value = True
        try:
            return forward(*args, **kwargs)
        finally:
            self._inside.value = was_inside

    def copies(self, target: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """As in `TensorMoveOwner`: a copy to the host that is over when the stream is, which every copy to the card has waited for so far."""
        source = args[0] if args else kwargs.get("src")
        is_beside = args[1] if len(args) > 1 else kwargs.get("non_blocking", False)
        if not is_beside or self._is_over:
            return
        # A mode of the program's would see who asks for a device.
        is_seen = _num_modes() != self._num_modes
        if is_seen or (isinstance(source, torch.Tensor) and source.device.type != "cpu" == target.device.type):
            self._stop("copies to the host that it does not wait for")

    def moved(self, tensor: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
        """As in `TensorMoveOwner`."""
        if self._is_over or not self._is_asked(tensor, args, kwargs):
            return None
        if not self._is_alone():
            self._stop("streams of its own")
            return None
        try:
            copied = self._copies.copy(tensor)
        except ApplyError as error:
            # The host has no memory for the ring.
            self._stop_since(str(error))
            return None
        if copied is not None:
            self._count()
        return copied

    def _is_asked(self, tensor: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether `to` asks for a plain copy to the card that torch would wait for; whether the program counts on the waiting is seen here too."""
        if _num_modes() != self._num_modes:
            # A mode of the program's would see who asks for a device.
            if any(each is True for each in (*args, *kwargs.values())):
                self._stop("copies that are not waited for under modes of its own")
            return False
        if tensor.device.type != "cpu":
            if _leaves_without_waiting(args, kwargs):
                self._stop("copies to the host that it does not wait for")
            return False
        asked = _asked(tensor, args, kwargs) if type(tensor) is torch.Tensor else None
        if asked is None or asked[0] != self._device or not self._is_plain(tensor):
            return False
        return not (asked[1] and tensor.is_pinned())

    def _is_plain(self, tensor: torch.Tensor) -> bool:
        """Whether a copy of `tensor` is all that anybody sees of one."""
        return (
            not getattr(self._inside, "value", False)
            and GRAPH_TASK_ID.call() == -1
            and not torch.is_inference_mode_enabled()
            and not are_transforms_active()
            and is_dense(tensor)
        )

    def _is_alone(self) -> bool:
        """Whether the computation is on the card's first stream, and not recorded to be replayed."""
        if self._device.type != "cuda":
            return True
        stream = torch.cuda.current_stream(self._device)
        return bool(stream == torch.cuda.default_stream(self._device)) and not torch.cuda.is_current_stream_capturing()

    def _stop(self, why: str) -> None:
        self._stop_since(f"the program has {why}")

    def _stop_since(self, why: str) -> None:
        if not self._is_over:
            self.end()
            self._tell(f"{why}: batches are copied as the program copies them, and waited for")

    def _count(self) -> None:
        self._statistics["batch copies"] = number = self._statistics.get("batch copies", 0) + 1
        slab = self._copies.slab
        if number == 1 and slab is not None:
            for note in notes_on(self._device, [slab], "batches"):
                self._tell(note)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is bytes in a row, with a layout that a copy of it keeps, and no derivative looks at it."""
    is_bytes = tensor.layout == torch.strided and not (
        tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    )
    # Older releases have names of dimensions, which are copied too.
    if not is_bytes or not tensor.nbytes or any(getattr(tensor, "names", ())):
        return False
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    in_format = tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])
    return tensor.is_contiguous() or in_format


def _num_modes() -> tuple[int, int]:
    return NUM_DISPATCH_MODES.call(), torch._C._len_torch_function_stack()


def _leaves_without_waiting(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether `to`, of a tensor on a card, is a copy to the host that is not waited for."""
    given = (*args, *kwargs.values())
    if not any(each is True for each in given):
        return False
    targets = [each.device if isinstance(each, torch.Tensor) else each for each in given]
    return any(str(each).partition(":")[0] == "cpu" for each in targets if isinstance(each, str | torch.device))


def _asked(tensor: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[torch.device, bool] | None:
    """The device of `tensor.to(*args, **kwargs)`, and whether it is not to wait; None where it asks for anything else."""
    if len(args) > 3 or not set(kwargs) <= {"device", "dtype", "non_blocking", "copy"}:
        return None
    values = {**dict(zip(("device", "dtype", "non_blocking"), args, strict=False)), **kwargs}
    if len(values) < len(args) + len(kwargs):
        # One that is given twice is an error of torch's.
        return None
    device, dtype = values.get("device"), values.get("dtype")
    if (
        not isinstance(device, str | int | torch.device)
        or isinstance(device, bool)
        or dtype not in (None, tensor.dtype)
    ):
        return None
    is_beside, copy = values.get("non_blocking", False), values.get("copy", False)
    if not (isinstance(is_beside, bool) and isinstance(copy, bool)):
        return None
    return _with_number(device), is_beside


def _with_number(device: str | int | torch.device) -> torch.device:
    try:
        found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except RuntimeError:
        # Torch is asked, and says what is wrong.
        return torch.device("meta")
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found
