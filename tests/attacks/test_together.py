"""Techniques together on one program: each pair that a plan may have is trained right or refused, and clean programs are trained right."""

from collections.abc import Sequence

import pytest
import torch
from tests.attacks.check import one_in_three
from tests.attacks.harness import Outcome, tried
from tests.attacks.models import WIDTH, Block, Net, train
from tests.attacks.places import VARIANTS, Variant, choice
from tests.attacks.registry import Attack, attacks
from tests.attacks.trial import Trial
from torch import nn

from tightfit.planner.plan import Choice

UPDATES = "update in backward"
TOGETHER = {
    "micro-batches and updates": ("micro-batches", UPDATES),
    "selective checkpointing and updates": ("selective checkpointing", UPDATES),
    "chunked loss and updates": ("chunked loss, gradients in forward", UPDATES),
    "checkpointing and updates": ("checkpointing", UPDATES),
    "activation offload and updates": ("activation offload", UPDATES),
    "activation offload, optimizer offload and micro-batches": (
        "activation offload",
        "optimizer offload",
        "micro-batches",
    ),
    "checkpointing and streamed weights": ("checkpointing", "weight streaming"),
    "activation offload and streamed weights": ("activation offload", "weight streaming"),
    "nested checkpointing, micro-batches and streamed weights": (
        "nested checkpointing",
        "micro-batches",
        "weight streaming",
    ),
    "checkpointing, chunked loss and clipped updates": (
        "checkpointing",
        "chunked loss, gradients in backward",
        "update in backward, clips",
    ),
}
CLEAN = ("plain_loop", "adamw_with_scheduler", "attention_by_hand", "frozen_stem")
# A recomputation that differs in the middle of the second backward pass, accumulation over parts of batches, and what changes between.
OTHERS = (
    "seldom_on_class",
    "seldom_on_named_class",
    "seldom_on_enum",
    "seldom_in_module",
    "swallowed_accumulation",
    "no_sync_like",
    "moments_reset_between",
    "frozen_between",
    "data_of_head_later",
    "data_of_head_and_warm_up",
    "parameters_share_storage",
    "mocked_run",
    "graph_for_a_log",
    "switched_off_by_forward",
    "reservoir_of_logits",
)
torch.set_num_threads(1)


def together(*parts: str) -> Variant:
    """Several techniques at once."""

    def find(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[Choice]:
        return [each for part in parts for each in VARIANTS[part].find(model, optimizers)]

    return Variant(
        name=" and ".join(parts),
        technique="",
        find=find,
        is_bitwise=False,
        is_lossy=any(VARIANTS[part].is_lossy for part in parts),
        freezes=any(VARIANTS[part].freezes for part in parts),
    )


@pytest.mark.parametrize(("program", "name"), one_in_three(CLEAN, TOGETHER))
def test_a_clean_program_is_trained_right(program: str, name: str) -> None:
    verdict = tried(attacks()[program], together(*TOGETHER[name]))
    assert (verdict.outcome, verdict.reason) == (Outcome.RIGHT, "")


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(("program", "name"), one_in_three(OTHERS, TOGETHER))
def test_an_attack_is_trained_right_or_refused(program: str, name: str) -> None:
    verdict = tried(attacks()[program], together(*TOGETHER[name]))
    assert verdict.outcome in (Outcome.RIGHT, Outcome.REFUSED, Outcome.NO_PLACE), verdict.reason


@pytest.mark.parametrize("program", ["plain_loop", "frozen_stem", "adamw_with_scheduler"])
@pytest.mark.parametrize("streaming", ["weight streaming", "trained weight streaming"])
def test_tiles_of_a_block_whose_weights_come_and_go(program: str, streaming: str) -> None:
    verdict = tried(attacks()[program], together("tiled tokens", streaming))
    assert (verdict.outcome, verdict.reason) == (Outcome.RIGHT, "")


@pytest.mark.parametrize("program", ["adamw_with_scheduler", "image_chain"])
def test_parts_of_a_batch_in_bfloat16(program: str) -> None:
    # The loss is cast back to float32, with an error of bfloat16; and a convolution does not run without the casts around it.
    verdict = tried(attacks()[program], together("micro-batches", "pure bf16"))
    assert (verdict.outcome, verdict.reason) == (Outcome.RIGHT, "")


def _ends_with_a_parameter(t: Trial) -> None:
    class Shifted(Block):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.shift

    train(t, Net([Shifted(), Shifted(), Shifted()]))


@pytest.mark.parametrize("recomputed", ["checkpointing", "selective checkpointing", "sequential checkpointing"])
@pytest.mark.parametrize("updates", [UPDATES, "optimizer offload in backward"])
def test_a_parameter_whose_gradient_is_there_before_its_block_runs_again(recomputed: str, updates: str) -> None:
    # The trial of the first steps shows it, and gradients wait from then on: it is no refusal.
    attack = Attack(name="shifted", kind="clean", what="", program=_ends_with_a_parameter)
    verdict = tried(attack, together(recomputed, updates))
    assert (verdict.outcome, verdict.reason) == (Outcome.RIGHT, "")


@pytest.mark.parametrize("updates", [UPDATES, "optimizer offload in backward"])
def test_streamed_blocks_in_a_sequence_that_runs_again_beside_updates(updates: str) -> None:
    # Streamed weights are not among what the sequence saves, so that a bias has its gradient before the sequence runs again.
    verdict = tried(attacks()["plain_loop"], together("sequential checkpointing", "weight streaming", updates))
    assert (verdict.outcome, verdict.reason) == (Outcome.RIGHT, "")


def test_a_model_that_does_not_run_under_autocast_is_refused_in_words() -> None:
    variant = Variant(
        name="autocast",
        technique="autocast",
        find=lambda *_: [choice("autocast", "precision", dtype="bfloat16")],
        is_bitwise=False,
        is_lossy=True,
    )
    verdict = tried(attacks()["own_checkpoint_scales_by_average"], variant)
    assert verdict.outcome is Outcome.REFUSED
    assert "does not run under autocast" in verdict.reason


def test_a_gradient_that_does_not_come_the_second_time_is_refused_in_words() -> None:
    parts = ("update in backward, clips", "chunked loss, gradients in backward")
    verdict = tried(attacks()["loss_by_transforms"], together(*parts))
    assert verdict.outcome is Outcome.REFUSED
    assert "did not reach the same parameters" in verdict.reason
