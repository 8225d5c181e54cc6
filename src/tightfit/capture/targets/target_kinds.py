"""The kinds of workloads that a user can name, distinguished by their form, and how each is run.

train.py                      a script, run as python would run it, with the arguments after `--`
package.module                the same of a module, run as `python -m` would run it
FILE.py:FUNCTION              a generator function in a file
package.module:FUNCTION       a generator function in an importable module
config.json, a folder, gpt2   a Hugging Face config with a task
"""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tightfit.capture.targets.huggingface.known_names import refuse_unknown
from tightfit.capture.targets.huggingface.target import HuggingFaceTarget
from tightfit.capture.targets.target_files import (
    check_syntax,
    installed_command,
    module_file,
    refuse_other_files,
)
from tightfit.errors import UsageError
from tightfit.errors.missing_files import no_file


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A file to be run as `__main__`; with `module`, as `python -m MODULE` runs it."""

    path: str
    arguments: tuple[str, ...]
    module: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorFunction:
    """A function that sets up and then yields once per step. `parameters` are its keyword arguments."""

    location: str
    function: str
    parameters: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceConfig:
    """A model from its config, with `options` of `tightfit.capture.targets.huggingface.target.HuggingFaceTarget`."""

    source: str
    options: Mapping[str, Any]


Target = Script | GeneratorFunction | HuggingFaceConfig


def parse_target(
    text: str,
    *,
    arguments: Sequence[str] = (),
    parameters: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Target:
    """The target that `text` names.

    Raises:
        UsageError: there is no such file, function or model, or it takes no such arguments.
        ProgramError: the script has a syntax error.
    """
    _refuse_no_texts("arguments", arguments, "['--epochs', '1']")
    _refuse_no_texts("parameters", parameters, "['batch_size=16']")
    refuse_other_files(text)
    if arguments and re.fullmatch("[KMGT]i?B?|%", arguments[0]):
        raise UsageError(f"{arguments[0]} stands alone: write a size as one word, such as 2{arguments[0]}")
    script = parse_script(text, arguments)
    if script is not None:
        if parameters:
            raise UsageError(
                f"-p sets a parameter of a generator function; {text} is a script: give it its own arguments after --"
            )
        check_syntax(script.path)
        return script
    location, colon, function = text.rpartition(":")
    if not colon and "." in text and all(map(str.isidentifier, text.split("."))) and not Path(text).exists():
        raise UsageError(f"there is no file and no module {text} to run here (python -m {text})")
    if colon and (location.endswith(".py") or location.replace(".", "").isidentifier()):
        if location.endswith(".py") and not Path(location).is_file():
            raise UsageError(no_file(location))
        if not function.isidentifier():
            raise UsageError(f"'{function}' in {text} is not the name of a function")
        if arguments:
            raise UsageError(
                f"arguments after -- go to a script; {text} is a function: set its parameters with -p name=value"
            )
        return GeneratorFunction(
            location=location, function=function, parameters=dict(_parameter(p) for p in parameters)
        )
    if command := installed_command(text):
        raise UsageError(f"{text} is {command}")
    if arguments or parameters:
        raise UsageError(
            f"{text} is neither a script (FILE.py) nor a function (FILE.py:FUNCTION), so it takes neither -p nor arguments"
        )
    refuse_unknown(text)
    # Wrong values are said before transformers is loaded, which takes seconds.
    HuggingFaceTarget(source=text, **(options or {}))
    return HuggingFaceConfig(source=text, options=dict(options or {}))


def _refuse_no_texts(name: str, value: object, example: str) -> None:
    # A text is a sequence too, of its letters.
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise UsageError(f"{name} must be a list of strings, such as {example}, not {type(value).__name__}")
    others = [each for each in value if not isinstance(each, str)]
    if others:
        raise UsageError(f"{name} must be a list of strings, such as {example}: write '{others[0]}' for {others[0]!r}")


def parse_script(text: str, arguments: Sequence[str]) -> Script | None:
    """The script or module that `text` names; None if it names something else.

    Raises:
        UsageError: there is no such file.
    """
    module = module_file(text) if not text.endswith(".py") else None
    if module is None and not text.endswith(".py"):
        return None
    path = module or text
    if not Path(path).is_file():
        raise UsageError(no_file(path))
    return Script(path=path, arguments=tuple(arguments), module=text if module else "")


def words_of(target: Target) -> tuple[str, ...]:
    """The words of a target that may name files."""
    if isinstance(target, Script):
        return (target.path, *target.arguments)
    if isinstance(target, GeneratorFunction):
        return (target.location, *(value for value in target.parameters.values() if isinstance(value, str)))
    return (target.source,)


def _parameter(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"-p {text}: write name=value")
    try:
        # Numbers, lists and None as Python writes them; anything else is taken for a string, so that no quotes
        # are needed.
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def run_script(script: Script, *, compiled: Callable[[bytes, str], CodeType | None] | None = None) -> Mapping[str, Any]:
    """Runs the script until it ends or raises; returns its globals, which stay alive as long as they are held.

    `compiled` makes code of its source, or None, where Python is to do that.
    """
    path, spec = script.path, None
    if script.module:
        # As `python -m` sets them.
        sys.path[0], path = os.getcwd(), str(Path(script.path).resolve())
        is_package = Path(path).name == "__main__.py" and not script.module.endswith(".__main__")
        name = script.module + (".__main__" if is_package else "")
        importlib.import_module(name.rpartition(".")[0])
        spec = importlib.util.find_spec(name)
    else:
        # As `python FILE` sets it: modules beside the script are found, those of the working folder are not.
        sys.path[0] = str(Path(path).resolve().parent)
    sys.argv = [path, *script.arguments]
    code = None if compiled is None else compiled(Path(script.path).read_bytes(), script.path)
    if code is None and spec is not None:
        return runpy.run_module(script.module, run_name="__main__", alter_sys=True)
    if code is None:
        return runpy.run_path(path, run_name="__main__")
    # As `run_path` does with the code that it compiles itself: a module of that name, whose globals the program has.
    program = ModuleType("__main__")
    package = "" if spec is None else spec.parent
    vars(program).update(__file__=path, __cached__=None, __package__=package, __spec__=spec)
    sys.modules["__main__"] = program
    exec(code, vars(program))
    return vars(program)


def generator_of(target: GeneratorFunction) -> Iterator[Any]:
    """The user's generator, called with its parameters and not yet started.

    Raises:
        UsageError: the module has no such function, it is no generator function, or it does not take a parameter.
    """
    function = _load(target)
    if not inspect.isgeneratorfunction(function):
        raise UsageError(
            f"{target.location}:{target.function} is not a generator function: set up, then `yield` once per step"
        )
    try:
        inspect.signature(function).bind(**target.parameters)
    except TypeError as error:
        taken = ", ".join(inspect.signature(function).parameters) or "none"
        raise UsageError(f"{target.location}:{target.function}: {error}; its parameters: {taken}") from error
    return function(**target.parameters)


def generator_on(target: GeneratorFunction | HuggingFaceConfig, *, device: str) -> Iterator[Any]:
    """The generator of a target that yields once per step; a config's model is made on `device`."""
    if isinstance(target, GeneratorFunction):
        return generator_of(target)
    from tightfit.capture.targets.huggingface.target import HuggingFaceTarget, workload

    return workload(HuggingFaceTarget(source=target.source, **target.options), device=device)


def _load(target: GeneratorFunction) -> Callable[..., Any]:
    # A module that reads its arguments when it is imported has none here.
    sys.argv = [target.location]
    if target.location.endswith(".py"):
        path = Path(target.location).resolve()
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # Registered before it is run, as an import would: dataclasses and pickling look their module up there.
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, "")
        try:
            module = importlib.import_module(target.location)
        except ModuleNotFoundError as error:
            raise UsageError(f"{target.location}:{target.function}: {error}") from error
    function = getattr(module, target.function, None)
    if function is None:
        functions = [name for name, value in vars(module).items() if inspect.isgeneratorfunction(value)]
        known = f"; it has {', '.join(functions)}" if functions else ", and no generator function at all"
        raise UsageError(f"{target.location} has no function {target.function}{known}")
    return function
