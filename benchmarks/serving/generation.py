"""Predicted against published generation of one request on an A100: `python -m benchmarks.serving.generation`.

Two tables of other people: litgpt (a prompt of 9 tokens, 50 new ones, a static cache) and Qwen (an empty prompt, 2,048 new tokens; transformers 4.31, whose cache is a tuple). Compared are the peak of tensors and
tokens per second.
"""

import argparse
import csv
import dataclasses
import json
import statistics
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tightfit.devices.catalogue import find
from tightfit.fit.traced_models import traced_model
from tightfit.serving.batches.batch_rules import BatchRules
from tightfit.serving.batches.batch_server import BatchServer
from tightfit.serving.engine_rules import rules_of
from tightfit.serving.model.weight_formats import WeightFormat, format_named
from tightfit.serving.serve_settings import ServeSettings
from tightfit.serving.traced_server import TracedModel
from tightfit.units import GIB

_CONFIGS = Path(__file__).with_name("generation.toml")
_PUBLISHED = Path(__file__).parents[3] / "shared/data/published"
_LITGPT, _QWEN = (9, 50), (1, 2048)
_FORMATS = {
    "None": None,
    "bnb.nf4": "nf4",
    "bnb.nf4-dq": "bitsandbytes",
    "BF16": None,
    "Int8": "gptq-int8",
    "Int4": "gptq",
}


def rows(folder: Path) -> Iterator[tuple[str, Mapping[str, str], float, float, str]]:
    """Of each published row that is one request on one card: the table, the row, its peak in bytes, its tokens per second, and the name of its model's config."""
    with (folder / "litgpt_inference_a100.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            name = f"{row['model']} {row['size']}" if row["model"] == "Llama 2" else row["model"]
            yield "litgpt", row, _number(row["max_gpu_ram_GB"]) * 1e9, _number(row["tokens_per_s"]), name
    with (folder / "qwen_inference.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["batch"] == "1" and row["ngpu"] == "1" and row["quant"] in _FORMATS:
                yield "qwen", row, _number(row["mem_GB"]) * GIB, _number(row["tokens_per_s"]), row["model"]


def main() -> None:
    """Prints a line per row, then the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--published", type=Path, default=_PUBLISHED)
    given = parser.parse_args()
    errors: dict[str, list[float]] = {"litgpt memory": [], "litgpt speed": [], "qwen memory": [], "qwen speed": []}
    traced: dict[str, TracedModel] = {}
    configs = tomllib.loads(_CONFIGS.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        for table, row, peak, speed, name in rows(given.published):
            if name not in traced:
                traced[name] = _traced(name, configs[table][name], Path(folder), table)
            server = _server(traced[name], table, row["quant"])
            held = server.generation_memory(1, server.peaks)
            found = server.estimate()
            words = f"{table:7}{name:16}{row['quant']:12}{held.allocated / GIB:7.2f} GiB"
            if peak:
                errors[f"{table} memory"].append(held.allocated / peak - 1)
                words += f" ({peak / GIB:.2f}, {errors[f'{table} memory'][-1]:+.1%})"
            else:
                words += f" ({'fits' if found.fits else 'does not fit'}; published: no memory)"
            if speed and found.speed is not None:
                each = 1 / found.speed.each_token.middle
                errors[f"{table} speed"].append(each / speed - 1)
                words += f", {each:.1f} tokens/s ({speed:.1f}, {errors[f'{table} speed'][-1]:+.0%})"
            print(words, flush=True)
    for key, values in errors.items():
        ordered = sorted(map(abs, values))
        print(f"{key}: {len(ordered)} rows, median {statistics.median(ordered):.1%}, farthest {ordered[-1]:.1%}")


def _traced(name: str, config: Mapping[str, Any], folder: Path, table: str) -> TracedModel:
    path = folder / f"{name.replace(' ', '-')}.json"
    path.write_text(json.dumps({"dtype": "bfloat16", "max_position_embeddings": 8192, **config}), encoding="utf-8")
    prompt = (_LITGPT if table == "litgpt" else _QWEN)[0]
    return traced_model(
        str(path),
        "A100 80GB",
        rules=rules_of("vllm"),
        asked=ServeSettings(),
        dtype=None,
        batched_tokens=[prompt, prompt + 256],
        sampled_rows=[1, 64],
        degrees=[1],
    )


def _server(model: TracedModel, table: str, quant: str) -> BatchServer:
    is_litgpt = table == "litgpt"
    prompt, answer = _LITGPT if is_litgpt else _QWEN
    return BatchServer(
        model=model,
        device=find("A100-SXM4-40GB" if is_litgpt else "A100 80GB"),
        rules=BatchRules.of("transformers", "5.0.0" if is_litgpt else "4.31.0"),
        weight_format=_format(_FORMATS[quant], is_litgpt=is_litgpt),
        kv_dtype="auto",
        cache="static" if is_litgpt else "dynamic",
        requests=1,
        prompt=prompt,
        answer=answer,
    )


def _format(name: str | None, *, is_litgpt: bool) -> WeightFormat | None:
    if name == "gptq-int8":
        four = format_named("gptq")
        assert four is not None
        return dataclasses.replace(four, name=name, bits=8, group_bits=24, kept_copies=0)
    found = format_named(name)
    if found is None or not is_litgpt:
        return found
    return dataclasses.replace(found, keeps=("embedding",), written_copies=2)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


if __name__ == "__main__":
    main()
