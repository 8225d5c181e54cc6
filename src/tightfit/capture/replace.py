"""Replaces attributes of torch's modules and classes, for the rest of the process.

Every replacement goes through here, so that a name that a new release of torch lacks is an error that says so, and not a patch that is
never called.
"""

from typing import Any

from tightfit.errors import CaptureError


def replace(owner: Any, **values: Any) -> None:
    """Sets attributes that `owner`, a module or a class, has already.

    Raises:
        CaptureError: it does not have one of them.
    """
    for name, value in values.items():
        if not hasattr(owner, name):
            raise CaptureError(
                f"this release of torch has no {getattr(owner, '__name__', owner)}.{name}, which the virtual GPU answers; it is not supported yet"
            )
        setattr(owner, name, value)
