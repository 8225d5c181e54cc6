"""Where packages are installed: in the environment that runs, in the Python below it, in the user's own folder, in what PYTHONPATH or a `.pth` file names."""

import functools
import os
import site
import sys
import sysconfig


@functools.cache
def package_folders() -> tuple[str, ...]:
    """The folders with packages in them, each with a separator at its end; as they are on the path, and without links.

    That of the running environment alone is not enough: a virtual environment that sees the packages of the Python below it
    (`--system-site-packages`) has its torch there, inside of the standard library's folder.
    """
    named = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    found = {*named, *site.getsitepackages(), site.getusersitepackages(), *filter(holds_packages, sys.path)}
    return tuple({each.rstrip(os.sep) + os.sep for folder in found for each in (folder, os.path.realpath(folder))})


def holds_packages(folder: str) -> bool:
    """Whether pip has installed into the folder (`--target`, which is then on PYTHONPATH)."""
    try:
        return bool(folder) and any(name.endswith(".dist-info") for name in os.listdir(folder))
    except OSError:  # a zip file, or nothing
        return False
