"""Programs that torch's fused and foreach kernels do other things on than its loop over parameters, each of which the variants of other techniques leave as it is."""

import pytest
from tests.attacks.harness import Outcome, tried
from tests.attacks.places import Variant, _of_optimizer
from tests.attacks.registry import attacks

KERNELS = {
    "fused": ("optimizer_kernel", {"kernel": "fused"}),
    "foreach": ("optimizer_kernel", {"kernel": "foreach"}),
    "fused in backward": ("update_in_backward", {"kernel": "fused", "clips": False}),
}
PROGRAMS = (
    "weights_in_other_orders",
    "gradients_in_other_orders",
    "gradients_of_another_type",
    "channels_last_later",
    "cast_to_float",
    "unusual_adams",
    "population",
)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_kernel_of_a_plan_updates_as_the_programs_own(name: str, kernel: str) -> None:
    technique, settings = KERNELS[kernel]
    variant = Variant(
        name=kernel,
        technique=technique,
        find=_of_optimizer(technique, **settings),
        is_bitwise=False,
        is_lossy=False,
    )
    verdict = tried(attacks()[name], variant)
    assert verdict.outcome is Outcome.RIGHT, verdict.reason
