"""What the effects of a program forbid, by what a technique needs; and what a user leaves out. No workload is traced here."""

import dataclasses

import pytest
from tests.null.test_tape import small_tape

from tightfit.errors import UsageError
from tightfit.fit.planning import allowed
from tightfit.fit.searching.permitted import grouped, obstacle
from tightfit.planner.option import Option
from tightfit.tape import Effect, EffectKind
from tightfit.techniques.registry import techniques

BLOCK = "Net.h.1"


def option(technique: str, where: str = BLOCK, inside: tuple[str, ...] = (), **settings: object) -> Option:
    slots = frozenset(f"activations@{module}" for module in inside or (where, f"{where}.mlp"))
    return Option(technique=technique, where=where, settings=settings, changes=(), seconds=0.0, exact=True, slots=slots)


def is_permitted(chosen: Option, kind: EffectKind, module: str = "") -> bool:
    effect = Effect(module=module, kind=kind, what="does something")
    tape = dataclasses.replace(small_tape(), effects=(effect,))
    return obstacle(tape, chosen, techniques()[chosen.technique].needs) is None


@pytest.mark.parametrize("technique", ["checkpointing", "selective_checkpointing", "tiled_tokens", "chunked_loss"])
@pytest.mark.parametrize("kind", [EffectKind.IN_PLACE, EffectKind.REPLACED, EffectKind.CREATE_GRAPH])
def test_what_cannot_be_put_back_forbids_to_run_code_again_or_in_parts(technique: str, kind: EffectKind) -> None:
    assert not is_permitted(option(technique), kind, f"{BLOCK}.mlp")
    assert is_permitted(option(technique), kind, "Net")
    assert is_permitted(option(technique), kind, "Net.h.10")


@pytest.mark.parametrize("kind", [EffectKind.WRITE, EffectKind.DRAW, EffectKind.HOOK])
def test_what_can_be_put_back_forbids_to_run_code_in_parts_alone(kind: EffectKind) -> None:
    assert is_permitted(option("checkpointing"), kind, BLOCK)
    assert not is_permitted(option("tiled_tokens"), kind, BLOCK)
    assert not is_permitted(option("micro_batches", where="batch"), kind, "Net.embedding")


def test_an_input_written_to_in_place_matters_where_the_region_begins() -> None:
    assert not is_permitted(option("checkpointing"), EffectKind.INPUT, BLOCK)
    assert is_permitted(option("checkpointing"), EffectKind.INPUT, f"{BLOCK}.mlp")
    step_range = option("sequential_checkpointing", where="Net.h", inside=("Net.h.1", "Net.h.2"), begin=1, end=3)
    assert not is_permitted(step_range, EffectKind.INPUT, "Net.h.1")
    assert is_permitted(step_range, EffectKind.INPUT, "Net.h.2")


def test_an_output_written_to_in_place_matters_between_the_blocks_of_a_segment() -> None:
    segment = option("nested_checkpointing", where="Net.h", inside=("Net.h.1", "Net.h.2"), begin=1, end=3)
    assert not is_permitted(segment, EffectKind.OUTPUT, "Net.h.1")
    assert is_permitted(segment, EffectKind.OUTPUT, "Net.h.1.mlp")
    assert is_permitted(segment, EffectKind.OUTPUT, "Net.h.3")
    assert is_permitted(option("checkpointing"), EffectKind.OUTPUT, BLOCK)


def test_a_parametrized_head_is_not_run_in_parts() -> None:
    assert not is_permitted(option("chunked_loss", where="Net.head"), EffectKind.PARAMETRIZED, "Net.head")
    assert is_permitted(option("checkpointing", where="Net.head"), EffectKind.PARAMETRIZED, "Net.head")


@pytest.mark.parametrize("kind", list(EffectKind)[list(EffectKind).index(EffectKind.GRADIENT) :])
def test_whoever_else_touches_gradients_forbids_to_update_in_the_backward_pass(kind: EffectKind) -> None:
    assert not is_permitted(option("update_in_backward", where="optimizer"), kind)
    assert not is_permitted(option("low_bit_states", where="optimizer", in_backward=True), kind)
    states = option("low_bit_states", where="optimizer")
    assert is_permitted(states, kind) is (kind != EffectKind.STEP_HOOK)
    assert is_permitted(option("checkpointing"), kind)


def test_places_that_are_refused_alike_are_one_row() -> None:
    refused = [("checkpointing", f"Net.h.{i}", "writes to x (net.py:3)") for i in range(32)]
    rows = list(grouped([*refused, ("checkpointing", "Net.head", "writes to y")]))
    assert rows == [
        ("checkpointing", "Net.h.* (32): writes to x (net.py:3)"),
        ("checkpointing", "Net.head: writes to y"),
    ]


@pytest.mark.parametrize(
    ("text", "left_out"),
    [
        ("checkpointing", {"Net.h.1", "Net.h.2", "Net"}),
        ("checkpointing@Net.h.1", {"Net.h.1", "Net"}),
        ("tiled_tokens,checkpointing", {"Net.h.1", "Net.h.2", "Net"}),
        ("checkpointing@Net.h.1,Net.h.2", {"Net.h.1", "Net.h.2", "Net"}),
        ("checkpointing@*.h.*", {"Net.h.1", "Net.h.2", "Net"}),
        ("tiled-tokens@Net.h.1", set()),
    ],
)
def test_a_technique_is_left_out_wherever_it_would_run_a_module_that_is_named(text: str, left_out: set[str]) -> None:
    offered = [
        option("checkpointing", where="Net.h.1"),
        option("checkpointing", where="Net.h.2"),
        option("checkpointing", where="Net", inside=("Net", "Net.h.1", "Net.h.2")),
    ]
    permitted = allowed((), [text])
    assert {o.where for o in offered if permitted.leaves_out(o)} == left_out


@pytest.mark.parametrize("text", ["magic", "checkpointing@", "@Net.h.1"])
def test_what_names_no_technique_or_no_place_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"write TECHNIQUE or TECHNIQUE@PLACE,PLACE"):
        allowed((), [text])


@pytest.mark.parametrize("text", ["checkpointing@Net.h", "checkpointing@*.h.*", "checkpointing@optimizer"])
def test_a_place_is_a_module_that_runs(text: str) -> None:
    modules = frozenset({"Net", "Net.h", "Net.h.1", "optimizer"})
    allowed((), [text]).check_places("checkpointing", modules)
    with pytest.raises(
        UsageError, match=r"checkpointing@Nett\.h\.1: the program runs no module of that name \(did you mean Net\.h\.1"
    ):
        allowed((), ["checkpointing@Nett.h.1"]).check_places("checkpointing", modules)


def test_a_technique_without_a_place_in_the_program_is_a_note() -> None:
    left_out = allowed((), ["optimizer_kernel@optimizer"])
    assert left_out.check_places("optimizer_kernel", frozenset({"Net", "optimizer"})) is None
    note = left_out.check_places("optimizer_kernel", frozenset({"Net"}), has_options=False)
    assert note is not None and note.endswith("optimizer_kernel has no place in this program")
    with pytest.raises(UsageError, match=r"the program runs no module of that name \(did you mean optimizer\?"):
        allowed((), ["optimizer_kernel@optimiser"]).check_places(
            "optimizer_kernel", frozenset({"Net"}), has_options=False
        )
