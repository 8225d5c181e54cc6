"""The folder that a traced program began in, to which its files are relative: programs change their working folder (one for each run, as hydra does)."""

import os


class _Begin:
    folder: str | None = None


def begin_in_this_folder() -> None:
    """From now on names are relative to the working folder of now."""
    _Begin.folder = os.getcwd()


def relative_to_begin(filename: str) -> str:
    """A file's name relative to that folder, or to the working folder where no program was traced."""
    # One that is relative was so when the program began.
    return os.path.relpath(os.path.join(_Begin.folder or os.getcwd(), filename), _Begin.folder)
