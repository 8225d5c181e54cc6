"""What the words of a target name on disk: the file of a module, and files that are no target, which are refused in a line before anything starts.

Nothing of the program is imported for it: a package's `__init__.py` is the user's code.
"""

import importlib.metadata
import importlib.util
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

from tightfit.errors import ProgramError, UsageError
from tightfit.errors.program_errors import one_line, program_trace

# Of one folder's or file's name, on the file systems that there are.
_MOST_BYTES_OF_A_NAME = 255
_MOST_CHARACTERS_SHOWN = 60
_TEXT_OF_AN_ERROR = (
    "the text of an error, not a recording: tightfit doctor explains its figures, tightfit estimate SCRIPT says what the run needs and for what, "
    "and tightfit record SCRIPT writes a recording"
)
_NUM_BYTES_READ = 4096
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_COMPRESSED = (b"\x1f\x8b", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"BZh")
_SETTINGS = (".yaml", ".yml", ".toml", ".ini", ".cfg")
_WEIGHTS = (".safetensors", ".gguf", ".pt", ".pth", ".ckpt", ".bin", ".h5")
_LAUNCHERS = ("python", "python3", "torchrun", "accelerate", "deepspeed")


def words_for_target(target: object) -> str:
    """A target as text: paths are taken too.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(target, str | os.PathLike):
        return os.fsdecode(target)
    if isinstance(target, FunctionType):
        raise UsageError(_named_instead(target))
    raise UsageError(
        f"the target is {str(target)[:80]}, a {type(target).__name__}: give the name of what runs, such as 'train.py', 'train.py:workload' or 'gpt2'"
    )


def _named_instead(function: FunctionType) -> str:
    """A function runs in a process of its own, which finds it by its file and its name."""
    file, name = function.__code__.co_filename, function.__qualname__
    head = "the target is a function: give the name of what runs"
    if "<" in name:
        return f"{head}, such as 'train.py', or of a function of a file, such as 'train.py:workload'"
    # The cells of a notebook have names of files that there are not.
    if not Path(file).is_file():
        return f"{head}. Write this one to a file, with what it needs (in a notebook, %%writefile work.py as the first line of its cell), and give 'work.py:{name}'"
    return f"{head}, '{file}:{name}'"


def refuse_launcher(text: str) -> None:
    """Refuses what starts a script, and a script with its arguments in one word.

    Raises:
        UsageError: `text` is one; the line says what to give instead.
    """
    script, _, arguments = text.partition(" ")
    if arguments and script.endswith(".py") and not Path(text).exists():
        raise UsageError(
            f"'{text}' is one word: give the script, and its own arguments after --, as in {script} -- {arguments}"
        )
    if text not in _LAUNCHERS or Path(text).exists():
        return
    processes = "" if text.startswith("python") else "; --gpus 2 traces one of two processes"
    raise UsageError(
        f"leave out {text}: give the script itself, and its own arguments after --, as in tightfit estimate train.py -- --epochs 1{processes}"
    )


def module_file(name: str) -> str | None:
    """The file that `python -m NAME` runs in this folder, relative to it where it is in it; None if there is none.

    Only names with a dot are looked for, so that a model type (`gpt2`) is not taken for a folder of that name.
    """
    parts = name.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return None
    for folder in _folders(parts[0]):
        place = folder.joinpath(*parts[1:])
        for file in (place.with_name(f"{place.name}.py"), place / "__main__.py"):
            if file.is_file():
                return os.path.relpath(file) if file.is_relative_to(os.getcwd()) else str(file)
    return None


def _folders(package: str) -> Iterator[Path]:
    """The folders of a package: in this folder, and on the Python path, where it need not be imported to be found."""
    if (Path.cwd() / package).is_dir():
        yield Path.cwd() / package
    spec = importlib.util.find_spec(package)
    yield from map(Path, [] if spec is None else spec.submodule_search_locations or [])


def installed_command(text: str) -> str:
    """What to give instead of a command that a package has installed (`my-train`); empty if `text` is none."""
    name = Path(text).name
    found = next(iter(importlib.metadata.entry_points(group="console_scripts", name=name)), None)
    if found is None or (Path(text).exists() and Path(text).suffix):
        return ""
    script = f"a script with the line: from {found.module} import {found.attr.partition('.')[0]}; {found.attr}()"
    return f"a command that a package has installed: give the module that it runs (-m {found.module}), or {script}"


def check_syntax(path: str) -> None:
    """Compiles the script at `path`.

    Raises:
        ProgramError: it has a syntax error.
    """
    with warnings.catch_warnings():
        # Python shows them when the program runs.
        warnings.simplefilter("ignore")
        try:
            compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        except SyntaxError as error:
            found = ProgramError(one_line(path, error))
            found.trace = program_trace(error)
            raise found from error
        except ValueError:
            # Null bytes, or an unknown encoding: what Python says of them has the place.
            return


def refuse_no_name(text: str) -> None:
    """Refuses what can name no file: the text of an error that somebody has pasted, mostly.

    Raises:
        UsageError: the line says what it is, and what to give instead.
    """
    if "out of memory" in text and not Path(text[:_MOST_BYTES_OF_A_NAME]).exists():
        raise UsageError(f"this is {_TEXT_OF_AN_ERROR}")
    if any(len(os.fsencode(part)) > _MOST_BYTES_OF_A_NAME for part in Path(text).parts):
        raise UsageError(f"there is no file {text[:_MOST_CHARACTERS_SHOWN]}…: its name is too long for one")


def refuse_other_files(text: str) -> None:
    """Refuses what people give in place of a target: a checkpoint, a notebook, a recording, a config of their program, `python`.

    Raises:
        UsageError: the line says what it is, and what to give instead.
    """
    try:
        os.getcwd()
    except FileNotFoundError as error:
        # Programs and what they are closed in need one.
        raise UsageError("the current folder was removed: change to one that exists (cd)") from error
    refuse_no_name(text)
    path = Path(text)
    if not text.strip():
        raise UsageError("the name of the target is empty: give a script (FILE.py) or a model, such as gpt2")
    if text.endswith(("/", os.sep)) and path.is_file():
        raise UsageError(f"{text} ends like a folder, but {path} is a file: leave out the last character")
    refuse_launcher(text)
    if path.is_dir() and not (path / "config.json").is_file():
        name = ".".join(path.parts)
        # python runs `FOLDER/__main__.py`, and -m finds it from the folder where the command is given.
        is_program = (path / "__main__.py").is_file() and all(map(str.isidentifier, path.parts))
        script = f"its program is -m {name}" if is_program else "give a script (FILE.py)"
        raise UsageError(f"the folder {text} has no config.json, so it is no Hugging Face model; {script}")
    if path.is_file() and path.suffix not in (".py", ".json"):
        raise UsageError(f"{text} is {_kind(path)}")
    if path.is_file() and path.suffix == ".json":
        _refuse_plan(path)


def _refuse_plan(path: Path) -> None:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if isinstance(value, dict) and {"schema", "choices", "frontier"} <= set(value):
        raise UsageError(
            f"{path} is a plan: tightfit run --plan {path} SCRIPT applies it, tightfit report {path} shows it"
        )


def _kind(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(_NUM_BYTES_READ)
    script = path.with_suffix(".py").name
    command = installed_command(str(path))
    for is_it, kind in (
        (bool(command), command),
        (
            start.startswith(b"#!") and b"python" in start.partition(b"\n")[0],
            f"a Python script without the ending .py: copy it to {script}, and give that",
        ),
        (
            path.suffix == ".ipynb",
            f"a notebook: make a script of it (jupyter nbconvert --to script {path.name}), and give {script}",
        ),
        (
            path.suffix == ".npz",
            "a trace that --save-tape wrote, or a numpy archive: tightfit estimate, doctor, report and diff read traces; other commands take the script",
        ),
        (
            start.startswith(_ZIP) or path.suffix in _WEIGHTS,
            "a checkpoint or an archive, which contains no run: give the script that trains or runs the model",
        ),
        (start.startswith(_COMPRESSED), "compressed: unpack it first (gunzip, unxz, zstd -d or tar)"),
        (
            start.startswith(_PICKLE),
            "a pickle: recordings are read by tightfit doctor, report, replay and diff; other commands take a script",
        ),
        (
            path.suffix in _SETTINGS,
            "a settings file: give the script that reads it, with its own arguments after --",
        ),
        (
            path.suffix == ".sh",
            "a shell script: give the Python script that it starts, with its own arguments after --",
        ),
        (
            b"out of memory" in start,
            _TEXT_OF_AN_ERROR,
        ),
    ):
        if is_it:
            return kind
    return "neither a Python script (FILE.py) nor a Hugging Face config (config.json)"
