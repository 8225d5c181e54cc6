"""The rows of the accuracy benchmark: a workload, a device and a measured figure, read from published measurements.

Every exclusion here is decided from the measurements alone. The sources' own recipes are in the workloads' docstrings;
what a figure contains is said at each loader. Two exclusions came after a first estimate: gpt2_large on the A100, whose
script spreads the batch over every card it sees, and rows of the sweep that nearly fill the card or never grow.
No torch here.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.accuracy_recordings import peak_allocated_bytes

MIB = 1 << 20
WORKLOADS = "benchmarks/workloads"

# The driver's figure of these runs is the peak of the reserved segments plus 14 to 26 MiB in the old campaign and plus
# about 54 MiB in the new one, without the CUDA context: the middle of the range is taken off.
RTX_SURPLUS_BYTES = {"old": 20 * MIB, "new": 54 * MIB}
# Parameters of torchvision's classifiers of 1000 classes (its model pages).
RTX_NUM_PARAMETERS = {
    "ConvNeXtTiny": 28_589_128,
    "MobileNetV2": 3_504_872,
    "ResNet101": 44_549_160,
    "VGG16": 138_357_544,
}
# xMem adds about this much for a context that the measurement does not contain.
XMEM_CONTEXT_BYTES = 110 * MIB
# cuDNN picks smaller workspaces when memory is short, so an image run this close to the card's size shows no need.
NEARLY_FULL_SHARE = 0.9
# Below this batch size the source draws a random width of at most 128 tokens, so the workload is not known.
SMALLEST_BATCH_OF_KNOWN_WIDTH = 10

TIMM_NUM_MODELS = 40
# What cudaMemGetInfo gives on this card in all (devices/catalogue/ampere_ga100.toml).
A100_40G_CAPACITY_BYTES = 42_402_316_288
# Both groups on the A100 come from one machine, whose context is three times that of a current driver.
A100_CALIBRATION = "benchmarks/calibrations/a100_40g_sweep_machine.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A workload on a device, and one measured figure of it.

    `figure` names what was measured: `reserved`, `device` or `allocated` are peaks over all steps, `step_allocated` is
    the allocated peak of the last step alone. `baseline_bytes` was on the card already when the measuring began, so
    that the need is `measured_bytes` plus it. `calibration` is a file about the measuring machine. `published` holds other tools' figures for the same measurement.
    """

    group: str
    name: str
    workload: str
    parameters: Mapping[str, str | int]
    device: str
    num_steps: int
    figure: str
    measured_bytes: int
    excluded: str = ""
    calibration: str = ""
    baseline_bytes: int = 0
    published: Mapping[str, float] = field(default_factory=dict)


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rtx_baseline_bytes(model: str, optimizer: str) -> int:
    """What was on the card at the first sample of the driver's figure, which the source subtracts.

    Its training loops (exp/trainer/train_loop.py) start the thread that samples and then, for text, sleep for two
    seconds; for images they move the model at once and make the optimizer. The thread loads NVML before its first
    sample. So the model, and the state that Adagrad makes in its constructor, are in the first sample of images as far
    as they were quicker; how far is not recorded. The measurements agree: ConvNeXtTiny at batch 200 was measured lower
    with Adagrad than with SGD, which has no state at all.
    """
    weights = 4 * RTX_NUM_PARAMETERS.get(model, 0)
    return 2 * weights if optimizer == "Adagrad" else weights


def rtx_rows(data: Path) -> Iterator[Row]:
    """Five models on an RTX 3060 and an RTX 4060, reserved peak (see RTX_SURPLUS_BYTES and `rtx_baseline_bytes`)."""
    for record in _read(data / "measured_peaks" / "rtx_fp32_runs.csv"):
        measured, batch_size = int(record["measured_bytes"]), int(record["batch_size"])
        model, is_language = record["model"], record["model"] == "distilbert/distilgpt2"
        parameters: dict[str, str | int] = {} if is_language else {"model": model}
        parameters |= {
            "batch_size": batch_size,
            "optimizer": record["optimizer"],
            "zero_grad": int(record["zero_grad"]),
        }
        excluded = ""
        if record["out_of_memory"] == "1":
            excluded = "ran out of memory"
        elif not is_language and measured > NEARLY_FULL_SHARE * int(record["card_bytes"]):
            excluded = "over 90 % of the card: workspaces shrink"
        elif is_language and batch_size < SMALLEST_BATCH_OF_KNOWN_WIDTH:
            excluded = "width random"
        surplus = RTX_SURPLUS_BYTES[record["campaign"]]
        yield Row(
            group="rtx",
            name=f"{model} {record['optimizer']} batch {batch_size} zero_grad {record['zero_grad']} {record['gpu']}",
            workload=f"{WORKLOADS}/published_fp32.py:{'train_language_model' if is_language else 'train_images'}",
            parameters=parameters,
            device=record["gpu"].replace("-", " "),
            num_steps=4,
            figure="reserved",
            measured_bytes=measured - surplus,
            excluded=excluded,
            baseline_bytes=rtx_baseline_bytes(model, record["optimizer"]),
            published={
                "xmem": float(record["xmem_bytes"]) - XMEM_CONTEXT_BYTES - surplus,
                "dnnmem": float(record["dnnmem_bytes"]) - surplus,
            },
        )


def t4_rows(data: Path) -> Iterator[Row]:
    """Eight runs on a T4: allocated and reserved peak since a reset after one warm-up step.

    Reserved memory is not handed back between steps, so its peak is that of the whole run; the allocated peak is that
    of the second step.
    """
    for run in json.loads((data / "measured_peaks" / "t4_amp_8.json").read_text())["runs"]:
        config, model = run["config"], run["model"]
        is_image = "image_size" in config
        size = ("image_size", config["image_size"]) if is_image else ("num_tokens", config["seq_len"])
        for figure, key in (("reserved", "measured_reserved_bytes"), ("step_allocated", "measured_allocated_bytes")):
            yield Row(
                group="t4",
                name=f"{model} batch {config['batch_size']} {size[0]} {size[1]}",
                workload=f"{WORKLOADS}/half_precision_step.py:{'train_images' if is_image else 'train_language_model'}",
                parameters={"model": model, "batch_size": config["batch_size"], size[0]: size[1]},
                device="T4",
                num_steps=2,
                figure=figure,
                measured_bytes=run[key],
            )


def a100_rows(data: Path) -> Iterator[Row]:
    """18 runs on an A100-40GB: the device's peak as the driver reports it, with the context in it."""
    for record in _read(data / "measured_peaks" / "a100_40g_adam_fp32_18.csv"):
        model, is_language = record["model"], record["model"].startswith(("BERT", "gpt2"))
        function = "train_language_model" if is_language else "train_images"
        if model.startswith("xlnet"):
            function = "train_sequence_classifier"
        tools = {"gpumemnet": "gpumemnet_mib", "faketensor": "faketensor_mib", "horus": "horus_mib"}
        yield Row(
            group="a100",
            name=f"{model} batch {record['batch_size']}",
            workload=f"{WORKLOADS}/driver_peak_fp32.py:{function}",
            parameters={"model": model, "batch_size": int(record["batch_size"])},
            device="A100 40GB",
            num_steps=3,
            figure="device",
            measured_bytes=int(record["device_peak_mib"]) * MIB,
            calibration=A100_CALIBRATION,
            excluded="DataParallel over an unknown number of cards" if model == "gpt2_large" else "",
            published={
                tool: float(record[column]) * MIB for tool, column in tools.items() if record[column] not in {"", "-"}
            },
        )


def timm_models(records: list[dict[str, str]]) -> list[str]:
    """The models that are compared: those without a suspected crash at any batch size, in alphabetical order, every
    k-th of them from the first, with the k that gives about TIMM_NUM_MODELS. Decided without a look at any figure."""
    crashed = {record["timm_model"] for record in records if record["suspect_oom"] == "1"}
    sound = sorted({record["timm_model"] for record in records} - crashed)
    return sound[:: max(1, len(sound) // TIMM_NUM_MODELS)][:TIMM_NUM_MODELS]


def timm_rows(data: Path) -> Iterator[Row]:
    """Device peaks of timm models at their smallest, middle and largest measured batch size, for a slope each."""
    records = _read(data / "measured_peaks" / "a100_40g_timm_sweep.csv")
    for model in timm_models(records):
        own = sorted(
            (record for record in records if record["timm_model"] == model), key=lambda r: int(r["batch_size"])
        )
        figures = [float(record["max_gpu_memory_mib_measured"]) for record in own]
        failed = "the same at every batch size: a run that failed" if figures[-1] <= figures[0] else ""
        for record in [own[place] for place in sorted({0, len(own) // 2, len(own) - 1})]:
            measured = round(float(record["max_gpu_memory_mib_measured"]) * MIB)
            is_nearly_full = measured > NEARLY_FULL_SHARE * A100_40G_CAPACITY_BYTES
            yield Row(
                group="timm",
                name=f"{model} batch {record['batch_size']}",
                workload=f"{WORKLOADS}/timm_sweep.py:train",
                parameters={"model": model, "batch_size": int(record["batch_size"])},
                device="A100 40GB",
                num_steps=2,
                figure="device",
                measured_bytes=measured,
                excluded=failed
                or ("over 90 % of the card: workspaces shrink, or the run failed" if is_nearly_full else ""),
                calibration=A100_CALIBRATION,
            )


# File, workload, parameters, device (from the workspaces alive in the recording: 32 MiB each means Hopper), steps.
RECORDINGS: tuple[tuple[str, str, dict[str, str | int], str, int], ...] = (
    ("lm_medium_ctx256_step", "recorded_24_layers.py:train", {"num_tokens": 256}, "A100 80GB", 3),
    ("lm_medium_ctx128_inference", "recorded_24_layers.py:infer", {"num_tokens": 128}, "A100 80GB", 2),
    ("lm_2.7b_ctx256_step", "recorded_32_layers.py:train", {"num_tokens": 256}, "H100", 1),
    ("lm_2.7b_ctx128_forward", "recorded_32_layers.py:forward_only", {"num_tokens": 128}, "H100", 1),
)


def recording_rows(data: Path) -> Iterator[Row]:
    """Four memory recordings: the allocated peak of the recorded step."""
    for name, workload, parameters, device, num_steps in RECORDINGS:
        yield Row(
            group="recordings",
            name=name,
            workload=f"{WORKLOADS}/{workload}",
            parameters=parameters,
            device=device,
            num_steps=num_steps,
            figure="step_allocated",
            measured_bytes=peak_allocated_bytes(data / "snapshots" / f"{name}.pickle"),
        )


GROUPS = {"rtx": rtx_rows, "t4": t4_rows, "a100": a100_rows, "timm": timm_rows, "recordings": recording_rows}
