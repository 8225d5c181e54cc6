"""How many kinds of model the estimate works for: every type of breadth_models.toml, small and at its real size.

    python -m benchmarks.breadth [--only NAME] [--size small] [--csv docs/breadth.csv]   estimate on a virtual GPU
    python -m benchmarks.breadth --check [--only NAME]                                  one real step on the CPU

A small config is the default config with fewer layers and narrower ones, made by rules on the names of fields.
Each estimate runs in a process of its own with a time limit; what it printed becomes a row of the table. A table that
exists is continued: what worked is kept, what failed is tried again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import csv
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WIDTH, HEADS, VOCABULARY, SIDE, LAYERS = 64, 4, 1024, 64, 2

LAYER_COUNTS = [
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "encoder_layers",
    "decoder_layers",
    "encoder_num_hidden_layers",
    "decoder_num_hidden_layers",
    "num_global_layers",
    "num_hidden_groups",
    "depth",
    "num_block_layers",
    "vision_layers",
    "num_mem_blocks",
    "num_adapter_layers",
    "num_codevector_groups",
]
WIDTHS = [
    "hidden_size",
    "d_model",
    "n_embd",
    "dim",
    "embed_dim",
    "embedding_size",
    "projection_dim",
    "word_embed_proj_dim",
    "attention_hidden_size",
    "output_hidden_size",
    "conv_dim_out",
    "hidden_dim",
    "lru_width",
    "out_hidden_size",
    "classifier_proj_size",
    "projector_dim",
    "decoder_hidden_size",
    "vision_output_dim",
    "projection_hidden_size",
    "encoder_hidden_size",
    "text_hidden_size",
    "attn_hidden_size",
    "image_text_hidden_size",
    "qk_hidden_size",
    "reduction_hidden_size",
    "projector_input_dim",
    "projector_output_dim",
    "neck_hidden_size",
]
INNER_WIDTHS = [
    "intermediate_size",
    "d_ff",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "n_inner",
    "ffn_dim",
    "ffn_hidden_size",
    "intermediate_dim",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "expert_ffn_hidden_size",
    "intermediate_size_mlp",
    "decoder_intermediate_size",
    "dense_intermediate_size",
    "dim_feedforward",
]
HEAD_COUNTS = [
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "num_encoder_attention_heads",
    "num_decoder_attention_heads",
    "attention_heads",
    "decoder_num_attention_heads",
    "encoder_num_attention_heads",
]
SCALARS = {
    **dict.fromkeys(LAYER_COUNTS, LAYERS),
    **dict.fromkeys(WIDTHS, WIDTH),
    **dict.fromkeys(INNER_WIDTHS, 2 * WIDTH),
    **dict.fromkeys(HEAD_COUNTS, HEADS),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "kv_n_heads", "encoder_num_key_value_heads"), HEADS // 2),
    "decoder_num_key_value_heads": HEADS // 2,
    "rotary_dim": 16,
    "projection_size": WIDTH,
    "mm_tokens_per_image": 4,
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "attention_head_dim"), WIDTH // HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_top_k", "topk_group", "n_group"), 2),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size"), VOCABULARY),
    **dict.fromkeys(("image_size", "input_size"), SIDE),
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_frames": 4,
    "frames_per_clip": 4,
    "max_source_positions": 64,
}
"""What a field of this name becomes in a small config, where it is larger there."""

DROPPED = ("out_features", "out_indices", "_out_features", "_out_indices", "stage_names")
"""Fields that name layers of the large model and that the small config works out anew."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model type, its task and its group."""

    name: str
    task: str
    group: str
    complete: dict[str, Any]
    small: dict[str, Any]
    sequence_length: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: `status` is ok, failed or timeout."""

    name: str
    size: str
    group: str
    task: str
    status: str
    peak_reserved_bytes: int | None
    elapsed_seconds: float
    error: str


def cases() -> list[Case]:
    """Every model type of breadth_models.toml."""
    table = tomllib.loads(Path(__file__).with_name("breadth_models.toml").read_text(encoding="utf-8"))
    complete, small, lengths = table.pop("complete"), table.pop("small"), table.pop("sequence_length")
    return [
        Case(
            name=name,
            task=task,
            group=group,
            complete=complete.get(name, {}),
            small=small.get(name, {}),
            sequence_length=lengths.get(name),
        )
        for group, tasks in table.items()
        for name, task in tasks.items()
    ]


def shrink(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config, and of the configs inside it, with small numbers in place of large ones.

    A hierarchical model (it has `depths`) keeps its widths, which depend on each other, and gets one layer a stage.
    """
    kept = {key: value for key, value in fields.items() if key not in DROPPED}
    if isinstance(fields.get("depths"), list):
        return kept | {"depths": [1] * len(fields["depths"])}
    return {key: _shrunk(key, value) for key, value in kept.items()}


def _shrunk(key: str, value: Any) -> Any:
    if isinstance(value, dict) and "model_type" in value:
        return shrink(value)
    if isinstance(value, bool):
        return value
    if key in SCALARS and isinstance(value, int):
        return min(value, SCALARS[key])
    if key.endswith(("token_id", "token_index")) and isinstance(value, int) and value >= VOCABULARY:
        return VOCABULARY // 2 + value % (VOCABULARY // 2)
    if key in ("layer_types", "layers_block_type", "mlp_layer_types") and isinstance(value, list):
        return _few(value)
    return value


def _few(kinds: list[Any]) -> list[Any]:
    """`LAYERS` entries that keep one of each kind where there are as many kinds."""
    distinct = [kind for index, kind in enumerate(kinds) if kind not in kinds[:index]]
    return (distinct + kinds)[:LAYERS]


def write_config(case: Case, size: str, folder: Path) -> Path:
    """Write the config of `case`, `small` or `real`, into `folder` and return its path."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = CONFIG_MAPPING[case.name]().to_dict()
    _update(fields, case.complete)
    if size == "small":
        fields = shrink(fields)
        _update(fields, case.small)
    path = folder / f"{case.name}-{size}.json"
    path.write_text(json.dumps(fields, indent=1), encoding="utf-8")
    return path


def _update(fields: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(fields.get(key), dict):
            _update(fields[key], value)
        else:
            fields[key] = value


def check(case: Case, path: Path) -> Row:
    """One real training step of the small config on the CPU."""
    from tightfit.capture.targets.huggingface.target import HuggingFaceTarget, workload

    start = time.perf_counter()
    error = ""
    try:
        target = HuggingFaceTarget(source=str(path), task=case.task, batch_size=2, audio_seconds=1.0)
        loss = float(next(workload(target, device="cpu")).detach())
        error = "" if math.isfinite(loss) else f"the loss is {loss}"
    except Exception as failure:  # noqa: BLE001 - every failure of any model is a row of the table
        error = f"{type(failure).__name__}: {str(failure).strip().splitlines()[0] if str(failure).strip() else ''}"
    return _row(case, "small", time.perf_counter() - start, error)


def estimate(case: Case, size: str, source: str, device: str, limit_seconds: float) -> Row:
    """One `tightfit estimate` of `source` in a process of its own."""
    command = [sys.executable, "-m", "tightfit", "estimate", source, "--task", case.task]
    command += ["--batch-size", "2", "--device", device, "--json"]  # batch normalisation wants more than one row
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds, check=False)
    except subprocess.TimeoutExpired:
        return _row(case, size, limit_seconds, f"over {limit_seconds:.0f} s", status="timeout")
    seconds = time.perf_counter() - start
    if done.returncode not in (0, 1) or not done.stdout:
        lines = done.stderr.strip().splitlines()
        return _row(case, size, seconds, lines[-1] if lines else f"exit code {done.returncode}")
    return _row(case, size, seconds, "", json.loads(done.stdout)["peak"]["reserved_bytes"])


def _row(case: Case, size: str, seconds: float, error: str, peak: int | None = None, *, status: str = "") -> Row:
    return Row(
        name=case.name,
        size=size,
        group=case.group,
        task=case.task,
        status=status or ("failed" if error else "ok"),
        peak_reserved_bytes=peak,
        elapsed_seconds=round(seconds, 2),
        error=error[:300],
    )


def _rows(chosen: list[Case], options: argparse.Namespace, known: dict[tuple[str, str], Row]) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        if options.check:
            for case in chosen:
                yield check(case, write_config(case, "small", Path(folder)))
            return
        sizes = ("small", "real") if options.size == "both" else (options.size,)
        jobs = [(case, size) for case in chosen for size in sizes if (case.name, size) not in known]

        def run(job: tuple[Case, str]) -> Row:
            case, size = job
            is_written = size == "small" or bool(case.complete)
            source = str(write_config(case, size, Path(folder))) if is_written else case.name
            return estimate(case, size, source, options.device, options.limit_seconds)

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            yield from pool.map(run, jobs)


def read_table(path: Path | None) -> dict[tuple[str, str], Row]:
    """The rows of `path` that worked, by name and size; none where there is no such file."""
    if path is None or not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = [
            Row(
                **{
                    **fields,
                    "peak_reserved_bytes": int(fields["peak_reserved_bytes"] or 0),
                    "elapsed_seconds": float(fields["elapsed_seconds"]),
                }
            )
            for fields in csv.DictReader(file)
        ]
    return {(row.name, row.size): row for row in rows if row.status == "ok"}


def write_table(path: Path, rows: dict[tuple[str, str], Row]) -> None:
    """Write `rows` in the order of breadth_models.toml, the small size of a model before the real one."""
    order = [case.name for case in cases()]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in sorted(rows.values(), key=lambda row: (order.index(row.name), row.size != "small")):
            writer.writerow(dataclasses.asdict(row))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 0 where every model worked, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="a model type or a group; may be repeated")
    parser.add_argument("--check", action="store_true", help="a real step of every small config on the CPU")
    parser.add_argument("--size", choices=("small", "real", "both"), default="both")
    parser.add_argument("--device", default="A100 80GB")
    parser.add_argument("--limit-seconds", type=float, default=300.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--csv", type=Path, help="written after every row, and continued if it exists")
    options = parser.parse_args(arguments)
    chosen = [case for case in cases() if not options.only or {case.name, case.group} & set(options.only)]
    table = read_table(options.csv)
    print("| model | size | task | status | peak reserved (MiB) | seconds | error |\n|---|---|---|---|---|---|---|")
    for row in _rows(chosen, options, dict(table)):
        table[row.name, row.size] = row
        peak = "" if row.peak_reserved_bytes is None else f"{row.peak_reserved_bytes / 2**20:.0f}"
        cells = (row.name, row.size, row.task, row.status, peak, f"{row.elapsed_seconds:.1f}", row.error)
        print(f"| {' | '.join(cells)} |", flush=True)
        if options.csv is not None:
            write_table(options.csv, table)
    num_ok = sum(row.status == "ok" for row in table.values())
    print(f"\n{num_ok} of {len(table)} work", file=sys.stderr)
    return 0 if num_ok == len(table) else 1


if __name__ == "__main__":
    sys.exit(main())
