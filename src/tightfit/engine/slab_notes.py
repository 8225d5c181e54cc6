"""What a user should know of the host memory and of the folder that offloading techniques found."""

from collections.abc import Iterator, Sequence

import torch

from tightfit.engine.disk.disk_slab import DiskSlab
from tightfit.engine.host_slab import HostSlab


def notes_on(near: torch.device, slabs: Sequence[HostSlab | DiskSlab], what: str) -> Iterator[str]:
    """A sentence for each thing that is slower than it could be; `what` is kept there, for tensors on `near`."""
    if near.type == "cuda" and any(slab.num_bytes and not slab.is_registered for slab in slabs):
        yield f"the host memory for {what} could not be page-locked (a limit on locked memory?): copies will be slow"
    if any(isinstance(slab, DiskSlab) and slab.goes_through_the_cache for slab in slabs):
        yield f"the file system of the folder for {what} takes no direct access (O_DIRECT): what is moved there fills the page cache too"
