"""Writes the examples of this folder anew: `python docs/examples/write.py FOLDER [NAME ...]`, where FOLDER has the four recordings.

An example is a text file whose first lines are commands, each after a `$ `, followed by what the last of them prints. The commands run in
a folder of their own, with the recordings beside the workloads of `benchmarks`.
"""

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORDINGS = ("lm_2.7b_ctx128_forward", "lm_2.7b_ctx256_step", "lm_medium_ctx128_inference", "lm_medium_ctx256_step")
_ESTIMATE = "tightfit estimate benchmarks/workloads/{workload} --device {card} --steps {steps} --save-tape {tape}"


def examples() -> dict[str, list[str]]:
    """The commands of each example, by its name."""
    found = {}
    for name in RECORDINGS:
        found[f"doctor_{name}"] = [f"tightfit doctor {name}.pickle"]
        found[f"tune_{name}"] = [f"tightfit replay {name}.pickle --tune"]
    for model, first, second in (("2.7b", *RECORDINGS[:2]), ("medium", *RECORDINGS[2:])):
        found[f"diff_{model}_forward_and_step"] = [f"tightfit diff {first}.pickle {second}.pickle"]
    estimates = (
        ("recorded_24_layers.py:train", "a100-80gb", 3, "lm_medium_ctx256_step"),
        ("recorded_32_layers.py:train", "h100", 1, "lm_2.7b_ctx256_step"),
    )
    for workload, card, steps, recording in estimates:
        estimate = _ESTIMATE.format(workload=workload, card=card, steps=steps, tape="estimate.npz")
        found[f"diff_estimate_and_{recording}"] = [estimate, f"tightfit diff estimate.npz {recording}.pickle"]
    return found


def output_of(commands: list[str], recordings: Path) -> str:
    """What the last of the commands prints."""
    said = ""
    with tempfile.TemporaryDirectory() as folder:
        for file in recordings.glob("*.pickle"):
            (Path(folder) / file.name).symlink_to(file.resolve())
        (Path(folder) / "benchmarks").symlink_to(ROOT / "benchmarks")
        for command in commands:
            program, *arguments = shlex.split(command)
            path = str(Path(sys.executable).with_name(program))
            said = subprocess.run([path, *arguments], cwd=folder, stdout=subprocess.PIPE, text=True, check=True).stdout
    return "".join(line.rstrip() + "\n" for line in said.splitlines())


def main() -> None:
    """Writes the examples of the names that are given, or all."""
    recordings, names = Path(sys.argv[1]), sys.argv[2:]
    chosen = {name: commands for name, commands in examples().items() if not names or name in names}
    for name, commands in chosen.items():
        head = "".join(f"$ {command}\n" for command in commands)
        (HERE / f"{name}.txt").write_text(f"{head}\n{output_of(commands, recordings)}", encoding="utf-8")
        sys.stderr.write(f"{name}\n")


if __name__ == "__main__":
    main()
