"""The names of channels between ranks. No torch."""

from collections.abc import Sequence


def channel_name(sender: int, receivers: Sequence[int]) -> str:
    """The channel on which `sender` sends objects to `receivers`, numbers of ranks in the world."""
    return f"{sender}>{','.join(map(str, receivers))}"


def sender_of(channel: str) -> int:
    """The rank that sends on a channel."""
    return int(channel.partition(">")[0])
