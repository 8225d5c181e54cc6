"""What an export is made of: a layout, where it runs, and what the traced program shows of the model."""

import dataclasses
from typing import Any

from tightfit.errors import UsageError
from tightfit.layouts.layout import Layout
from tightfit.layouts.model.blocks_at_host import BlocksAtHost


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRun:
    """One layout on the nodes that it uses.

    `stage_blocks` are the blocks of each stage of a pipeline in the order of the model, `block_classes` the names of their classes. `stored_dtype` and `computed_dtype` are those of
    the program's weights and products ("float32", "bfloat16", "float16"). `recomputed` are the modules of the blocks that each rank recomputes. `at_host` are the blocks that are streamed where the layout says so, `states_per_parameter` bytes of optimizer states per byte of a
    trained weight. `command` is the script with its arguments, empty where the traced program is none.
    """

    layout: Layout
    num_nodes: int
    gpus_per_node: int
    examples: int
    sequence_length: int
    stage_blocks: tuple[int, ...]
    block_classes: tuple[str, ...]
    stored_dtype: str
    computed_dtype: str
    command: tuple[str, ...] = ()
    device: str = ""
    recomputed: tuple[str, ...] = ()
    at_host: BlocksAtHost | None = None
    states_per_parameter: float = 0.0

    @property
    def num_blocks(self) -> int:
        """The blocks of the model."""
        return sum(self.stage_blocks)

    @property
    def is_mixed(self) -> bool:
        """Whether weights are stored in a wider type than is computed with."""
        return self.stored_dtype != self.computed_dtype

    @property
    def script(self) -> tuple[str, ...]:
        """The command, or a name to put one's own in place of."""
        return self.command or ("train.py",)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """A file for `tool`, and what a file for it cannot say. `version` is the release whose parser has accepted files like it."""

    tool: str
    version: str
    file_name: str
    text: str
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The value of its tool in the object `exports` of `tightfit plan --gpus --json`."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "tool"}


def num_nodes_of(num_gpus: int, gpus_per_node: int, num_nodes: int) -> int:
    """The fewest of `num_nodes` nodes that `num_gpus` are spread evenly over: launchers start as many processes on each.

    Raises:
        UsageError: there is no such number.
    """
    fewest = -(-num_gpus // gpus_per_node)
    for number in range(fewest, num_nodes + 1):
        if num_gpus % number == 0:
            return number
    raise UsageError(
        f"the layout takes {num_gpus} GPUs, which cannot be spread evenly over {num_nodes} nodes of {gpus_per_node}; give another --gpus"
    )
