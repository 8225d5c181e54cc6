"""Names of a library that it does not promise to keep: what each is, and the one line of error for a release that lacks one.

The tables are `tightfit.torch_hooks.manifest` (a user's process) and `tightfit.capture.patches.manifest` (the child that traces). Nothing here
imports torch before it is asked, and then only by the names in the tables, so that a check may come before all imports that would fail.
"""

import dataclasses
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import Any

from tightfit.errors import ApplyError, UnsupportedTorch

# docs/versions.md says what was run on which.
FIRST_TORCH, LAST_TORCH = "2.8", "2.15"
_FUNCTIONS: dict[str, Callable[..., Any]] = {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Name:
    """One name: where it is, what it is needed for, and the first and last version of its library in which it was seen to be what is expected.

    `path` is "module:name" or "module:class.name". `used_by` are the rooms of tightfit that use it. With `is_checked`, `require` looks for it;
    all others are looked up when they are needed, or left alone by a release without them. `is_in_cpu_builds`: builds without CUDA have it too.
    `before` says what is done with releases older than `first`, which need not have it; where it says nothing, they are refused.
    """

    path: str
    purpose: str
    used_by: tuple[str, ...]
    first: str = FIRST_TORCH
    last: str = LAST_TORCH
    is_checked: bool = True
    is_in_cpu_builds: bool = True
    before: str = ""

    def __str__(self) -> str:
        return self.path.replace(":", ".")

    @property
    def module(self) -> str:
        """The module that is imported for it."""
        return self.path.partition(":")[0]

    @property
    def name(self) -> str:
        """Its last part."""
        return self.path.rpartition(":")[2].rpartition(".")[2]

    @property
    def library(self) -> str:
        """The package that has it."""
        return self.module.partition(".")[0]

    @property
    def versions(self) -> str:
        """The first and last version that it is known in."""
        return self.first if self.first == self.last else f"{self.first} to {self.last}"

    def holder(self) -> Any:
        """The module, class or object that has the name, if need be from its base.

        Raises:
            ApplyError: there is no such name in the installed library.
        """
        holder = self._find()
        if holder is None:
            raise self.missing()
        return holder

    def value(self) -> Any:
        """What the name stands for now, as its holder has it and not as an instance would see it.

        Raises:
            ApplyError: there is no such name in the installed library.
        """
        return inspect.getattr_static(self.holder(), self.name)

    def call(self, *arguments: Any) -> Any:
        """Calls what the name stands for, which is looked up once: for functions of C, which nobody replaces, in every step.

        Raises:
            ApplyError: there is no such name in the installed library.
        """
        function = _FUNCTIONS.get(self.path)
        if function is None:
            function = _FUNCTIONS[self.path] = self.value()
        return function(*arguments)

    def is_there(self) -> bool:
        """Whether the installed library has it."""
        return self._find() is not None

    def is_expected(self) -> bool:
        """Whether the installed library is new enough to have it. By the number of its version: a release that has lost a name is no older one."""
        return not self.before or version_of(self.library) >= number(self.first)

    def missing(self) -> ApplyError:
        """The error for a library that does not have the name."""
        return ApplyError(
            f"{self.library} {_version(self.library)} has no {self}, which is needed {self.purpose}; install a version that has it ({self.versions})"
        )

    def _find(self) -> Any:
        """What has the name; None if nothing does. Instances have what their class only annotates (`Module._buffers`)."""
        try:
            holder: Any = importlib.import_module(self.module)
        except ImportError:
            return None
        *outer, name = self.path.partition(":")[2].split(".")
        for part in outer:
            holder = getattr(holder, part, None)
        kinds = holder.__mro__ if isinstance(holder, type) else ()
        is_there = hasattr(holder, name) or any(name in inspect.get_annotations(kind) for kind in kinds)
        return holder if is_there or _is_module(holder, name) else None


def _is_module(package: Any, name: str) -> bool:
    """Whether a package has a module of this name, which may not be imported yet."""
    try:
        return hasattr(package, "__path__") and importlib.util.find_spec(f"{package.__name__}.{name}") is not None
    except ImportError:
        return False


def known(
    path: str,
    purpose: str,
    used_by: str,
    *,
    first: str = FIRST_TORCH,
    last: str = LAST_TORCH,
    is_checked: bool = True,
    is_in_cpu_builds: bool = True,
    before: str = "",
) -> Name:
    """A row of a manifest; `used_by` are rooms, with spaces between them."""
    return Name(
        path=path,
        purpose=purpose,
        used_by=tuple(used_by.split()),
        first=first,
        last=last,
        is_checked=is_checked,
        is_in_cpu_builds=is_in_cpu_builds,
        before=before,
    )


def operators(used_by: str, names: str, *, first: str = FIRST_TORCH, before: str = "") -> tuple[Name, ...]:
    """The rows of torch's own operators of these names, with spaces between them."""
    purpose = "to follow what it does with memory"
    return tuple(
        known(f"torch:ops.aten.{name}", purpose, used_by, first=first, before=before) for name in names.split()
    )


def require(names: Iterable[Name]) -> None:
    """Looks for the names that are checked at once, before anything that needs them is imported or replaced.

    Raises:
        UnsupportedTorch: the installed torch lacks some (the message has the first), or is older than all that were tried.
        ModuleNotFoundError: torch is not installed.
    """
    importlib.import_module("torch")
    if version_of("torch") < number(FIRST_TORCH):
        # They have all names that are needed, but what they do with them was not tried to the end.
        raise _unsupported("is too old")
    missing = [name for name in names if name.is_checked and name.is_expected() and not name.is_there()]
    if not missing:
        return
    first, *others = missing
    more = f" (and lacks {len(others)} more)" if others else ""
    raise _unsupported(f"has no {first}, which tightfit needs {first.purpose}{more}")


def _unsupported(what: str) -> UnsupportedTorch:
    major, minor = LAST_TORCH.split(".")
    return UnsupportedTorch(
        f"torch {_version('torch')} {what}; torch {FIRST_TORCH} to {LAST_TORCH} are known to work: "
        f"pip install 'torch>={FIRST_TORCH},<{major}.{int(minor) + 1}', or look for a newer tightfit"
    )


def version_of(library: str) -> tuple[int, ...]:
    """Major and minor number of a library that has been imported."""
    return number(_version(library))


def installed_torch() -> tuple[int, ...]:
    """Major and minor number of the torch that is installed, which is not imported for that; a large one where there is none."""
    try:
        return number(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return (sys.maxsize,)


def _version(library: str) -> str:
    return getattr(sys.modules.get(library), "__version__", "that is installed")


def number(version: str) -> tuple[int, ...]:
    """Major and minor number; a build from source may have no more than a word."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else (sys.maxsize,)
