"""The tools that layouts are exported to, by name."""

from tightfit.errors import UsageError
from tightfit.layouts.exports.accelerate import Accelerate
from tightfit.layouts.exports.deepspeed import DeepSpeed
from tightfit.layouts.exports.launchers import LAUNCHERS
from tightfit.layouts.exports.megatron import Megatron
from tightfit.layouts.exports.own_ranks import OwnRanks
from tightfit.layouts.exports.tool import AbstractTool
from tightfit.layouts.exports.torchtitan import Torchtitan

TOOLS: dict[str, AbstractTool] = {
    tool.name: tool for tool in (Torchtitan(), Accelerate(), DeepSpeed(), Megatron(), OwnRanks(), *LAUNCHERS)
}


def tool_named(name: str) -> AbstractTool:
    """The tool of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in TOOLS:
        raise UsageError(f"--export {name}: no such tool; one of {', '.join(TOOLS)}")
    return TOOLS[name]
