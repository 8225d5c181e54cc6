"""Options that several commands have in common, in groups, each with its help text once."""

import dataclasses
from pathlib import Path
from typing import Any

from cyclopts import Group, Parameter

from tightfit.capture.collectives.world import World
from tightfit.capture.trace_settings import TraceSettings
from tightfit.cli.arguments.sizes import Size
from tightfit.errors import UsageError

SEVERAL = Parameter(consume_multiple=False)
"""One value per use of the option (-p a=1 -p b=2); cyclopts would otherwise let a list swallow the words that follow."""


@Parameter(name="*", group=Group("Parameters of a Hugging Face config", sort_key=4))
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """What a Hugging Face config leaves open; see `tightfit.capture.targets.huggingface.target.HuggingFaceTarget`.

    Parameters
    ----------
    task
        causal-lm, masked-lm, sequence-classification, image-classification, seq2seq ...
    batch_size
        Batch size, 1 if not given.
    sequence_length
        Tokens per sequence, by default 512 or the maximum of the model.
    image_size
        Pixels per side, if the config does not say.
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


@Parameter(name="*", group=Group("How the program is traced", sort_key=2))
class TraceOptions(TraceSettings):
    """The settings of a trace as options, whose help is that of their fields."""

    __doc__ = TraceSettings.__doc__

    def refuse_for(self, finished: str) -> None:
        """Refuses what was given for a run that is over and is not traced.

        Raises:
            UsageError: with the options.
        """
        fields = dataclasses.fields(self)
        given = [f"--{each.name.replace('_', '-')}" for each in fields if getattr(self, each.name) != each.default]
        if given:
            raise UsageError(f"{finished} is a finished run, which is not traced again: it takes no {', '.join(given)}")


@Parameter(name="*", group=Group("How the program is traced", sort_key=2))
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """What a traced program may do, for the commands that trace no other way than `TraceOptions` does by default.

    Parameters
    ----------
    allow_writes
        While tracing, let the program write files for real. Otherwise it sees its own writes, and they are dropped after the trace.
    allow_network
        While tracing, let the program reach other machines, for downloads that are not cached yet.
    """

    allow_writes: bool = False
    allow_network: bool = False


@Parameter(name="*", group=Group("The GPU", sort_key=1))
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions:
    """What is known of the GPU and how its memory is managed.

    Parameters
    ----------
    used
        GPU memory in use by other processes, such as 3GiB. Default: what the driver reports for the GPU of this machine, otherwise none.
    alloc_conf
        Allocator settings, as in PYTORCH_CUDA_ALLOC_CONF. Default: that variable.
    calibration
        The TOML file that tightfit calibrate wrote on that machine.
    """

    used: Size | None = None
    alloc_conf: str | None = None
    calibration: Path | None = None


@Parameter(name="*", group=Group("A distributed program", sort_key=3))
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """The processes of a script that torchrun starts, one for each GPU; one of them is traced.

    Parameters
    ----------
    gpus
        The script runs on this many GPUs, of all nodes together, and shards itself: one rank is traced, without the others.
    nodes
        Machines that the GPUs are spread over evenly. Default: as many as their kind needs.
    rank
        The rank to trace. Default: 0; for pipeline stages also the last one and one in the middle.
    node
        The kind of node by name (DGX H100, p5.48xlarge) or its TOML file, for the time of collectives. Default: the first one with such GPUs.
    """

    gpus: int | None = None
    nodes: int | None = None
    rank: int | None = None
    node: str | None = None

    def world(self) -> World | None:
        """The processes that were asked for; None without `gpus`.

        Raises:
            UsageError: there are no such ranks or nodes.
        """
        if self.gpus is None:
            if (self.nodes, self.rank, self.node) != (None, None, None):
                raise UsageError(
                    "--nodes, --rank and --node are for a distributed script: give the number of its GPUs with --gpus"
                )
            return None
        return World(num_ranks=self.gpus, num_nodes=1 if self.nodes is None else self.nodes, rank=self.rank or 0)


ONE_GPU = RankOptions()
NO_OPTIONS, AS_USUAL, AS_KNOWN, CLOSED_IN = ModelOptions(), TraceOptions(), GpuOptions(), Permissions()
