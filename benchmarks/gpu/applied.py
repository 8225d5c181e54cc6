"""Plans made without the card, applied on the card of this machine: the same losses and weights, the promised memory, the promised time?

    PYTHONPATH=src python -m benchmarks.gpu.applied --out results [--minutes 6] [--match decoder] [--device H100] [--predict-only]

Each case is one run of `script.py` as it is and one under `tightfit run --plan`. All plans are made first, beside each other; then one run after the
other has the card alone; predictions that are in --out already, made on another machine, are used as they are. The first steps run with deterministic kernels: their losses, and the bits of all weights after them, must be the plain
run's where the plan calls itself exact bit for bit. In --out: applied.jsonl, a line for each case, and the plans. Ends with 1 where a result is wrong.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu" / "script.py"
_GIB = 1 << 30
_DECODER = '{"depth": 12, "width": 1024}'
_WIDE = '{"depth": 8, "width": 4096}'
# How far losses of the first steps may be apart: with sums in another order, and with states in few bits.
_CLOSE, _LOSSY = 2e-3, 5e-2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One workload with one budget, as a share of what its plain run holds on the card; `limits` are options of `tightfit plan`."""

    name: str
    script: Sequence[str]
    share: float
    limits: Sequence[str] = ()


def _of(family: str, model: str, data: int, batch_size: int, precision: str, *more: str) -> list[str]:
    found = ["--family", family, "--model", model, "--data", str(data), "--batch-size", str(batch_size)]
    return [*found, "--precision", precision, *more]


_AMP = _of("decoder", _DECODER, 1024, 16, "amp-bf16", "--clips")
_BF16 = _of("decoder", _WIDE, 4096, 2, "bf16")
_FP32 = _of("decoder", _DECODER, 512, 4, "fp32")
_SMALL = _of("decoder", '{"depth": 6, "width": 1536}', 512, 2, "fp32", "--clips")
_VIT = _of("vit", '{"depth": 12, "width": 768}', 224, 128, "amp-bf16")
_CNN = _of("residual", '{"depths": [3, 4, 6, 3], "width": 64}', 224, 128, "amp-fp16")
HOST = ("--host", "48GiB")
# What sums in another order.
BITWISE = tuple(word for name in ("optimizer_kernel", "chunked_loss", "tiled_tokens") for word in ("--without", name))
CASES = (
    Case(name="decoder-amp-70", script=_AMP, share=0.7),
    Case(name="decoder-amp-45", script=_AMP, share=0.45),
    Case(name="decoder-amp-45-host", script=_AMP, share=0.45, limits=HOST),
    Case(name="wide-bf16-65-host", script=_BF16, share=0.65, limits=HOST),
    Case(name="wide-bf16-30-host", script=_BF16, share=0.30, limits=HOST),
    Case(name="decoder-amp-45-bitwise", script=_AMP, share=0.45, limits=(*HOST, *BITWISE)),
    Case(name="small-fp32-35-bitwise", script=_SMALL, share=0.35, limits=(*HOST, *BITWISE)),
    Case(name="decoder-fp32-60-lossy", script=_FP32, share=0.60, limits=("--allow", "low_bit_states")),
    Case(name="vit-amp-50", script=_VIT, share=0.5),
    Case(name="residual-amp-60", script=_CNN, share=0.6),
)


def _run(
    words: Sequence[str], folder: Path, *, on_card: bool, seconds: float = 600
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    environment |= {} if on_card else {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        return subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 124, "", f"took more than {seconds} seconds")


def _answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON of a command, or its last line of error."""
    for begin in (done.stdout.find("{"), done.stdout.rfind('{"losses"')):
        if begin >= 0:
            try:
                return json.loads(done.stdout[begin:])
            except json.JSONDecodeError:
                continue
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return {"fault": f"exit code {done.returncode}: {' / '.join(lines[-3:])[:600]}"}


def predict(case: Case, device: str, out: Path) -> dict[str, Any]:
    """The plain estimate and the plan of a case; its plan file is written to `out`."""
    begin = time.monotonic()
    common = [str(SCRIPT), "--device", device, "--json", "--used", "0"]
    plain = _answer(_run(["-m", "tightfit", "estimate", *common, "--", *case.script], out, on_card=False))
    if "fault" in plain:
        return {"plain": plain, "plan": plain}
    budget = int(case.share * plain["peak"]["device_bytes"])
    words = ["plan", *common, "--budget", f"{budget >> 20}MiB", *case.limits, "-o", str(out / f"{case.name}.json")]
    plan = _answer(_run(["-m", "tightfit", *words, "--", *case.script], out, on_card=False))
    return {"plain": plain, "plan": plan, "budget_bytes": budget, "planning_seconds": time.monotonic() - begin}


def measure(case: Case, out: Path, plain: dict[str, Any]) -> dict[str, Any]:
    """The planned run on the card beside the plain one."""
    words = ["-m", "tightfit", "run", str(SCRIPT), "--plan", str(out / f"{case.name}.json"), "--", *case.script]
    done = _run(words, out, on_card=True)
    found = _answer(done)
    return {"plain": plain, "planned": found, "said": done.stderr[-1500:]}


def verdict(case: Case, predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    """`the same`, `close`, or what is wrong."""
    plain, planned = measured["plain"], measured["planned"]
    for each in (predicted["plan"], plain, planned):
        if "fault" in each:
            return f"failed: {each['fault']}"
    if (plain["losses"], plain["bits"]) == (planned["losses"], planned["bits"]):
        return "the same"
    furthest = max(abs(a - b) / abs(a) for a, b in zip(plain["losses"], planned["losses"], strict=True))
    bound = _LOSSY if "--allow" in case.limits else _CLOSE
    told = f"losses differ by {furthest:.2g}"
    return f"close: {told}" if furthest < bound else f"WRONG: {told}"


def line(case: Case, predicted: Mapping[str, Any], measured: Mapping[str, Any], told: str) -> str:
    """One case in words."""
    if told.startswith("failed"):
        return f"{case.name:24} {told}"
    shown = [f"{case.name:24} {told}"]
    for name, promise in (("plain", predicted["plain"]), ("planned", predicted["plan"])):
        run, peak = measured[name], promise["peak"]
        seconds = sorted(run["seconds"])[len(run["seconds"]) // 2]
        shown.append(
            f"{name}: allocated {run['allocated'] / _GIB:.2f} ({peak['allocated_bytes'] / _GIB:.2f} promised) "
            f"reserved {run['reserved'] / _GIB:.2f} ({peak['reserved_bytes'] / _GIB:.2f}) "
            f"{1e3 * seconds:.1f} ms ({1e3 * (promise['seconds_per_step'] or 0):.1f})"
        )
    return "; ".join(shown)


def main(words: Sequence[str] | None = None) -> int:
    """Runs the benchmark; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.applied", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after this time")
    parser.add_argument("--match", default="", help="only cases whose name contains this")
    parser.add_argument("--device", help="the card in the catalogue; default: what the driver calls it")
    parser.add_argument("--planners", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--predict-only", action="store_true")
    given = parser.parse_args(words)
    device = given.device or _card_here()
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    cases = [case for case in CASES if given.match in case.name]
    end = time.monotonic() + 60 * given.minutes
    predictions = _predictions(cases, device, out, given.planners)
    plains: dict[tuple[str, ...], dict[str, Any]] = {}
    is_wrong = False
    with (out / "applied.jsonl").open("a", encoding="utf-8") as file:
        for case, predicted in zip(cases, predictions, strict=True):
            row: dict[str, Any] = {"case": dataclasses.asdict(case), "device": device, "predicted": predicted}
            if given.predict_only:
                plan = predicted["plan"]
                print(case.name, plan.get("fault") or f"{plan['peak']['device_bytes'] / _GIB:.2f} GiB", flush=True)
            elif time.monotonic() < end:
                key = tuple(case.script)
                if key not in plains:
                    plains[key] = _answer(_run([str(SCRIPT), *case.script], out, on_card=True))
                row["measured"] = measure(case, out, plains[key])
                row["verdict"] = verdict(case, predicted, row["measured"])
                is_wrong = is_wrong or row["verdict"].startswith(("WRONG", "failed"))
                print(line(case, predicted, row["measured"], row["verdict"]), flush=True)
            file.write(json.dumps(row) + "\n")
            file.flush()
    return int(is_wrong)


def _predictions(cases: Sequence[Case], device: str, out: Path, num_planners: int) -> list[dict[str, Any]]:
    """What is in `out` already, and the others, which are added to it."""
    file = out / "predictions.jsonl"
    lines = [json.loads(each) for each in file.read_text().splitlines()] if file.exists() else []
    known = {each["name"]: each["predicted"] for each in lines}

    def predicted(case: Case) -> dict[str, Any]:
        if case.name not in known:
            known[case.name] = predict(case, device, out)
            with file.open("a", encoding="utf-8") as writer:
                writer.write(json.dumps({"name": case.name, "predicted": known[case.name]}) + "\n")
        return known[case.name]

    with concurrent.futures.ThreadPoolExecutor(num_planners) as pool:
        return list(pool.map(predicted, cases))


def _card_here() -> str:
    from tightfit.cli.shared.local_cards import local_cards

    return local_cards()[0].name


if __name__ == "__main__":
    sys.exit(main())
