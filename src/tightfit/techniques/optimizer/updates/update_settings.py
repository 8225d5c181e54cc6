"""Typed settings of updates in the backward pass: a plan that was loaded or typed has strings in places."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from tightfit.errors import ApplyError
from tightfit.techniques.technique import parse_bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """`kernel` is the implementation of the optimizer; `in_backward` whether updates run in the backward pass, `clips` whether the script clips
    gradients by their norm. Older plans also have `one_pass`, which is ignored.
    """

    kernel: Literal["same", "fused"] = "same"
    in_backward: bool = False
    clips: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any], **defaults: Any) -> "UpdateSettings":
        """The settings of a choice, with `defaults` for those that it does not name.

        Raises:
            ApplyError: one has a value that it cannot have.
        """
        kernel = settings.get("kernel", "same")
        if kernel not in ("same", "fused"):
            raise ApplyError(f"kernel={kernel!r} is neither 'same' nor 'fused'")
        given = {name: parse_bool(name, settings[name]) for name in ("in_backward", "clips") if name in settings}
        return cls(kernel=kernel, **{**defaults, **given})
