"""What starts the processes of a layout: a `torchrun` line, a Slurm script, and a PyTorchJob of Kubernetes. They start any program: how it shards itself is its own matter.

Sources: torch/distributed/run.py (`get_args_parser`); Slurm's manual page of sbatch; kubeflow/training-operator 1.9.4, the custom resource kubeflow.org/v1 PyTorchJob, whose operator
gives each pod the variables PET_NNODES, PET_NPROC_PER_NODE, PET_MASTER_ADDR ... that torchrun reads.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tightfit.layouts.exports.layout_run import Export, LayoutRun
from tightfit.layouts.exports.text_formats import ShellText, comments, shell_line, yaml
from tightfit.layouts.exports.tool import AbstractTool
from tightfit.layouts.layout import Layout, Recomputation
from tightfit.layouts.model.model_parts import ModelParts

_PORT = 29500
_CPUS_PER_GPU = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launcher(AbstractTool):
    """What starts the processes of any layout."""

    file_name: str
    write: Callable[[LayoutRun], str]

    def refusal(self, layout: Layout, model: ModelParts) -> str:
        """Nothing: how a program shards itself is its own matter."""
        return ""

    def recomputed(self, kind: Recomputation, layout: Layout, most: int) -> Sequence[int]:
        """Any number: the program's own."""
        return range(1, most + 1)

    def stored(self, model: ModelParts) -> ModelParts:
        """As traced."""
        return model

    def export(self, run: LayoutRun) -> Export:
        """The file."""
        notes = [f"{run.script[0]} has to shard itself: these are only its processes"]
        if not run.command:
            notes.append("train.py stands for your script: what was traced is a function")
        return Export(
            tool=self.name,
            version=self.version,
            file_name=self.file_name,
            text=self.write(run),
            notes=tuple(notes),
        )


def torchrun_script(run: LayoutRun) -> str:
    """The line, for each node where there are several."""
    several = ["On each node, with HEAD_NODE set to the name of the first one."] if run.num_nodes > 1 else []
    return "#!/bin/sh\n" + comments([_heading(run), *several]) + shell_line(_torchrun(run, ShellText("train"))) + "\n"


def slurm_script(run: LayoutRun) -> str:
    """A script for sbatch: one task for each node, which runs torchrun."""
    options = {
        "job-name": "train",
        "nodes": run.num_nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": run.gpus_per_node,
        "cpus-per-task": _CPUS_PER_GPU * run.gpus_per_node,
        "exclusive": None,
        "time": "24:00:00",
        "output": "%x-%j.log",
    }
    lines = "".join(
        f"#SBATCH --{name}" + ("" if value is None else f"={value}") + "\n" for name, value in options.items()
    )
    head = 'HEAD_NODE="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"\n'
    command = shell_line(["srun", *_torchrun(run, ShellText('"$SLURM_JOB_ID"'))])
    return f"#!/bin/bash\n{lines}{comments([_heading(run)])}set -eu\n{head}{command}\n"


def pytorch_job(run: LayoutRun) -> str:
    """A PyTorchJob: a master, and a worker for each other node, with all GPUs of a node in one pod."""
    replicas = {"Master": _replica(run, 1)}
    if run.num_nodes > 1:
        replicas["Worker"] = _replica(run, run.num_nodes - 1)
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "train"},
        "spec": {"nprocPerNode": str(run.gpus_per_node), "pytorchReplicaSpecs": replicas},
    }
    return comments([_heading(run), "Fill in the image, and volumes for data and checkpoints."]) + yaml(job)


LAUNCHERS = (
    Launcher(name="torchrun", version="torch 2.13", file_name="launch.sh", write=torchrun_script),
    Launcher(name="slurm", version="Slurm 24.11", file_name="layout.sbatch", write=slurm_script),
    Launcher(name="kubernetes", version="training-operator 1.9.4", file_name="layout.yaml", write=pytorch_job),
)


def _heading(run: LayoutRun) -> str:
    return f"{run.layout}: {run.layout.num_gpus} GPUs. This starts the processes; {run.script[0]} has to shard itself so (fully_shard, a device mesh), or a tool does."


def _torchrun(run: LayoutRun, rendezvous: ShellText) -> list[str]:
    if run.num_nodes == 1:
        return ["torchrun", "--standalone", f"--nproc-per-node={run.gpus_per_node}", *run.script]
    return [
        "torchrun",
        f"--nnodes={run.num_nodes}",
        f"--nproc-per-node={run.gpus_per_node}",
        "--rdzv-backend=c10d",
        ShellText(f"--rdzv-id={rendezvous}"),
        ShellText(f'--rdzv-endpoint="$HEAD_NODE:{_PORT}"'),
        *run.script,
    ]


def _replica(run: LayoutRun, number: int) -> dict[str, Any]:
    gpus = {"nvidia.com/gpu": run.gpus_per_node}
    container = {
        "name": "pytorch",
        "image": "IMAGE",
        "command": ["torchrun", *run.script],
        "resources": {"limits": gpus, "requests": gpus},
        # NCCL's buffers between processes of a pod are in shared memory, of which a container has 64 MiB.
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    volumes = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    return {
        "replicas": number,
        "restartPolicy": "OnFailure",
        "template": {"spec": {"containers": [container], "volumes": volumes}},
    }
