"""How what goes to disk is cut up: a file of whole pages, moved in pieces through a few buffers of host memory. No torch."""

PAGE_BYTES = 4096
"""Past the page cache, places in the file and addresses of buffers are multiples of this (open(2), NOTES: the logical block size, 4096 at most)."""

PIECE_BYTES = 8 << 20
"""What one call of the system moves at most."""

NUM_BUFFERS = 4
"""How many pieces are under way at a time: one thread does not saturate a fast disk (`tightfit.calibration.disk`)."""


def in_pages(num_bytes: int) -> int:
    """`num_bytes` rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def buffer_bytes_for(disk_bytes: int) -> int:
    """Host memory through which `disk_bytes` are moved: buffers of a piece each, and what it takes to begin them at a page."""
    return NUM_BUFFERS * min(PIECE_BYTES, in_pages(-(-disk_bytes // NUM_BUFFERS))) + PAGE_BYTES


def piece_bytes_of(buffer_bytes: int) -> int:
    """The pieces in which buffers of `buffer_bytes` together are used; no piece is smaller than a page."""
    return max(PAGE_BYTES, min(PIECE_BYTES, (buffer_bytes - PAGE_BYTES) // NUM_BUFFERS // PAGE_BYTES * PAGE_BYTES))


def num_buffers_of(buffer_bytes: int) -> int:
    """How many pieces fit into buffers of `buffer_bytes` together."""
    return max(1, (buffer_bytes - PAGE_BYTES) // piece_bytes_of(buffer_bytes))
