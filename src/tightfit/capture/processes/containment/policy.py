"""What a traced program may do to the machine, and by which mechanism it is kept from the rest."""

import dataclasses
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_ENVIRONMENT = {
    # Libraries that look something up on the network first would wait for it, or end the program.
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "offline",
}
_OF_THE_SYSTEM = ("/usr", "/bin", "/lib", "/etc", "/proc", "/sys", "/dev")
_FORCED = "TIGHTFIT_CONTAINMENT"
NAMESPACES, LANDLOCK, PYTHON = "namespaces", "landlock", "python"
DROPPED, UPPER = "dropped", "written"
"""The folder, in the one that is shared with the child, of what the program wrote; in it, a folder with a folder UPPER for each that was covered."""
COPIED = "copied"
"""The folder, beside it, of the copies of other users' files."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """`allow_writes`: the program's files are real; `allow_network`: it may connect to other machines."""

    allow_writes: bool = False
    allow_network: bool = False

    @property
    def allows_all(self) -> bool:
        """Whether the program runs as it would without a trace."""
        return self.allow_writes and self.allow_network

    def environment(self) -> dict[str, str]:
        """Variables of libraries that would use the network."""
        return {} if self.allow_network else dict(_ENVIRONMENT)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Containment:
    """How a child is closed in. `shared` is the folder that it shares with its parent, `paths` is where the program may well write."""

    policy: Policy
    shared: str
    paths: tuple[str, ...] = ()


def containment_of(fields: dict[str, Any]) -> Containment:
    """The containment in a request to a child."""
    return Containment(policy=Policy(**fields["policy"]), shared=fields["shared"], paths=tuple(fields["paths"]))


_drops: list[bool] = []


def note_drops() -> None:
    """What this process writes from now on is dropped."""
    _drops.append(True)


def drops_writes() -> bool:
    """Whether what this process writes is dropped."""
    return bool(_drops)


CLOSED = Policy()
"""Nothing is allowed."""


def contained(policy: Policy, shared: Path, words: Iterable[str]) -> Containment | None:
    """The containment of a program that `words` (its path, its arguments) are for, None where all is allowed; makes the folder for what it writes."""
    if policy.allows_all:
        return None
    (shared / DROPPED).mkdir()
    return Containment(policy=policy, shared=str(shared), paths=likely_paths(words))


def likely_paths(words: Iterable[str]) -> tuple[str, ...]:
    """The folders that a program may well write to: its working folder, the user's, those for temporary files, and what `words` and the environment
    name.
    """
    found = [os.getcwd(), os.path.expanduser("~"), tempfile.gettempdir(), "/tmp", "/var/tmp"]
    found += [value for value in os.environ.values() if value.startswith("/") and _is_folder(value)]
    for word in words:
        path = Path(word.rpartition("=")[2]).absolute()
        # It may be made yet.
        found += [str(place) for place in (path, *path.parents) if "/" in word and _is_folder(place)][:1]
    own = [os.path.realpath(path) for path in found]
    return tuple(dict.fromkeys(path for path in own if path != "/" and not path.startswith(_OF_THE_SYSTEM)))


def _is_folder(path: str | Path) -> bool:
    try:
        return os.path.isdir(path)
    except ValueError:
        # It has a null character.
        return False


def forced_mechanism() -> str | None:
    """The mechanism that TIGHTFIT_CONTAINMENT names, for tests and for kernels that misbehave: namespaces, landlock or python."""
    return os.environ.get(_FORCED) or None
