"""Where choices of the offloading techniques keep what they move: settings with `tier: disk` in a file, all others in host memory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tightfit.engine.disk.disk_copies import DiskSpace
from tightfit.errors import ApplyError

if TYPE_CHECKING:
    from tightfit.techniques.session import Session
    from tightfit.techniques.technique import ChosenOption

_TIERS = ("host", "disk")


def by_tier(chosen: Sequence["ChosenOption"]) -> tuple[list["ChosenOption"], list["ChosenOption"]]:
    """The choices that move to the host, and those that move to disk.

    Raises:
        ApplyError: a plan names another tier.
    """
    found: dict[str, list[ChosenOption]] = {tier: [] for tier in _TIERS}
    for choice in chosen:
        tier = str(choice.settings.get("tier", "host"))
        if tier not in found:
            raise ApplyError(f"tier={tier!r} is neither host nor disk", places=[choice.where])
        found[tier].append(choice)
    return found["host"], found["disk"]


def disk_space_for(
    session: "Session", on_disk: Sequence["ChosenOption"], technique: str, what: str, lost: str
) -> DiskSpace | None:
    """The space on disk for these choices, None for none; `what` is kept there, as users call it, and `lost` says what is lost if it cannot be read.

    From a failure of the disk on, the model and its optimizers refuse to train.
    """
    if not on_disk:
        return None
    verdict = session.verdict

    def failed(how: str) -> ApplyError:
        return verdict.refuse(f"{what} {how}", technique=technique)

    return DiskSpace(
        num_bytes=sum(int(choice.settings["disk_bytes"]) for choice in on_disk),
        buffer_bytes=sum(int(choice.settings["host_bytes"]) for choice in on_disk),
        folder=session.disk_folder,
        on_failure=failed,
        lost=lost,
    )
