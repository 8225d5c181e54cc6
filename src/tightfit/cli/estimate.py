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
from tightfit.cli.progress import ProgressLine
from tightfit.devices.calibration import Calibration
from tightfit.devices.catalogue import find
from tightfit.errors import UsageError

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
        Rows of a batch, 1 if not given.
    sequence_length
        Tokens of a row, by default 512 or as many as the model has positions for.
    image_size
        Pixels a side, where the config leaves it open.
    dtype
        Of the weights: float32, bfloat16 or float16.
    optimizer
        adamw (if not given), adam, sgd, sgd-momentum, adagrad, rmsprop, adafactor.
    autocast
        bfloat16 or float16.
    lora_rank
        Train adapters of this rank, with peft.
    attention
        eager, sdpa, flex_attention ...
    gradient_checkpointing
        Recompute activations block by block.
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
    margin: str = "likely",
    calibration: Path | None = None,
    json: bool = False,
    show_output: bool = False,
    save_tape: Path | None = None,
    save_recording: Path | None = None,
    model: ModelOptions = NO_OPTIONS,
) -> int:
    """Say what a workload would hold on a card. No card is needed; the workload is not changed.

    Parameters
    ----------
    target
        A script (its own arguments after --); FILE.py:FUNCTION or package.module:FUNCTION, a generator function that yields
        once per step; a Hugging Face config.json, its folder or a model type; or a run that --save-tape wrote.
    device
        A card by name ("4090", "a100-80gb") or its TOML file; once for each card to compare. Default: this machine's own.
    parameter
        NAME=VALUE, a keyword argument of the generator function; once for each.
    steps
        How many steps to trace, 3 if not given; the worst one counts.
    timeout
        Seconds to wait for the first step, and from each to the next, 120 if not given.
    alloc_conf
        Allocator settings, as in PYTORCH_CUDA_ALLOC_CONF. Default: that variable.
    margin
        Which end of the peak's range has to fit: safe (the upper end), likely (the likely peak; if not given) or 0 (the lower end).
    calibration
        What was measured on that machine: a TOML file with its context and speeds.
    json
        Print JSON: an object a line, one for each card.
    show_output
        Show what the workload prints, on stderr.
    save_tape
        Also write the recorded run to this file (.npz).
    save_recording
        Also write the run as a recording of torch's allocator, for torch's viewer and tightfit replay (.pickle; one card).
    """
    from tightfit import fit
    from tightfit.recordings.write import write_tape

    started = time.monotonic()
    devices = device or (own_card(),)
    cards, settings = [find(name) for name in devices], fit.allocator_settings(alloc_conf)
    measured = None if calibration is None else Calibration.load(calibration)
    if measured is not None:
        cards = [measured.applied_to(card) for card in cards]
    options, end = model.given(), fit.margin_named(margin)
    _check_folders({"--save-tape": save_tape, "--save-recording": save_recording})
    if save_recording is not None and len(cards) > 1:
        raise UsageError("--save-recording writes the run on one card: give one --device")
    asked = {"arguments": arguments, "parameters": parameter, "options": options}
    if target.endswith(".npz"):
        if any(asked.values()):
            raise UsageError(f"{target} is a run that is over: it takes no arguments, -p or options of a model")
        tape = _saved_tape(target)
    else:
        with ProgressLine(f"estimate {target}", timeout_seconds=timeout, is_rewritten=not show_output) as line:
            more = {"steps": steps, "timeout": timeout, "show_output": show_output, "on_progress": line.report}
            # Traced once, for the first GPU; the others replay the same tape with their own workspaces, context and speeds.
            tape = fit.capture(target, device=devices[0], **asked, **more)
    if save_tape is not None:
        tape.save(save_tape)
    if save_recording is not None:
        write_tape(save_recording, tape, cards[0], settings, measured)
    estimates = [fit.cost(tape, card, settings, measured, margin=end) for card in cards]
    _print(estimates, json=json, elapsed_seconds=time.monotonic() - started)
    return 0 if all(e.fits for e in estimates) else 1


def _check_folders(files: Mapping[str, Path | None]) -> None:
    # Checked before the trace, which may take minutes, rather than when its result is to be written.
    for option, file in files.items():
        if file is not None and not file.resolve().parent.is_dir():
            raise UsageError(f"{option} {file}: there is no folder {file.parent}")


def _saved_tape(path: str) -> "Tape":
    from tightfit.tape.load import read_tape

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
