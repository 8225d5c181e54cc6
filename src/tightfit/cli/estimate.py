"""`tightfit estimate`: what a workload would hold on a card, found by running it on a virtual one."""

import json as jsonlib
import sys
import time
from typing import Annotated, Any

from cyclopts import Parameter

from tightfit import fit
from tightfit.cli.devices import local_cards
from tightfit.errors import UsageError
from tightfit.reports import text as text_report
from tightfit.simulate.estimate import Estimate


def estimate(
    target: str,
    /,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    device: Annotated[tuple[str, ...], Parameter(consume_multiple=False, negative=())] = (),
    parameter: Annotated[tuple[str, ...], Parameter(alias="-p", consume_multiple=False, negative=())] = (),
    steps: int = 3,
    alloc_conf: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
    show_output: Annotated[bool, Parameter(negative=())] = False,
    save_tape: str | None = None,
    task: str | None = None,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    dtype: str | None = None,
    optimizer: str | None = None,
    autocast: str | None = None,
    lora_rank: int | None = None,
    attention: str | None = None,
    gradient_checkpointing: Annotated[bool, Parameter(negative=())] = False,
) -> int:
    """Say what a workload would hold on a card. No card is needed; the workload is not changed.

    TARGET is a script (its arguments after `--`), FILE.py:FUNCTION or package.module:FUNCTION, a generator function that
    yields once per step, or a Hugging Face config.json, folder or model type.

    Parameters
    ----------
    device
        A card by name ("4090", "a100-80gb") or a TOML file; give it again to compare cards. Default: this machine's own.
    parameter
        A keyword argument of a generator function, NAME=VALUE; can be given again.
    steps
        How many steps to trace; the worst one counts.
    alloc_conf
        Allocator settings, as in PYTORCH_CUDA_ALLOC_CONF. Default: that variable.
    json
        Print one JSON object, or one a line for several cards.
    show_output
        Show what the workload prints, on stderr.
    save_tape
        Also write the recorded run to this file (.npz).
    task
        For a Hugging Face config: causal-lm, masked-lm, sequence-classification, image-classification, seq2seq ...
    batch_size
        For a Hugging Face config.
    sequence_length
        For a Hugging Face config.
    dtype
        For a Hugging Face config: float32, bfloat16 or float16 weights.
    optimizer
        For a Hugging Face config: adamw, adam, sgd, adafactor ...
    autocast
        For a Hugging Face config: bfloat16 or float16.
    lora_rank
        For a Hugging Face config: train adapters of this rank.
    attention
        For a Hugging Face config: eager, sdpa ...
    gradient_checkpointing
        For a Hugging Face config.
    """
    started = time.monotonic()
    devices = device or (_own_card(),)
    options: dict[str, Any] = {
        "task": task,
        "batch_size": batch_size,
        "sequence_length": sequence_length,
        "dtype": dtype,
        "optimizer": optimizer,
        "autocast": autocast,
        "lora_rank": lora_rank,
        "attention": attention,
        "gradient_checkpointing": gradient_checkpointing or None,
    }
    options = {name: value for name, value in options.items() if value is not None}
    if steps < 1:
        raise UsageError(f"--steps {steps}: at least one step must be traced")
    tape = fit.capture(
        target,
        device=devices[0],
        arguments=arguments,
        parameters=parameter,
        options=options,
        steps=steps,
        show_output=show_output,
    )
    if save_tape is not None:
        tape.save(save_tape)
    estimates = [fit.estimate(tape, device=name, alloc_conf=alloc_conf) for name in devices]
    _print(estimates, json=json, elapsed_seconds=time.monotonic() - started)
    return 0 if all(e.fits for e in estimates) else 1


def _own_card() -> str:
    cards = local_cards()
    if not cards:
        raise UsageError(
            'which card? There is none on this machine: name one, such as --device "RTX 4090" (tightfit devices lists them)'
        )
    return cards[0].name


def _print(estimates: list[Estimate], *, json: bool, elapsed_seconds: float) -> None:
    if json:
        for estimate in estimates:
            sys.stdout.write(jsonlib.dumps(estimate.to_json() | {"elapsed_seconds": round(elapsed_seconds, 2)}) + "\n")
    elif len(estimates) == 1:
        text_report.write_estimate(estimates[0], elapsed_seconds=elapsed_seconds)
    else:
        text_report.write_comparison(estimates, elapsed_seconds=elapsed_seconds)
