"""`--used`: what other processes hold on the card, with the machine's own card asked where nothing is given."""

import sys

from tightfit.cli.arguments.sizes import with_unit
from tightfit.devices.catalogue import find


def used_now(used: str | None, device: str, *, is_own: bool) -> str | int | None:
    """The value of `--used`, or else what the driver says of the machine's own card (`is_own`), which is told on stderr."""
    if used is not None:
        return with_unit("--used", used)
    if not is_own:
        return None
    from tightfit.calibration.nvml_ctypes import Nvml
    from tightfit.fit.available import in_use, used_on_own_card

    card = find(device)
    used_bytes = used_on_own_card(card, Nvml.open())
    if used_bytes:
        sys.stderr.write(f"tightfit: {card.name}: {in_use(card, used_bytes)} (--used 0 counts on all of it)\n")
    return used_bytes
