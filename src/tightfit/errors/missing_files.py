"""What is said of a file that somebody named and that is not there."""

import difflib
import os
from pathlib import Path

_ALIKE = 0.8  # of two names, as difflib counts


def no_file(path: str) -> str:
    """A message that there is no file at `path`, with the names in its folder that are spelled most alike."""
    if Path(path).is_symlink():
        return f"there is no file {path}: it is a link to {os.readlink(path)}, which is not there"
    folder, name = Path(path).parent, Path(path).name
    names = [each.name for each in folder.glob(f"*{Path(path).suffix}")] if folder.is_dir() else []
    nearest = [str(folder / each) for each in difflib.get_close_matches(name, names, cutoff=_ALIKE)]
    return f"there is no file {path}" + (f"; nearest: {', '.join(nearest)}" if nearest else "")
