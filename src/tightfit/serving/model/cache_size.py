"""How many tokens a cache of a size holds: pages of the layers that grow, windows, and states that do not grow.

The layers of a model are grouped by how their cache grows. Layers with the same growth share pages; a request holds pages for its tokens, at most for
the window of a group with one, and one state of each layer that keeps no tokens.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

from tightfit.serving.model.model_facts import CacheTensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """The cache of one rank. `token_bytes` of all layers that grow without end; `window_bytes` of those with a window, for each token in it."""

    tensors: tuple[CacheTensor, ...]
    element_bytes: float
    degree: int
    block_tokens: int

    @property
    def token_bytes(self) -> int:
        """Bytes of one token more in a long request, on one rank."""
        return sum(self._scaled(t, t.token_bytes) for t in self.tensors if t.max_tokens is None)

    @property
    def window_token_bytes(self) -> int:
        """Bytes of one token more in a request that is shorter than every window."""
        return sum(self._scaled(t, t.token_bytes) for t in self.tensors)

    def bytes_of_token(self, window: int | None) -> int:
        """Bytes of one token more in the layers with that window (None: in those without), on one rank."""
        return sum(self._scaled(t, t.token_bytes) for t in self.tensors if t.max_tokens == window)

    @property
    def state_bytes(self) -> int:
        """Bytes of a request that do not grow."""
        return sum(self._scaled(t, t.fixed_bytes) for t in self.tensors)

    def request_bytes(self, num_tokens: int, num_encoder_tokens: int = 0) -> int:
        """Bytes of a request of `num_tokens` on one rank, in whole pages."""
        paged = math.ceil(num_tokens / self.block_tokens) * self.block_tokens
        total = 0
        for tensor in self.tensors:
            kept = paged
            if tensor.max_tokens is not None:
                kept = min(paged, self.pages_of_window(tensor.max_tokens) * self.block_tokens)
            plain = tensor.fixed_bytes + tensor.token_bytes * kept + tensor.encoder_token_bytes * num_encoder_tokens
            total += self._scaled(tensor, plain)
        return total

    def pages_of_window(self, max_tokens: int) -> int:
        """Pages that a layer with a window of `max_tokens` holds at most: it can begin within a page, so that one more is held."""
        return math.ceil(max_tokens / self.block_tokens) + 1

    def _scaled(self, tensor: CacheTensor, num_bytes: int) -> int:
        """On one rank, in the type of the cache: heads are shared out, and kept whole where there are fewer of them than ranks."""
        if tensor.token_bytes and self.element_bytes:
            num_bytes = int(num_bytes * self.element_bytes / tensor.item_bytes)
        heads = max(1, tensor.heads)
        # A latent has one head, which each rank keeps.
        return num_bytes * math.ceil(heads / self.degree) // heads


def num_tokens(size: CacheSize, kv_bytes: int) -> int:
    """Tokens of pages that `kv_bytes` hold, for requests that are long beside their windows; whole pages.

    A model whose layers all have a window is counted by those.
    """
    each = size.token_bytes or size.window_token_bytes
    if each == 0:
        return 0
    return max(0, kv_bytes) // (each * size.block_tokens) * size.block_tokens


def mean_request_bytes(size: CacheSize, lengths: Sequence[tuple[int, int]]) -> float:
    """The mean of the bytes of requests that hold so many tokens, and so many of the encoder."""
    counts = Counter(lengths)
    return sum(size.request_bytes(*pair) * number for pair, number in counts.items()) / len(lengths)
