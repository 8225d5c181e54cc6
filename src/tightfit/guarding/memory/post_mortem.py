"""One file about a run that memory ended: what failed, what was tried, and what held memory at that time."""

import gc
import json
import os
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tightfit.errors import OutputError
from tightfit.guarding.memory.out_of_memory import release_memory
from tightfit.output_files import write_text
from tightfit.planner.plan import Plan
from tightfit.units import format_bytes, parse_bytes

_MOST_KINDS = 50
# As the caching allocator says it (c10/cuda/CUDACachingAllocator.cpp).
_REQUESTED = re.compile(r"Tried to allocate ([0-9.]+) ?([KMGT]iB|bytes)")


class PostMortem:
    """Writes to `folder` what is left of a run whose error is final, of these models and optimizers."""

    def __init__(
        self,
        folder: Path,
        models: Callable[[], Sequence[torch.nn.Module]],
        optimizers: Sequence[torch.optim.Optimizer],
        plans: Sequence[Plan] = (),
    ) -> None:
        self._plans = plans
        self._folder = folder
        self._models = models
        self._optimizers = optimizers

    def added_to(self, error: BaseException, *, step: int, tried: Sequence[str], why: str) -> BaseException:
        """The error with notes that say what was tried, after the file was written. What fails in that is a note of its own, whatever it is."""
        error.add_note(f"tightfit: step {step}: {why}")
        if tried:
            error.add_note("tightfit: tried: " + "; ".join(tried))
        try:
            release_memory()
            models = self._models()
            error.add_note(f"tightfit: {explain(bytes_by_holder(models, self._optimizers))}")
            path = write_post_mortem(
                self._folder,
                error,
                step=step,
                tried=[*tried, why],
                models=models,
                optimizers=self._optimizers,
                plans=self._plans,
            )
            error.add_note(f"tightfit: what would have fitted: {_command()}")
            error.add_note(f"tightfit: more in {path}")
        except OutputError as failed:
            error.add_note(f"tightfit: {failed}")
        except Exception as failed:  # noqa: BLE001 - a card that has failed raises anything from here on, and the program's error is the one to be seen
            error.add_note(f"tightfit: no file was written about it: {type(failed).__name__}: {failed}")
        return error


def write_post_mortem(
    folder: Path,
    error: BaseException,
    *,
    step: int,
    tried: Sequence[str],
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    plans: Sequence[Plan] = (),
) -> Path:
    """Writes `tightfit-out-of-memory-STEP.json` to `folder`, with the rank in the name where there are several, and returns its path.

    Raises:
        OutputError: the file cannot be written.
    """
    held = bytes_by_holder(models, optimizers)
    found: dict[str, Any] = {
        "schema": 1,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "step": step,
        "error": f"{type(error).__name__}: {error}".splitlines()[0],
        "tried": list(tried),
        "devices": {device: {"tensor_bytes": dict(kinds)} for device, kinds in held.items()},
        "largest_tensors": _largest_tensors(),
        # The ladder, as it was predicted: a plan whose peak is above what was free could not help. That of changed choices is not known.
        "plans": [
            {"predicted_device_bytes": None if plan.is_changed else plan.run.peak.device_bytes, "device": plan.device}
            for plan in plans
        ],
        "what_would_have_fitted": _command(),
    }
    if requested := _REQUESTED.search(str(error)):
        found["requested_bytes"] = parse_bytes(requested[1] + requested[2].removesuffix("bytes"))
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for index in _cards():
            found["devices"].setdefault(f"cuda:{index}", {}).update(_counters(index))
    path = _free_path(folder, step)
    write_text(path, json.dumps(found, indent=1))
    return path


def _free_path(folder: Path, step: int) -> Path:
    """Ranks share a folder, and fail at the same step: each has a file. One that another run has left there stays."""
    path = folder / f"tightfit-out-of-memory-{_rank()}{step}.json"
    return path.with_stem(f"{path.stem}-{os.getpid()}") if path.exists() else path


def _rank() -> str:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, num_ranks = str(torch.distributed.get_rank()), torch.distributed.get_world_size()
    else:
        # As torchrun sets them: a program need not have made its process group yet.
        rank, num_ranks = os.environ.get("RANK", ""), int(os.environ.get("WORLD_SIZE") or 1)
    return f"rank{rank}-" if rank.isdigit() and num_ranks > 1 else ""


def bytes_by_holder(
    models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> Mapping[str, Counter[str]]:
    """Bytes of live storages by device, and by what they are: parameters, gradients, buffers, optimizer state, other tensors."""
    kinds: dict[int, str] = {}
    for model in models:
        kinds |= {b.untyped_storage()._cdata: "buffers" for b in model.buffers()}
        kinds |= {p.untyped_storage()._cdata: "parameters" for p in model.parameters()}
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        kinds |= {gradient.untyped_storage()._cdata: "gradients" for gradient in gradients if _is_dense(gradient)}
    for optimizer in optimizers:
        # A program may keep a count there as well. Of the dict's own class: one that makes values when it is read would take memory for them.
        entries = optimizer.state.values()
        states = [value for each in entries for value in (dict.values(each) if isinstance(each, dict) else (each,))]
        kinds |= {value.untyped_storage()._cdata: "optimizer_state" for value in states if _is_dense(value)}
    found: dict[str, Counter[str]] = {}
    seen = set[int]()
    for tensor in _tensors():
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            found.setdefault(str(tensor.device), Counter())[kinds.get(storage._cdata, "other_tensors")] += (
                storage.nbytes()
            )
    return found


def explain(held: Mapping[str, Counter[str]]) -> str:
    """One line: the largest holders of the device that holds most."""
    if not held:
        return "no tensors are alive"
    device, kinds = max(held.items(), key=lambda item: item[1].total())
    return f"{device} holds " + ", ".join(
        f"{format_bytes(n)} of {kind.replace('_', ' ')}" for kind, n in kinds.most_common(4)
    )


def _command() -> str:
    """What finds plans for the largest batch of this program on this card."""
    has_card = torch.cuda.is_available() and torch.cuda.is_initialized()
    device = torch.cuda.get_device_name() if has_card else "DEVICE"
    script = sys.argv[0] if sys.argv[0].endswith(".py") else "SCRIPT"
    return f"tightfit plan {shlex.quote(script)} --device {shlex.quote(device)} --largest-batch --ladder 3 -o plan.json"


def _tensors() -> list[torch.Tensor]:
    # Asked by type: `isinstance` would read `__class__`, which may be code of the program's objects.
    found = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    return [tensor for tensor in found if _is_dense(tensor)]


def _is_dense(value: Any) -> bool:
    return (
        issubclass(type(value), torch.Tensor)
        and value.layout == torch.strided
        and not torch.utils._python_dispatch.is_traceable_wrapper_subclass(value)
    )


def _largest_tensors() -> list[dict[str, Any]]:
    sizes: Counter[tuple[str, str, str]] = Counter()
    counts: Counter[tuple[str, str, str]] = Counter()
    seen = set[int]()
    for tensor in _tensors():
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            key = str(tensor.device), str(tensor.dtype).removeprefix("torch."), str(tuple(tensor.shape))
            sizes[key] += storage.nbytes()
            counts[key] += 1
    return [
        {"device": key[0], "dtype": key[1], "shape": key[2], "num_tensors": counts[key], "bytes": num_bytes}
        for key, num_bytes in sizes.most_common(_MOST_KINDS)
    ]


def _cards() -> list[int]:
    """Those that this process uses: what is asked of another one makes a context there, for which there may be no memory."""
    current = torch.cuda.current_device()
    return [n for n in range(torch.cuda.device_count()) if n == current or torch.cuda.memory_reserved(n)]


def _counters(index: int) -> dict[str, int]:
    free, total = torch.cuda.mem_get_info(index)
    return {
        "allocated_bytes": torch.cuda.memory_allocated(index),
        "reserved_bytes": torch.cuda.memory_reserved(index),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(index),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(index),
        "free_bytes": free,
        "capacity_bytes": total,
    }
