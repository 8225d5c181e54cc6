"""Freezing and adapters: what they would need is what they do need when they are done."""

import re

import pytest
import torch
from tests.cpu import frozen_models as models
from tests.cpu.module_training import DEVICE, choice, promised_peak, timeline, traced

from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.errors import ApplyError
from tightfit.runtime.apply import apply_choices
from tightfit.tape import Tape
from tightfit.techniques.trained.adapters import Adapters
from tightfit.techniques.trained.freezing import Freezing

GIB = 1 << 30


@pytest.fixture(scope="module")
def plain() -> Tape:
    return traced(models.__file__, "causal")


def test_frozen_blocks_hold_what_was_promised(plain: Tape) -> None:
    options = list(Freezing().options(Profile(plain, find(DEVICE))))
    assert [option.settings["num_blocks"] for option in options] == [2, 4, 6]
    assert not any(option.exact for option in options)
    before = int(timeline(plain).max())
    promised = [promised_peak(plain, [option]) for option in options]
    assert before > promised[0] > promised[1] > promised[2]
    found = int(timeline(traced(models.__file__, "causal", [options[1]])).max())
    assert found == pytest.approx(promised[1], abs=Freezing.tolerance * (before - promised[1]))


def test_what_works_before_the_blocks_is_frozen_with_them() -> None:
    tape = traced(models.__file__, "vision")
    option = next(iter(Freezing().options(Profile(tape, find(DEVICE)))))
    assert option.where == "Vision.blocks"
    model = models.Vision()
    chosen = choice("freezing", option.where, **option.settings)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with apply_choices([chosen], model, [optimizer]) as session:
        model(torch.randn(2, 3, 16, 16)).square().sum().backward()
        optimizer.step()
        assert "parameters are not trained" in session.notes[0]
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    frozen = ("patches", "token", "positions", "blocks.0.")
    assert changed == {name for name in before if not name.startswith(frozen)}
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_freezing_is_refused_where_it_is_too_late_or_all() -> None:
    model = models.Vision()
    chosen = choice("freezing", "Vision.blocks", num_blocks=2, before="Vision.patches")
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    with pytest.raises(ApplyError, match="gradients already"):
        apply_choices([chosen], model, [])
    model.requires_grad_(False)
    with pytest.raises(ApplyError, match="trained anyway"):
        apply_choices([chosen], model, [])
    model.zero_grad()
    model.blocks[0].requires_grad_(True)
    with pytest.raises(ApplyError, match="all trained parameters"):
        apply_choices([chosen], model, [])


def test_the_rows_name_what_each_would_hold(plain: Tape) -> None:
    (frozen,) = Freezing().advice(Profile(plain, find(DEVICE)))
    assert re.search(r"with 2 of 8 .* with 4 of 8 .* with 6 of 8 .*--allow freezing", frozen.sentence)
    (adapters,) = Adapters().advice(Profile(plain, find(DEVICE)))
    assert "LoRA on 56 linear layers" in adapters.what
    numbers = 8 * 8 * (4 * (256 + 256) + 3 * (256 + 768))
    assert f"({numbers:,} trainable parameters)" in adapters.sentence


@pytest.mark.slow
def test_adapters_hold_what_was_promised(plain: Tape) -> None:
    from tightfit.techniques.trained import adapters

    parts = Profile(plain, find(DEVICE)).trained_parts
    promised = parts.peak_with(adapters._changes(parts, adapters._linears(parts), 64))
    found = int(timeline(traced(models.__file__, "causal", rank=64)).max())
    assert promised == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize(("ranks", "named"), [((8, 20_000), ["8"]), ((20_000,), [])])
def test_ranks_that_would_hold_more_are_no_advice(
    ranks: tuple[int, ...], named: list[str], plain: Tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tightfit.techniques.trained import adapters

    monkeypatch.setattr(adapters, "RANKS", ranks)
    sentences = [each.sentence for each in Adapters().advice(Profile(plain, find(DEVICE)))]
    assert re.findall(r"at rank (\d+)", " ".join(sentences)) == named


def test_adapters_are_nothing_to_put_on_a_model(plain: Tape) -> None:
    assert list(Adapters().options(Profile(plain, find(DEVICE)))) == []
    with pytest.raises(ApplyError, match="add them in the program"):
        apply_choices([choice("adapters", "Vision.blocks", rank=8)], models.Vision(), [])
