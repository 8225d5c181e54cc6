"""Which operators draw random numbers is told by torch's own tag."""

import pytest
import torch

from tightfit.techniques.random_operators import draws


@pytest.mark.parametrize(
    "name",
    [
        *(
            "aten.native_dropout",
            "aten.bernoulli_.float",
            "aten.bernoulli",
            "aten.rand",
            "aten.randint.low",
            "aten.normal_",
        ),
        *(
            "aten.uniform_",
            "aten.multinomial",
            "aten.exponential_",
            "aten.rrelu_with_noise",
            "aten.poisson",
            "randperm",
        ),
    ],
)
def test_what_always_draws_is_known(name: str) -> None:
    assert draws(name)


@pytest.mark.parametrize(
    "name",
    [
        *(
            "aten.mm",
            "aten.add.Tensor",
            "aten.native_dropout_backward",
            "aten.empty.memory_format",
            "custom::op",
            "gelu",
        ),
        # These draw at a rate, which only who runs them knows.
        *("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_efficient_attention", "lstm"),
    ],
)
def test_what_draws_not_or_only_at_a_rate_is_not(name: str) -> None:
    assert not draws(name)


def test_an_operator_of_the_programs_own_is_told_by_its_tag_too() -> None:
    with torch.library._scoped_library("tightfit_test", "DEF") as library:
        library.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
        library.define("plain(Tensor x) -> Tensor")
        assert draws("tightfit_test.noise") and draws("tightfit_test.noise.default")
        assert not draws("tightfit_test.plain")
        draws.cache_clear()
