"""`tightfit estimate`: the memory of a workload on a GPU, found by running it on a virtual one.

Whatever computes is imported when the command runs, so that its `--help` is instant.
"""

import dataclasses
import json as jsonlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from tightfit.cli.devices import own_card
from tightfit.devices.calibration import Calibration
from tightfit.devices.catalogue import find
from tightfit.errors import UsageError
from tightfit.reports.redacted import redacted

if TYPE_CHECKING:
    from tightfit.simulate.estimate import Estimate
    from tightfit.tape import Tape

# One value per use of the option (-p a=1 -p b=2); cyclopts would otherwise let a list swallow the words that follow.
_SEVERAL = Parameter(consume_multiple=False)


@Parameter(name="*", group=Group("Parameters of a Hugging Face config", sort_key=2))
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What a Hugging Face config leaves open; see `tightfit.capture.huggingface.target.HuggingFaceTarget`.

    Parameters
    ----------
    task
        causal-lm, masked-lm, sequence-classification, image-classification, seq2seq ...
    batch_size
        Batch size, 1 if not given.
    sequence_length
        Tokens per sequence, by default 512 or the maximum of the model.
    image_size
        Pixels per side, where the config leaves it open.
    dtype
        Data type of the weights: float32, bfloat16 or float16.
    optimizer
        adamw (if not given), adam, sgd, sgd-momentum, adagrad, rmsprop, adafactor.
    autocast
        bfloat16 or float16.
    lora_rank
        Train LoRA adapters of this rank, with peft.
    attention
        eager, sdpa, flex_attention ...
    gradient_checkpointing
        Turn on gradient checkpointing.
    """

    task: str | None = None
    batch_size: int | None = None
    sequence_length: int | None = None
    image_size: int | None = None
    dtype: str | None = None
    optimizer: str | None = None
    autocast: str | None = None
    lora_rank: int | None = None
    attention: str | None = None
    gradient_checkpointing: bool = False

    def given(self) -> dict[str, Any]:
        """The options that were given, by name."""
        values = dataclasses.asdict(self).items()
        return {name: value for name, value in values if value is not None and value is not False}


NO_OPTIONS = ModelOptions()


def estimate(
    target: str,
    /,
    *arguments: Annotated[str, Parameter(show=False)],
    device: Annotated[tuple[str, ...], _SEVERAL] = (),
    parameter: Annotated[tuple[str, ...], _SEVERAL, Parameter(alias="-p")] = (),
    steps: int = 3,
    timeout: float = 120.0,
    alloc_conf: str | None = None,
    calibration: Path | None = None,
    json: bool = False,
    show_output: bool = False,
    redact: bool = False,
    save_tape: Path | None = None,
    save_recording: Path | None = None,
    model: ModelOptions = NO_OPTIONS,
) -> int:
    """Estimate the peak GPU memory and the time per step of a workload. No GPU is needed; the workload is not changed.

    Parameters
    ----------
    target
        A script (its own arguments after --); FILE.py:FUNCTION or package.module:FUNCTION, a generator function that yields
        once per step; a Hugging Face config.json, its folder or a model type; or a trace that --save-tape wrote.
    device
        A GPU by name ("4090", "a100-80gb") or its TOML file; repeat it to compare several. Default: the GPU of this machine.
    parameter
        NAME=VALUE, a keyword argument of the generator function; repeatable.
    steps
        How many steps to trace, 3 if not given; the one with the highest peak counts.
    timeout
        Seconds to wait for the first step, and for each next one, 120 if not given.
    alloc_conf
        Allocator settings, as in PYTORCH_CUDA_ALLOC_CONF. Default: that variable.
    calibration
        The TOML file that tightfit calibrate wrote on that machine.
    json
        Print JSON: one object per line, one for each GPU.
    show_output
        Show the output of the workload, on stderr.
    redact
        Write ~ in place of home folders in every path, for a report that is sent to somebody.
    save_tape
        Also write the trace to this file (.npz), to estimate it again for other GPUs.
    save_recording
        Also write the run as a recording of torch's allocator, for torch's viewer and tightfit replay (.pickle; one GPU).
    """
    from tightfit import fit
    from tightfit.recordings.write import write_tape

    started = time.monotonic()
    devices = device or (own_card(),)
    cards, settings = [find(name) for name in devices], fit.allocator_settings(alloc_conf)
    measured = None if calibration is None else Calibration.load(calibration)
    if measured is not None:
        cards = [measured.applied_to(card) for card in cards]
    options = model.given()
    _check_files({"--save-tape": save_tape, "--save-recording": save_recording}, num_cards=len(cards))
    if target.endswith(".npz"):
        tape = _saved_tape(target, has_arguments=bool(arguments or parameter or options))
    else:
        tape = fit.capture(
            target,
            # Traced once, for the first GPU; the others replay the same tape with their own workspaces, context and speeds.
            device=devices[0],
            arguments=arguments,
            parameters=parameter,
            options=options,
            steps=steps,
            timeout=timeout,
            show_output=show_output,
        )
    tape = redacted(tape) if redact else tape
    if save_tape is not None:
        tape.save(save_tape)
    if save_recording is not None:
        write_tape(save_recording, tape, cards[0], settings, measured)
    estimates = [fit.cost(tape, card, settings, measured) for card in cards]
    _print(estimates, json=json, elapsed_seconds=time.monotonic() - started)
    return 0 if all(e.fits for e in estimates) else 1


def _check_files(files: Mapping[str, Path | None], *, num_cards: int) -> None:
    # Checked before the trace, which may take minutes, rather than when its result is to be written.
    for option, file in files.items():
        if file is not None and not file.resolve().parent.is_dir():
            raise UsageError(f"{option} {file}: there is no folder {file.parent}")
    if files["--save-recording"] is not None and num_cards > 1:
        raise UsageError("--save-recording writes the run on one GPU: give one --device")


def _saved_tape(path: str, *, has_arguments: bool) -> "Tape":
    from tightfit.tape.load import read_tape

    if has_arguments:
        raise UsageError(f"{path} is a finished run: it takes no arguments, -p or model options")
    if not Path(path).is_file():
        raise UsageError(f"there is no file {path}")
    return read_tape(path)


def _print(estimates: "Sequence[Estimate]", *, json: bool, elapsed_seconds: float) -> None:
    from tightfit.reports.text import estimates as text_report

    if json:
        for estimate in estimates:
            sys.stdout.write(jsonlib.dumps(estimate.to_json() | {"elapsed_seconds": round(elapsed_seconds, 2)}) + "\n")
    elif len(estimates) == 1:
        text_report.write_estimate(estimates[0], elapsed_seconds=elapsed_seconds)
    else:
        text_report.write_comparison(estimates, elapsed_seconds=elapsed_seconds)
