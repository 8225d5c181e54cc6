"""The server that children for traces are forked from: what it imports, in which environment, and when it begins.

It imports torch, which takes most of the time of a short command. A command begins it before it imports what itself computes with, so that both are done at once.
"""

import os
from pathlib import Path
from typing import Any

from tightfit.capture.collectives.world import World
from tightfit.capture.processes import visible_devices
from tightfit.capture.processes.containment.policy import Policy
from tightfit.capture.processes.fork_server import begin
from tightfit.capture.targets.huggingface.known_names import modules_of
from tightfit.capture.targets.library_imports import library_imports
from tightfit.capture.targets.target_kinds import GeneratorFunction, HuggingFaceConfig, Script, Target

# What every trace imports, and the catalogue that it reads. Three are imported by torch itself, when it makes the first tensor without data and runs
# the first backward pass; safetensors is patched where it is installed.
PRELOADED = (
    "tightfit.capture.child_process.child",
    "tightfit.capture.child_process.capture_session",
    "tightfit.devices.catalogue:all_devices",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "torch._functorch.config",
    "torch.nn.attention.flex_attention",
    "safetensors.torch",
)
_OF_HUGGING_FACE = "tightfit.capture.targets.huggingface.preload:import_transformers"
# Around the imports of libraries that a program begins with.
_BEFORE, _AFTER = (f"tightfit.capture.targets.imported_before:{name}" for name in ("begin", "note"))
_SAVED = (".npz", ".pickle")


def preloaded(*, is_huggingface: bool, program: Path | None = None) -> tuple[str, ...]:
    """What the server imports, and calls, for traces of a model of Hugging Face, or of the file of a `program`."""
    statements = () if program is None else library_imports(program)
    if statements:
        return (*PRELOADED, _BEFORE, *statements, _AFTER)
    return (*PRELOADED, _OF_HUGGING_FACE) if is_huggingface else PRELOADED


def program_of(target: Target, world: dict[str, Any] | None) -> Path | None:
    """The file whose first statements a trace of `target` runs first; None for what is imported, as a package may run something before, and for one
    process of many: some libraries ask at their import which it is."""
    if world is not None:
        return None
    if isinstance(target, Script):
        return None if target.module else Path(target.path)
    is_file = isinstance(target, GeneratorFunction) and target.location.endswith(".py")
    return Path(target.location) if is_file else None


def imports_of(target: Target) -> tuple[str, ...]:
    """What it imports when such a target is traced for the first time."""
    return modules_of(target.source) if isinstance(target, HuggingFaceConfig) else ()


def trace_environment(policy: Policy, world: dict[str, Any] | None) -> dict[str, str]:
    """The environment of a trace. Where there is a card, it is hidden: the virtual one is the same everywhere, and no context is made on the real one."""
    hidden = {**visible_devices.hidden(), "TOKENIZERS_PARALLELISM": "false"}
    distributed = {} if world is None else World(**world).environment()
    return {**os.environ, **hidden, **policy.environment(), **distributed}


def begin_for(target: str, *, allow_writes: bool, allow_network: bool, is_one_of_many: bool = False) -> None:
    """Begins the server for traces of `target`; a saved one needs none. `is_one_of_many`: it is traced as one process of a distributed program."""
    if Path(target).suffix not in _SAVED:
        policy = Policy(allow_writes=allow_writes, allow_network=allow_network)
        is_model = _names_model(target)
        path = Path(target.partition(":")[0])
        is_file = path.suffix == ".py" and not (is_model or is_one_of_many)
        names = preloaded(is_huggingface=is_model, program=path if is_file else None)
        begin(trace_environment(policy, None), names, is_kept=not policy.allows_all)


def _names_model(target: str) -> bool:
    """Whether a target looks like a model of Hugging Face, and not like a program; where that is wrong, another server is begun later."""
    names = target.split(".")
    is_module = all(map(str.isidentifier, names)) and (len(names) > 1 or Path(f"{target}.py").exists())
    return not (is_module or target.endswith(".py") or ":" in target)
