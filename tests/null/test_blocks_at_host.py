"""What of streamed blocks is away from a card."""

from tightfit.layouts.model.blocks_at_host import BlocksAtHost


def blocks(*, weight: int, trained: int) -> BlocksAtHost:
    return BlocksAtHost(
        where="Net", settings={}, weight_bytes=weight, block_bytes=1000, trained_bytes=trained, largest_bytes=100
    )


def test_two_blocks_are_there() -> None:
    whole = blocks(weight=1000, trained=1000)
    assert (whole.gone_bytes, whole.share, whole.trained_share) == (800, 1, 1)
    assert blocks(weight=900, trained=1000).gone_bytes == 720


def test_frozen_weights_have_neither_gradients_nor_states() -> None:
    # Adapters may be too small to be streamed: what is not known to be away is there.
    assert blocks(weight=980, trained=20).trained_share == 0
    assert blocks(weight=1000, trained=500).trained_share == 0.5
