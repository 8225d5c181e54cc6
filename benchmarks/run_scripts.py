"""Runs the training scripts of tests/scripts with plans on them, and compares their losses with those of the plain scripts.

    python -m benchmarks.run_scripts --csv docs/run.csv [SCRIPT ...]

Each script is planned for a virtual RTX 4090 with a budget that its plain run exceeds; the planned script is run on the virtual card to the end
of its first steps, and then on the host with real numbers, as is the plain one. The budget of a row that exists is kept; that of a new one is
a third of the way from the least that a plan reaches to what the plain run holds. The scripts are not changed; the losses are those that they call
`backward` on (`benchmarks/run_losses.py`). A table that exists is continued: rows that are ok are kept, the others are tried again.
"""

import argparse
import csv
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CARD = "RTX 4090"
MIB = 1 << 20
SECONDS_PER_COMMAND = 600
# Sizes at which activations dominate the memory on the GPU, and the host takes seconds.
ARGUMENTS = {
    "accelerate_glue": "--vocab_size 400 --hidden_size 256 --num_hidden_layers 4 --num_attention_heads 4 --max_length 128 "
    "--num_train_samples 96 --num_eval_samples 12 --batch_size 32 --eval_batch_size 8 --num_epochs 1",
    "accumulation_ema": "--image_size 96 --patch_size 8 --dim 128 --depth 4 --num_images 192 --batch_size 64 "
    "--accumulation_steps 3 --epochs 1",
    "clip_two_tower": "--batch-size 512 --num-samples 1536 --image-size 64 --vision-width 64 --embed-dim 64 --vocab-size 200 "
    "--context-length 48 --text-width 128 --text-layers 4 --text-heads 4 --epochs 1",
    "detection": "--image-size 256 --width 32 --num-images 24 --batch-size 8 --epochs 1",
    "diffusion_unet": "--resolution 64 --block_out_channels 16 32 --layers_per_block 1 --norm_num_groups 4 --num_images 96 "
    "--train_batch_size 32 --num_epochs 1 --num_inference_steps 2",
    "gan": "--batchSize 256 --numImages 768 --nz 16 --ngf 32 --ndf 32 --niter 1 --manualSeed 1",
    "lightning_mnist": "--batch_size 4096 --channels 16 --num_samples 8192 --max_epochs 1",
    "manual_sgd": "--batch_size 4096 --hidden 512 --steps 5",
    "nanogpt_train": "--n_layer 4 --n_head 4 --n_embd 128 --vocab_size 4096 --block_size 128 --batch_size 32 --max_iters 3 "
    "--eval_interval 2 --eval_iters 1 --gradient_accumulation_steps 2",
    "peft_lora": "--hidden_size 128 --intermediate_size 256 --num_hidden_layers 4 --num_attention_heads 4 --batch_size 16 "
    "--num_key_value_heads 2 --vocab_size 4096 --max_seq_length 256 --lora_r 4 --num_samples 96 --no_gradient_checkpointing",
    "reinforce": "--hidden 2000000 --episodes 4 --max-steps 12",
    "run_clm": "--model_type gpt2 --num_hidden_layers 3 --hidden_size 128 --num_attention_heads 4 --vocab_size 4096 "
    "--block_size 256 --num_train_samples 96 --num_eval_samples 4 --eval_steps 2 --max_steps 3 --per_device_train_batch_size 16",
    "sampling_rnn": "--emsize 512 --nhid 1024 --epochs 1 --batch_size 16 --bptt 32 --chars 2600",
    "segmentation_unet": "--epochs 1 --batch-size 4 --image-size 128 --num-images 80 --width 32 --depth 3",
    "seq2seq_t5": "--d_model 128 --d_ff 256 --num_layers 3 --num_heads 4 --vocab_size 4096 --max_source_length 128 "
    "--train_batch_size 32 --num_train_samples 96 --num_eval_samples 4 --num_epochs 1 --max_new_tokens 4",
    "vit_amp": "--image-size 64 --patch-size 8 --dim 128 --depth 4 --heads 4 --mlp-dim 256 --num-classes 10 --batch-size 64 "
    "--train-images 192 --val-images 16 --epochs 1",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One script. `largest_difference` is the largest relative one of the losses, 0 where they are the same bit for bit; `status` ok or why not."""

    script: str
    budget_mib: int
    plain_mib: int
    plain_high_mib: int
    planned_mib: int
    choices: str
    num_losses: int
    largest_difference: float | None
    seconds: float
    status: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Runs commands for one script in a folder of its own."""

    script: str
    folder: Path

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A Python program on the host alone, with one thread and without the network."""
        quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        quiet["PYTHONPATH"] = str(ROOT / "src")
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env=os.environ | quiet,
            capture_output=True,
            text=True,
            timeout=SECONDS_PER_COMMAND,
            check=False,
        )

    @property
    def path(self) -> str:
        """The script's file."""
        return str(ROOT / "tests" / "scripts" / f"{self.script}.py")

    @property
    def arguments(self) -> list[str]:
        """What comes after it."""
        return ARGUMENTS[self.script].split()

    def plan(self, budget_mib: int) -> dict[str, Any]:
        """The plan for that budget, which is in plan.json too."""
        words = ["--device", CARD, "--budget", f"{budget_mib}MiB", "-o", "plan.json", "--json"]
        done = self.command("-m", "tightfit", "plan", self.path, *words, "--", *self.arguments)
        if not done.stdout.startswith("{"):
            return {"error": done.stderr.strip().splitlines()[-1]}
        return json.loads(done.stdout)

    def budget_mib(self) -> int:
        """The budget: a third of the way from the upper end of the lowest plan's peak to the plain peak."""
        least = self.plan(1)
        if "error" in least:
            return 1
        plain, reached = least["baseline"]["peak"], least["peak"]["device_high_bytes"]
        if reached >= plain["device_high_bytes"]:
            return plain["device_high_bytes"] // MIB
        # Where a plan saves less than the doubt about the peak, the plain run exceeds the budget by its upper end only.
        held = plain["device_bytes"] if plain["device_bytes"] > reached else plain["device_high_bytes"]
        return -(-(reached + (held - reached) // 3) // MIB)

    def run_virtually(self) -> subprocess.CompletedProcess[str]:
        """The first steps of the planned script on the virtual GPU."""
        return self.command(
            "-m", "tightfit", "run", "--virtual", "--plan", "plan.json", self.path, "--", *self.arguments
        )

    def losses(self, *plan: str) -> tuple[list[float], str]:
        """The losses of the script on the host, and what went wrong, if something did."""
        (self.folder / "losses.json").unlink(missing_ok=True)
        done = self.command(
            str(ROOT / "benchmarks" / "run_losses.py"), "losses.json", *plan, self.path, *self.arguments
        )
        said = done.stderr.strip().splitlines()
        return json.loads((self.folder / "losses.json").read_text()), said[-1] if done.returncode else ""


def row_of(script: str, budget_mib: int | None) -> Row:
    """Plans, runs and compares one script."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(script=script, folder=Path(folder))
        budget_mib = budget_mib or bench.budget_mib()
        plan = bench.plan(budget_mib)
        virtual = bench.run_virtually()
        plain, failed = bench.losses()
        planned, failed_with_plan = bench.losses("--plan", "plan.json")
    differences = [abs(b - a) / max(abs(a), 1e-12) for a, b in zip(plain, planned, strict=False)]
    faults = [
        plan.get("error", ""),
        "" if plan.get("fits") and plan.get("choices") else "no plan fits",
        virtual.stderr.strip().splitlines()[-1] if virtual.returncode else "",
        failed,
        failed_with_plan,
        "" if len(plain) == len(planned) else f"{len(plain)} losses, and {len(planned)} with the plan",
    ]
    techniques = [choice["technique"] for choice in plan.get("choices", ())]
    return Row(
        script=script,
        budget_mib=budget_mib,
        plain_mib=plan["baseline"]["peak"]["device_bytes"] // MIB if "baseline" in plan else 0,
        plain_high_mib=plan["baseline"]["peak"]["device_high_bytes"] // MIB if "baseline" in plan else 0,
        planned_mib=plan["peak"]["device_bytes"] // MIB if "peak" in plan else 0,
        choices=" ".join(f"{name}:{techniques.count(name)}" for name in dict.fromkeys(techniques)),
        num_losses=len(planned),
        largest_difference=max(differences, default=None),
        seconds=round(time.monotonic() - started, 1),
        status=next((fault for fault in faults if fault), "ok"),
    )


def read(path: Path) -> dict[str, Row]:
    """The rows of a table, by script."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    fields: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Row)}
    return {r["script"]: Row(**{n: _value(r[n], kind) for n, kind in fields.items()}) for r in rows}


def _value(text: str, kind: Any) -> Any:
    if kind is str:
        return text
    return int(text) if kind is int else float(text) if text else None


def write(path: Path, rows: dict[str, Row]) -> None:
    """Writes the table, scripts in order."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(dataclasses.asdict(rows[script]) for script in sorted(rows))


def main() -> None:
    """Runs the scripts that are named, or all, and writes each row as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("scripts", nargs="*", choices=[*ARGUMENTS, []])
    asked = parser.parse_args()
    rows = read(asked.csv)
    for script in asked.scripts or [name for name in ARGUMENTS if name not in rows or rows[name].status != "ok"]:
        known = rows.get(script)
        rows[script] = row_of(script, known.budget_mib if known is not None and known.status == "ok" else None)
        write(asked.csv, rows)
        print(rows[script], flush=True)


if __name__ == "__main__":
    main()
