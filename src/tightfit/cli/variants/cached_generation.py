"""`tightfit run --cache`: a program that generates, with another cache of keys and values and nothing else changed."""

import importlib.util
from collections.abc import Callable, Sequence

from tightfit.capture.targets.target_kinds import Script, run_script
from tightfit.cli.arguments.programs import exit_code_of
from tightfit.errors import MissingExtra, UsageError


def run_with_cache(
    script: Script, kind: str, say: Callable[[str], None], others: Sequence[object], *, checks: bool
) -> int:
    """Runs the script; its exit code. `others` are options that do not go with it.

    Raises:
        MissingExtra: transformers is not installed.
        UsageError: there is no such cache.
    """
    if any(others):
        raise UsageError("--cache runs a script as it is, with another cache: it takes --check-steps alone")
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtra('--cache needs transformers: pip install "tightfit[hf]"')
    from tightfit.runtime.generation.generation_caches import with_cache

    def running() -> None:
        with with_cache(kind, say, checks=checks):
            run_script(script)

    return exit_code_of(running, script.path)
