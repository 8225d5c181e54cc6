"""What several files of attacks need around their tests."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def in_double_precision() -> Iterator[None]:
    """So that what is missing is told from rounding."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
