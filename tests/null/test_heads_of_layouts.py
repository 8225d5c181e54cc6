"""Heads of attention from the sizes of products, and the degrees of tensor parallelism that they leave."""

from collections.abc import Sequence

import numpy as np
import pytest

from tightfit.layouts.model.heads_of_tape import Heads, heads_of, heads_words
from tightfit.layouts.model.product_sizes import ProductSizes
from tightfit.tape import Geometry

TOKENS, LENGTH, WIDTH = 64, 16, 8
ROWS = 1


def heads(products: Sequence[tuple[int, int, int, int]], *, fused: int | None) -> Heads:
    """Of products by batch, rows, columns and depth, of which the one at `fused` is a kernel of attention."""
    table = Geometry.from_rows([(at, *sizes, 0, 1, 0, False, 0) for at, sizes in enumerate(products)])
    number = len(products)
    of_tokens = np.where([batch > 1 for batch, *_ in products], 0, ROWS)
    is_attention = np.arange(number) == (-1 if fused is None else fused)
    return heads_of(ProductSizes(table=table, of_tokens=of_tokens, of_weights=of_tokens), is_attention)


def block(number: int, key_value: int, *, is_fused: bool) -> list[tuple[int, int, int, int]]:
    """A block whose queries, keys and values are one product."""
    sequences = TOKENS // LENGTH
    scores = (number * sequences, LENGTH, LENGTH, WIDTH)
    return [
        (1, TOKENS, (number + 2 * key_value) * WIDTH, 96),
        scores,
        *([] if is_fused else [(number * sequences, LENGTH, WIDTH, LENGTH)]),
        (1, TOKENS, 96, number * WIDTH),
        (1, TOKENS, 384, 96),
    ]


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize(("number", "key_value"), [(12, 12), (12, 4), (12, 1), (7, 7)])
def test_heads_are_told_from_products(number: int, key_value: int, is_fused: bool) -> None:
    found = heads(block(number, key_value, is_fused=is_fused), fused=1 if is_fused else None)
    assert found == Heads(number=number, key_value=key_value)
    allowed = [n for n in (1, 2, 4, 8) if found.are_divided_by(n)]
    assert allowed == [n for n in (1, 2, 4, 8) if number % n == key_value % n == 0]


def test_what_cannot_be_told_is_said() -> None:
    assert heads([(1, TOKENS, 96, 96)], fused=None) == Heads()
    # Low-rank projections are no widths of heads.
    low = [(1, TOKENS, 20, 96), *block(12, 12, is_fused=True)]
    unknown = heads(low, fused=2)
    assert unknown == Heads(number=12)
    assert not unknown.are_divided_by(8)
    assert Heads().are_divided_by(8)
    assert "the 12 heads, and has to divide the key-value heads, which the trace does not show" in heads_words(
        [unknown]
    )
    assert "the heads and the key-value heads, which the trace does not show" in heads_words([unknown, Heads()])
    assert "its 12 heads and the 4 key-value heads are" in heads_words([Heads(number=12, key_value=4)])
