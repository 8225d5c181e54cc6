"""Files and folders of other users that a program may write to, below overlays of a user who is not the superuser.

The kernel copies nothing up that belongs to somebody else (EOVERFLOW), and a folder that lies deep in others' has no overlay (EROFS): what Python writes
there goes to copies, as where the kernel keeps no overlays at all.
"""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from tightfit.capture.processes.containment import linux
from tightfit.capture.processes.containment.file_copies import FileCopies
from tightfit.capture.processes.containment.policy import COPIED, UPPER, Containment
from tightfit.capture.processes.containment.redirection import replace_functions
from tightfit.capture.processes.containment.written import remember

_NOT_COPIED = ("/dev", "/proc", "/sys")


class OthersFiles(FileCopies):
    """The copies of them, below `root`. `covered` are the folders with an overlay, `real` those whose files are written for real."""

    def __init__(self, root: Path, real: tuple[str, ...], covered: Sequence[str]) -> None:
        super().__init__(root, real)
        self._covered = frozenset(covered)

    def place(self, path: object, *, is_followed: bool = False) -> str | None:
        """None, too, for what an overlay takes."""
        found = super().place(path, is_followed=is_followed)
        return None if found is None or self._is_taken(found) else found

    def written(self, place: str, *, with_content: bool = True) -> str:
        """Refuses what the user may not write.

        Raises:
            OSError: it is so.
        """
        source = self.seen(place)
        asked = source if os.path.lexists(source) else self.seen(os.path.dirname(place))
        if os.path.lexists(asked) and not linux.may_write(asked):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), place)
        return super().written(place, with_content=with_content)

    def _is_taken(self, place: str) -> bool:
        for folder in (place, *map(str, Path(place).parents)):
            # The root of an overlay is the user's own, whoever has the folder below.
            if folder in self._covered:
                return True
            if os.path.lexists(folder) and os.lstat(folder).st_uid != os.geteuid():
                return False
        return False


def begin(containment: Containment, covered: Sequence[str]) -> None:
    """From now on, for the rest of the process; it is within its namespaces."""
    place = Path(containment.shared) / COPIED
    (place / UPPER).mkdir(parents=True)
    remember(place, "/")
    real = (os.path.realpath(containment.shared), containment.shared, *_NOT_COPIED)
    replace_functions(OthersFiles(place / UPPER, real, covered))
