"""Techniques together on one program: each pair that a plan may have is trained right or refused, and clean programs are trained right."""

import pytest
import torch
from tests.attacks.check import one_in_three
from tests.attacks.harness import Outcome, run
from tests.attacks.places import VARIANTS, Variant
from tests.attacks.registry import attacks

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


@pytest.fixture(autouse=True)
def together(monkeypatch):
    """Has combinations among the variants of this test, and of no other."""
    for name, parts in TOGETHER.items():
        finds = [VARIANTS[part].find for part in parts]

        def find(model, optimizers, finds=finds):
            return [choice for each in finds for choice in each(model, optimizers)]

        freezes = any(VARIANTS[part].freezes for part in parts)
        variant = Variant(name=name, technique="", find=find, is_bitwise=False, is_lossy=False, freezes=freezes)
        monkeypatch.setitem(VARIANTS, name, variant)


@pytest.mark.parametrize(("program", "name"), one_in_three(CLEAN, TOGETHER))
def test_a_clean_program_is_trained_right(program: str, name: str) -> None:
    verdict = run(attacks()[program], name)
    assert (verdict.outcome, verdict.reason) == (Outcome.RIGHT, "")


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(("program", "name"), one_in_three(OTHERS, TOGETHER))
def test_an_attack_is_trained_right_or_refused(program: str, name: str) -> None:
    verdict = run(attacks()[program], name)
    assert verdict.outcome in (Outcome.RIGHT, Outcome.REFUSED, Outcome.NO_PLACE), verdict.reason


@pytest.mark.parametrize("program", ["plain_loop", "frozen_stem", "adamw_with_scheduler"])
@pytest.mark.parametrize("streaming", ["weight streaming", "trained weight streaming"])
def test_tiles_of_a_block_whose_weights_come_and_go(program: str, streaming: str, monkeypatch) -> None:
    parts = ("tiled tokens", streaming)

    def find(model, optimizers):
        return [choice for part in parts for choice in VARIANTS[part].find(model, optimizers)]

    freezes = VARIANTS[streaming].freezes
    variant = Variant(name="both", technique="", find=find, is_bitwise=False, is_lossy=False, freezes=freezes)
    monkeypatch.setitem(VARIANTS, "both", variant)
    verdict = run(attacks()[program], "both")
    assert (verdict.outcome, verdict.reason) == (Outcome.RIGHT, "")


@pytest.mark.parametrize("program", ["adamw_with_scheduler", "image_chain"])
def test_parts_of_a_batch_in_bfloat16(program: str, monkeypatch) -> None:
    # The loss is cast back to float32, with an error of bfloat16; and a convolution does not run without the casts around it.
    parts = ("micro-batches", "pure bf16")

    def find(model, optimizers):
        return [choice for part in parts for choice in VARIANTS[part].find(model, optimizers)]

    variant = Variant(name="both", technique="", find=find, is_bitwise=False, is_lossy=True)
    monkeypatch.setitem(VARIANTS, "both", variant)
    verdict = run(attacks()[program], "both")
    assert (verdict.outcome, verdict.reason) == (Outcome.RIGHT, "")
