"""The memory and time of attention without materialised scores, estimated from a traced run."""

from collections.abc import Iterator

import numpy as np

from tightfit.analysis.attention import ScoreRun
from tightfit.analysis.modules import ModuleCalls
from tightfit.analysis.profile import Profile
from tightfit.cost.efficiency import efficiency_of
from tightfit.cost.roofline import arithmetic_type
from tightfit.planner.option import Change, Option

SMALLEST_SHARE = 0.01
"""Of all that waits for the backward pass: what the scores of all modules must come to for the option to be offered."""

_FLOPS_OF_KERNEL = 3.5
"""Forward and backward passes of the kernel in forward passes: two products, and five (Dao 2023, arXiv:2307.08691, section 4.1)."""


def attention_options(technique: str, profile: Profile) -> Iterator[Option]:
    """One option for all modules together; none if their scores are a negligible share of the activations."""
    module_calls = profile.modules
    runs = [run for run in profile.score_runs if not run.is_kernel]
    if not runs:
        return
    waiting = np.flatnonzero(module_calls.saved_for_backward)
    scores = np.unique([storage for run in runs for storage in run.scores])
    if module_calls.lifetimes.bytes_of(scores) < SMALLEST_SHARE * module_calls.lifetimes.bytes_of(waiting):
        return
    allocations = profile.lifetimes.allocated_at
    gone = [
        Change(
            begin=int(allocations[s]),
            end=int(module_calls.lifetimes.freed_at[s]),
            num_bytes=-int(module_calls.lifetimes.block_bytes[s]),
        )
        for s in scores.tolist()
    ]
    kept = [change for run in runs if (change := _output(module_calls, run)) is not None]
    modules = list(dict.fromkeys(run.path for run in runs))
    yield Option(
        technique=technique,
        where=modules[0].partition(".")[0],
        settings={"modules": modules},
        changes=(*gone, *kept),
        seconds=sum(_added_seconds(profile, run) for run in runs) / profile.num_steps,
        exact=True,
        slots=frozenset(f"attention@{module}" for module in modules),
        needs_new_trace=True,
    )


def _output(module_calls: ModuleCalls, run: ScoreRun) -> Change | None:
    """The output of an attention, which its kernel saves for backward; None where the module saves a copy of it anyway."""
    if not run.back:
        return None
    operators = module_calls.tape.operators
    num_bytes, after = int(operators.bytes_written[run.end]), run.end + 1
    # The product of a batched matmul is copied to bring the heads of a token together. The kernels write it in that order (batch, tokens, heads,
    # width), so the copy is a view of what they save (aten/src/ATen/native/transformers/cuda/attention.cu).
    is_copied = (
        after < len(operators.name)
        and module_calls.tape.strings[operators.name[after]] == "aten.clone"
        and operators.module[after] == operators.module[run.end]
        and int(operators.bytes_written[after]) == num_bytes
    )
    if is_copied:
        return None
    begin, end = int(module_calls.lifetimes.event_of(run.end)), int(module_calls.lifetimes.event_of(run.back[0]))
    return Change(begin=begin, end=end, num_bytes=num_bytes)


def _added_seconds(profile: Profile, run: ScoreRun) -> float:
    tape, device, seconds = profile.tape, profile.device, profile.costs.seconds
    efficiency = efficiency_of(device)
    dtype = tape.strings[tape.operators.dtype[run.begin]]
    arithmetic = arithmetic_type(
        "attention", dtype, tf32_matmul=tape.tf32_matmul, tf32_convolution=tape.tf32_convolution
    )
    rate = device.flops_per_second(arithmetic) * efficiency.of_flops["attention", arithmetic]
    flops = float(tape.operators.flops[run.begin] + tape.operators.flops[run.end])
    kernel = flops * (_FLOPS_OF_KERNEL if run.back else 1) / rate
    plain = float(seconds[run.begin : run.end + 1].sum()) + float(seconds[list(run.back)].sum())
    return kernel - plain


def math_attention_bytes(profile: Profile) -> int:
    """Bytes of scores that the math backend of `scaled_dot_product_attention` saves for backward in one step."""
    module_calls = profile.modules
    scores = {
        s for run in profile.score_runs if run.is_kernel for s in run.scores if module_calls.saved_for_backward[s]
    }
    return module_calls.lifetimes.bytes_of(np.array(sorted(scores), dtype=np.int64)) // profile.num_steps
