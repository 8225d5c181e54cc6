"""Predicted against published start-ups of vLLM: `python -m benchmarks.serving`.

30 start-ups that other people have logged (model, card, settings, then weights, activation peak, cache in tokens), each predicted from the model's
config alone. Beside it what users reckon with (`calculators`): accelerate's estimate-memory, and parameters times bytes, without and with a fifth more.
"""

import argparse
import csv
import json
import statistics
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.serving.calculators import CALCULATORS, Calculated
from tightfit.errors import TightfitError
from tightfit.fit import serving
from tightfit.serving.serve_settings import ServeSettings
from tightfit.serving.serving_estimate import ServingEstimate
from tightfit.units import GIB

_START_UPS = Path(__file__).with_name("start_ups.toml")
_PUBLISHED = Path(__file__).parents[3] / "shared/data/published/vllm_startups.csv"
_OTHER_ENGINES = ("sglang", "pegainfer")
Row = Mapping[str, str]


def published(path: Path) -> Iterator[tuple[Row, Mapping[str, Any]]]:
    """Each published row with what `start_ups.toml` knows of it, {} where it knows nothing."""
    known = tomllib.loads(_START_UPS.read_text(encoding="utf-8"))["rows"]
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = [row["model"], row["gpu"], int(row["n_gpu"])]
            engine = next((each for each in _OTHER_ENGINES if each in row["engine_version"].lower()), "vllm")
            yield row, next((of for of in known if of["row"] == key and of.get("engine", "vllm") == engine), {})


def reason(row: Row) -> str:
    """Why a row is not predicted."""
    if any(engine in row["engine_version"].lower() for engine in _OTHER_ENGINES):
        return "another engine"
    left_out = tomllib.loads(_START_UPS.read_text(encoding="utf-8"))["left_out"]
    key = [row["model"], row["gpu"], int(row["n_gpu"])]
    return next((of["why"] for of in left_out if of["row"] == key), "its config is not known here")


def predicted(row: Row, known: Mapping[str, Any], folder: Path) -> ServingEstimate:
    """The estimate for a row."""
    config = tomllib.loads(_START_UPS.read_text(encoding="utf-8"))["models"][known["model"]]
    path = folder / f"{known['model']}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    kv_dtype = row["kv_dtype"] or "auto"
    return serving.serve(
        str(path),
        known["device"],
        asked=ServeSettings(
            num_gpus=int(row["tp"]),
            kv_dtype=kv_dtype,
            max_model_len=known.get("max_model_len") or _number(row["max_model_len"]),
            max_num_seqs=_number(row["max_num_seqs"]),
            max_num_batched_tokens=_number(row["max_num_batched_tokens"]),
            gpu_memory_utilization=known.get("share")
            or (float(row["gpu_mem_util"].split()[0]) if row["gpu_mem_util"] else None),
            chunked_prefill=known.get("chunked_prefill"),
        ),
        engine=known.get("engine", "vllm"),
        engine_version=known["version"],
        dtype=known.get("dtype"),
    )


def main() -> None:
    """Prints a line per row, then the errors over all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=_PUBLISHED, help="the table of published start-ups")
    parser.add_argument("--only", default="", help="rows whose model contains this")
    given = parser.parse_args()
    errors: dict[str, list[float]] = {"weights": [], "tokens": []}
    for name in CALCULATORS:
        errors |= {f"weights, {name}": [], f"tokens, {name}": []}
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for row, known in published(given.rows):
            if given.only not in row["model"]:
                continue
            print(_line(row, known, Path(folder), errors, verdicts), flush=True)
    print("; ".join(f"{number} rows {verdict}" for verdict, number in verdicts.items()))
    for name, found in errors.items():
        if found:
            ordered = sorted(abs(error) for error in found)
            ninth = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
            print(f"{name}: {len(found)} rows, median {statistics.median(ordered):.1%}, P90 {ninth:.1%}")


def _line(
    row: Row, known: Mapping[str, Any], folder: Path, errors: dict[str, list[float]], verdicts: Counter[str]
) -> str:
    name = f"{row['model'][:44]:44} {row['gpu'][:22]:22} x{row['n_gpu']}"
    if not known:
        verdicts["not predicted"] += 1
        return f"{name} not predicted: {reason(row)}"
    try:
        found = predicted(row, known, folder)
    except TightfitError as error:
        verdicts["not estimated"] += 1
        return f"{name} not estimated: {error}"
    # Without the card, or the longest request, whether it starts is no prediction.
    verdict = "of which parts are predicted" if "leaves_out" in known else "start" if found.fits else "do not start"
    verdicts[verdict] += 1
    parts = [verdict]
    weights, tokens, activations = (_number(row[key]) for key in ("weights_GiB_per_gpu", "kv_tokens", "act_peak_GiB"))
    if weights:
        errors["weights"].append(found.weights_bytes / GIB / weights - 1)
        parts.append(f"weights {found.weights_bytes / GIB:.2f} GiB ({weights:.2f}, {errors['weights'][-1]:+.1%})")
    if activations and "leaves_out" not in known:
        parts.append(f"activations {found.activation_bytes / GIB:.2f} GiB ({activations:.2f})")
    cache = _number(row["kv_GiB_per_gpu"])
    if cache and "leaves_out" not in known:
        parts.append(f"cache {found.kv_bytes / GIB:.2f} GiB ({cache:.2f})")
    if tokens and "leaves_out" not in known:
        errors["tokens"].append(found.kv_tokens / tokens - 1)
        parts.append(f"{found.kv_tokens:,} tokens ({tokens:,.0f}, {errors['tokens'][-1]:+.1%})")
    is_whole = "leaves_out" not in known
    parts += _calculated(found, known, folder, errors, weights, tokens if is_whole else None)
    return f"{name} {'; '.join(parts)}{'; ' + known['leaves_out'] if 'leaves_out' in known else ''}"


def _calculated(
    found: ServingEstimate,
    known: Mapping[str, Any],
    folder: Path,
    errors: dict[str, list[float]],
    weights: Any,
    tokens: Any,
) -> Iterator[str]:
    """What the calculators say of the same row; accelerate knows no cache, so that users take what its weights leave."""
    if not weights and not tokens:
        return
    of = Calculated.of_config(folder / f"{known['model']}.json")
    cards = found.settings.num_gpus
    share = found.capacity_bytes * found.settings.gpu_memory_utilization
    for name in CALCULATORS:
        words = []
        if weights:
            error = of.weights(name) / cards / GIB / weights - 1
            errors[f"weights, {name}"].append(error)
            words.append(f"weights {error:+.1%}")
        if tokens:
            error = of.tokens(name, share, cards) / tokens - 1
            errors[f"tokens, {name}"].append(error)
            words.append(f"tokens {error:+.1%}")
        yield f"[{name}: {', '.join(words)}]"


def _number(text: str) -> Any:
    first = text.split(maxsplit=1)[0] if text.split() else ""
    try:
        number = float(first)
    except ValueError:
        return None
    return int(number) if number.is_integer() and "." not in first else number


if __name__ == "__main__":
    main()
