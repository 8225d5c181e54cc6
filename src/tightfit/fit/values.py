"""Runs of a workload on the host, in a child process each, and whether two of them left the same: how a plan is proven by values."""

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tightfit.capture.child_process import program_stdin
from tightfit.capture.processes import visible_devices
from tightfit.capture.processes.children import shared_folder
from tightfit.capture.processes.containment.policy import CLOSED, Containment, Policy, contained
from tightfit.capture.processes.fork_server import forked_child
from tightfit.capture.targets.target_kinds import Target, words_of
from tightfit.capture.trace import Preparation
from tightfit.errors import ApplyError, InternalError
from tightfit.planner.plan import Choice

# Sums in another order: relative to the largest value of a tensor, by its type.
_ROUNDING = {"float64": 1e-6, "float32": 2e-3, "float16": 0.1, "bfloat16": 0.2}
_ABSOLUTE = 1e-9

# What each run on the host imports: torch imports its compiler when the first optimizer is made, which takes longer than a few small steps.
_PRELOADED = ("tightfit.capture.child_process.host_run", "torch._dynamo", "tightfit.runtime.apply")

# They have tables of dtypes, which have to be made before `torch.float32` and its like are others: see `on_host.compute_in_double`.
MODULES_WITH_DTYPES = (
    "tightfit.effects.values.value_checks",
    "tightfit.effects.values.word_sums",
    "tightfit.techniques.loss_head.chunked_cross_entropy",
    "tightfit.techniques.loss_head.logit_forms",
    "tightfit.techniques.micro_batches.split_forward",
    "tightfit.techniques.optimizer.states.bitsandbytes_codec",
    "tightfit.techniques.optimizer.states.kernel_codec",
    "tightfit.techniques.optimizer.updates.optimizer_kernels",
    "tightfit.techniques.tiling.token_wise_check",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostValues:
    """What a run on the host has left; `values` is None, and `why` says it, where it did not come to its end."""

    values: dict[str, Any] | None
    why: str = ""


def run_on_host(
    target: Target,
    choices: Sequence[Choice],
    *,
    num_steps: int,
    is_double: bool,
    card: str | None,
    timeout_seconds: float,
    policy: Policy = CLOSED,
) -> HostValues:
    """The first steps of `target` on the host with `choices` on it; `policy` as for `tightfit.capture.trace.trace`.

    `torch.cuda` answers for `card`, the name or path of a device, or says that there is none.

    Raises:
        ApplyError: a choice was refused, on the way too.
    """
    with shared_folder() as folder:
        request, values = folder / "request.json", folder / "values.pt"
        preparation = Preparation(
            function="tightfit.runtime.run_script:prepare",
            argument={"choices": [dataclasses.asdict(c) for c in choices]},
        )
        containment = contained(policy, folder, words_of(target))
        fields = {
            "target": {"kind": type(target).__name__, **dataclasses.asdict(target)},
            "num_steps": num_steps,
            "values": str(values),
            "is_double": is_double,
            "card": card,
            "preparation": dataclasses.asdict(preparation) if choices else None,
            "imported": MODULES_WITH_DTYPES if choices and is_double else (),
            "containment": None if containment is None else dataclasses.asdict(containment),
            "standard_input": program_stdin.file_given(),
        }
        request.write_text(json.dumps(fields))
        answer = _answer(request, timeout_seconds, policy, containment)
        if answer["kind"] == "refused":
            raise ApplyError(answer["message"], technique=answer["technique"], places=answer["places"])
        if answer["kind"] == "internal":
            error = InternalError(answer["message"])
            error.trace = answer["trace"]
            raise error
        if answer["kind"] != "done":
            return HostValues(values=None, why=answer["message"])
        import torch

        return HostValues(values=torch.load(values, weights_only=True))


def _answer(request: Path, timeout_seconds: float, policy: Policy, containment: Containment | None) -> dict[str, Any]:
    environment = {
        **os.environ,
        **visible_devices.hidden(),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",
        **policy.environment(),
    }
    with forked_child(
        "tightfit.capture.child_process.host_run",
        request,
        environment=environment,
        reads_errors=True,
        preloaded=_PRELOADED,
        containment=containment,
    ) as process:
        try:
            process.communicate(timeout=None if math.isinf(timeout_seconds) else timeout_seconds)
        except subprocess.TimeoutExpired:
            return {"kind": "failed", "message": "it took longer than it may"}
    answer = Path(f"{request}.answer")
    if not answer.exists():
        return {"kind": "failed", "message": f"the process ended with exit code {process.returncode}"}
    return json.loads(answer.read_text())


def differences(plain: dict[str, Any], planned: dict[str, Any], *, is_bitwise: bool) -> Iterator[str]:
    """In what two runs differ, a clause each; `is_bitwise`: in a single bit, else by more than sums in another order explain."""
    for number, (one, other) in enumerate(zip(plain["losses"], planned["losses"], strict=False), 1):
        if not _same(one, other, is_bitwise=is_bitwise):
            yield f"what step {number} yields is {_shown(other)} instead of {_shown(one)}"
    if len(plain["losses"]) != len(planned["losses"]):
        yield f"there are {len(planned['losses'])} steps instead of {len(plain['losses'])}"
    for kind in ("weights", "buffers"):
        for name in {**plain[kind], **planned[kind]}:
            one, other = plain[kind].get(name), planned[kind].get(name)
            if not _same(one, other, is_bitwise=is_bitwise):
                yield f"{name} ends with other values"
    for kind in ("torch", "python", "numpy"):
        if not _same(plain[kind], planned[kind], is_bitwise=True):
            yield f"the random state of {kind} ends as another"


def _same(one: Any, other: Any, *, is_bitwise: bool) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        bound = 0.0 if is_bitwise else _ROUNDING["float32"] * abs(one) + _ABSOLUTE
        return one == other or (math.isnan(one) and math.isnan(other)) or abs(one - other) <= bound
    if "torch" not in sys.modules or not hasattr(one, "dtype") or not hasattr(other, "dtype"):
        return type(one) is type(other) and bool(one == other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    equal = (one == other) | (one.isnan() & other.isnan())
    if bool(equal.all()) or is_bitwise or not one.is_floating_point():
        return bool(equal.all())
    rounding = _ROUNDING.get(str(one.dtype).removeprefix("torch."), 0.0)
    # A mask of minus infinity is not the size of what is beside it.
    bound = rounding * float(one.double().abs().nan_to_num(0.0, 0.0, 0.0).max()) + _ABSOLUTE
    return bool((equal | ((one.double() - other.double()).abs() <= bound)).all())


def _shown(value: Any) -> str:
    return f"{float(value):.6g}" if isinstance(value, int | float) or getattr(value, "shape", None) == () else "other"
