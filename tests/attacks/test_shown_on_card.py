"""What is streamed and at the host is shown as a tensor of the card: the twins that are updated at the host, tried where the card is the host itself."""

import numpy as np
import pytest
import torch
from tests.attacks.harness import Outcome, run
from tests.attacks.registry import attacks

from tightfit.capture.processes.process_role import is_simulated
from tightfit.engine import zero_copy
from tightfit.engine.weights import streamed_gradient, streamed_weight
from tightfit.techniques.offload import shown_states

# What went wrong on a card while its streamed weights were tensors of the host there.
PROGRAMS = (
    *("adamw_with_scheduler", "adversarial_weights", "autocast_around", "backward_to_head_first", "best_state_kept_by_reference"),
    *("cast_and_back", "clipped_by_last_norm", "copied_and_trained", "elastic_weights", "five_optimizers", "grad_scaler"),
    *("gradient_penalty", "hill_climbing", "hooks_on_held_accumulators", "lookahead", "low_rank_restarted", "maml"),
    *("moments_by_reference", "moments_given_other_data", "moments_logged", "moments_reset_between", "optimizer_flags", "own_accumulators", "population"),
    *("saved_whole_and_trained", "scaler_skips", "schedule_free", "sharpness_aware", "tasks_projected"),
    *("two_optimizers_one_after_the_other", "undone_in_the_middle", "vectors_of_parameters", "weight_average"),
    *("weight_used_by_loop", "weights_noised_for_forward"),
)  # fmt: skip


def shown(_: torch.device, at_host: torch.Tensor) -> torch.Tensor:
    """The same bytes in a storage of their own, as a card would show them."""
    if is_simulated() or not at_host.numel():
        return at_host
    return torch.from_numpy(np.asarray(zero_copy.OfHost(at_host)))


@pytest.fixture(autouse=True)
def _as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (streamed_gradient, streamed_weight, shown_states):
        monkeypatch.setattr(module, "seen_from", shown)


@pytest.mark.parametrize("variant", ["weight streaming", "trained weight streaming"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_trained_as_without_a_plan(name: str, variant: str) -> None:
    verdict = run(attacks()[name], variant)
    assert verdict.outcome in (Outcome.RIGHT, Outcome.NO_PLACE), verdict.reason
