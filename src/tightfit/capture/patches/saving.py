"""Patches saving and loading. Virtual tensors hold no data: what `torch.save` would write is kept here, and answers loads.

An object is pickled with its tensors taken out. If one of them is virtual the pickle is kept under a token, and that is what the file or buffer
holds, so that it can be moved and copied; where the program's writes are real, no file is touched, and it is kept under the file's name. If no
tensor is virtual, torch saves as always. Files of safetensors have holes in place of the numbers: any library reads them.
"""

import dataclasses
import importlib.util
import io
import itertools
import os
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.patches.storage_files import install_addresses, write_with_holes
from tightfit.capture.processes.containment.policy import drops_writes
from tightfit.capture.replace import replace
from tightfit.errors.faults import hands_over

_TOKEN = b"tightfit: a save of virtual tensors, number "

loaded_files: list[str] = []
"""The files that the program has loaded tensors from, other than those that it has saved itself."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Unsaved:
    """The metadata of a virtual tensor that was saved."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    requires_grad: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """A pickle, and the tensors that were taken out of it."""

    pickled: bytes
    taken: tuple[Any, ...]


def install(gpu: VirtualGpu) -> None:
    """Patches saving and loading; a process that has done this is not used for anything else."""
    setattr(FakeTensor, "__reduce_ex__", _reduce)  # noqa: B010 - the type checker is right that it is not ours
    saves = _Saves(gpu, writes_files=drops_writes())
    replace(torch, save=saves.save, load=saves.load)
    install_addresses()
    if importlib.util.find_spec("safetensors") is not None:
        saves.install_safetensors()


def _note_loaded(f: Any) -> None:
    if isinstance(f, str | os.PathLike):
        loaded_files.append(os.fspath(f))


def _reduce(tensor: torch.Tensor, protocol: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    # Plain pickling (`copy.deepcopy` of some objects, `pickle.dumps`) makes a new tensor on the card, as it
    # would there.
    return _restore, (_unsaved(tensor),)


def _unsaved(tensor: torch.Tensor) -> _Unsaved:
    return _Unsaved(
        size=tensor.size(),
        stride=tensor.stride(),
        dtype=tensor.dtype,
        is_parameter=isinstance(tensor, torch.nn.Parameter),
        requires_grad=tensor.requires_grad,
    )


def _restore(unsaved: _Unsaved, device: torch.device | str = "cuda") -> torch.Tensor:
    tensor = torch.empty_strided(unsaved.size, unsaved.stride, dtype=unsaved.dtype, device=device)
    if unsaved.is_parameter:
        return torch.nn.Parameter(tensor, unsaved.requires_grad)
    return tensor.requires_grad_(unsaved.requires_grad)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=4)
        self.taken: list[Any] = []
        self.has_virtual = False
        self._places: dict[int, int] = {}
        self._alive: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, torch.Tensor | torch.UntypedStorage | torch.storage.TypedStorage):
            return None
        if id(obj) not in self._places:
            self._places[id(obj)] = len(self.taken)
            # Temporary objects are pickled too, and a later one may get the id of one that was freed.
            self._alive.append(obj)
            self.has_virtual |= isinstance(obj, FakeTensor)
            self.taken.append(_unsaved(obj) if isinstance(obj, FakeTensor) else obj)
        return self._places[id(obj)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, saved: _Saved, device: torch.device) -> None:
        super().__init__(io.BytesIO(saved.pickled))
        self._taken = saved.taken
        self._device = device
        self._restored: dict[int, Any] = {}

    def persistent_load(self, pid: int) -> Any:
        if pid not in self._restored:
            value = self._taken[pid]
            self._restored[pid] = _restore(value, self._device) if isinstance(value, _Unsaved) else value
        return self._restored[pid]


class _Saves:
    """Everything that was saved so far, by the name of its file or the token in its buffer."""

    def __init__(self, gpu: VirtualGpu, *, writes_files: bool) -> None:
        self._gpu = gpu
        self._writes_files = writes_files
        self._saved: dict[str, _Saved] = {}
        self._numbers = itertools.count()
        self._torch_save, self._torch_load = torch.save, torch.load

    @hands_over
    def save(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        """`torch.save`."""
        saved = _take_apart([obj])
        if saved is None:
            self._save_real(obj, f, *args, **kwargs)
            return
        self._assume("torch.save")
        if not self._writes_files and (name := self._name(f)):
            self._saved[name] = saved
        elif isinstance(f, str | os.PathLike):
            with open(f, "wb") as file:
                self._saved[_write_token(file, next(self._numbers))] = saved
        else:
            self._saved[_write_token(f, next(self._numbers))] = saved

    def _save_real(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not self._writes_files or not isinstance(f, str | os.PathLike):
            self._torch_save(obj, f, *args, **kwargs)
            return
        # torch opens files in C++, which would not be seen where Python's functions redirect writes.
        with open(f, "wb") as file:
            self._torch_save(obj, file, *args, **kwargs)

    @hands_over
    def load(self, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        """`torch.load`."""
        saved = self._saved.get(self._key(f)) if self._saved else None
        is_to_card = isinstance(map_location, str | torch.device) and torch.device(map_location).type == "cuda"
        if saved is None:
            _note_loaded(f)
            loaded = self._torch_load(f, "cpu" if is_to_card or map_location is None else map_location, *args, **kwargs)
            return tree_map(_to_card, loaded) if is_to_card else loaded
        is_place = isinstance(map_location, str | torch.device)
        return _Unpickler(saved, torch.device(map_location) if is_place else torch.device("cuda")).load()[0]

    def install_safetensors(self) -> None:
        """Patches `safetensors.torch`, before any code imports its functions by name."""
        import safetensors.torch as library

        save_file, load_file, save, load = library.save_file, library.load_file, library.save, library.load

        def save_file_(tensors: dict[str, torch.Tensor], filename: Any, metadata: Any = None) -> None:
            saved = _take_apart(tensors.values(), tensors)
            if saved is None and self._writes_files:
                # The library opens files in Rust: see `_save_real`.
                data = save(tensors, metadata)
                with open(filename, "wb") as file:
                    file.write(data)
                return
            if saved is None:
                save_file(tensors, filename, metadata)
                return
            self._assume("safetensors")
            if self._writes_files:
                write_with_holes(tensors, filename, metadata)
            else:
                self._saved[str(self._name(filename))] = saved

        def load_file_(filename: Any, device: Any = "cpu", **kwargs: Any) -> dict[str, torch.Tensor]:
            saved = self._saved.get(str(self._name(filename)))
            if saved is not None:
                return _Unpickler(saved, torch.device(device)).load()[0]
            _note_loaded(filename)
            return tree_map(lambda t: t.to(device), load_file(filename, "cpu", **kwargs))

        def save_(tensors: dict[str, torch.Tensor], metadata: Any = None) -> bytes:
            saved = _take_apart(tensors.values(), tensors)
            if saved is None:
                return save(tensors, metadata)
            self._assume("safetensors")
            token = _TOKEN + str(next(self._numbers)).encode()
            self._saved[token.decode()] = saved
            return token

        def load_(data: bytes) -> dict[str, torch.Tensor]:
            saved = self._saved.get(data.decode(errors="replace")) if data.startswith(_TOKEN) else None
            return load(data) if saved is None else _Unpickler(saved, torch.device("cpu")).load()[0]

        replace(library, save_file=save_file_, load_file=load_file_, save=save_, load=load_)

    def _assume(self, what: str) -> None:
        self._gpu.recorder.assume(
            self._gpu.attribution.where(), f"{what}: tensors of the virtual GPU hold no data; no numbers were written"
        )

    def _key(self, f: Any) -> str:
        if not self._writes_files and (name := self._name(f)):
            return name
        if not isinstance(f, str | os.PathLike):
            return _read_token(f)
        with open(f, "rb") as file:
            return _read_token(file)

    @staticmethod
    def _name(f: Any) -> str | None:
        if isinstance(f, str | os.PathLike):
            return os.path.abspath(f)
        name = getattr(f, "name", None)
        return os.path.abspath(name) if isinstance(name, str) else None


def _take_apart(values: Iterable[Any], whole: Any = None) -> _Saved | None:
    """The pickle of `whole` (else of the one value) with its tensors taken out, or None if none of them is virtual."""
    values = list(values)
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump([whole if whole is not None else values[0]])
    except (pickle.PicklingError, AttributeError, TypeError):
        # torch's own error is the one that the script would have got.
        return None
    return _Saved(pickled=file.getvalue(), taken=tuple(pickler.taken)) if pickler.has_virtual else None


def _write_token(f: Any, number: int) -> str:
    token = _TOKEN + str(number).encode()
    f.write(token)
    return token.decode()


def _read_token(f: Any) -> str:
    # The position is restored: where it is no token of ours, torch reads the file from there.
    place = f.tell()
    start = f.read(len(_TOKEN) + 20)
    f.seek(place)
    return start.decode(errors="replace") if start.startswith(_TOKEN) else ""


def _to_card(value: Any) -> Any:
    if isinstance(value, torch.nn.Module):
        return value.cuda()
    return value.to("cuda") if isinstance(value, torch.Tensor) else value
