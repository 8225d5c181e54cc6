"""Micro-batches: the gradient of the whole batch from its parts, or a reason why not."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.cpu import micro_batch_models as models
from tests.cpu.micro_batch_models import numbers_of, tokens_of
from tests.cpu.module_training import DEVICE, Trained, assert_same, choice, timeline, traced, train

from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.effects.independence import row_proof
from tightfit.errors import ApplyError, apply_error, forget_apply_errors
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.micro_batches import example_wise_check
from tightfit.techniques.micro_batches.micro_batches import MicroBatches
from tightfit.techniques.recomputation.selective_checkpointing import SelectiveCheckpointing

CLOSE = {"rtol": 1e-9, "atol": 1e-12}
BATCH = 5  # no number of parts divides it


@pytest.fixture(autouse=True)
def in_double_precision() -> Iterator[None]:
    """So that a wrong weight is told from rounding."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def parts(num_parts: int, *, draws_anew: bool = False):
    return [choice("micro_batches", "batch", num_parts=num_parts, draws_anew=draws_anew)]


def train_tokens(num_parts: int, **settings: object) -> Trained:
    chosen = parts(num_parts) if num_parts > 1 else ()
    return train(lambda: models.Tokens(**settings), lambda model, step: model(*tokens_of(step, BATCH))[1], chosen)


def train_numbers(kind: type[torch.nn.Module], num_parts: int, **settings: object) -> Trained:
    chosen = parts(num_parts) if num_parts > 1 else ()
    return train(lambda: kind(**settings), lambda model, step: model(*numbers_of(step, BATCH)), chosen)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("num_parts", [2, 3, 8])
@pytest.mark.parametrize("settings", [{}, {"weighted": True}, {"smoothing": 0.1}, {"weighted": True, "smoothing": 0.1}])
def test_a_mean_over_the_targets_that_count(num_parts: int, settings: dict[str, object]) -> None:
    assert_same(train_tokens(1, **settings), train_tokens(num_parts, **settings), **CLOSE)


@pytest.mark.parametrize("num_parts", [2, 4])
@pytest.mark.parametrize("settings", [{}, {"reduction": "sum"}, {"reduction": "sum", "scale": 7.0}, {"scale": 3.0}])
def test_means_and_sums_over_numbers(num_parts: int, settings: dict[str, object]) -> None:
    assert_same(
        train_numbers(models.Regression, 1, **settings),
        train_numbers(models.Regression, num_parts, **settings),
        **CLOSE,
    )


def _llama(loss_kwargs: dict[str, object], chosen=()) -> Trained:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=31, use_cache=True
    )

    def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
        tokens, targets = tokens_of(step, BATCH)
        labels = tokens.masked_fill(targets == -1, -100)
        return model(input_ids=tokens, labels=labels, attention_mask=torch.ones_like(tokens), **loss_kwargs).loss / 2

    return train(lambda: LlamaForCausalLM(config), loss, chosen)


@pytest.mark.parametrize(
    "loss_kwargs", [pytest.param({}, marks=pytest.mark.slow), {"num_items_in_batch": torch.tensor(17)}]
)
def test_a_decoder_of_hugging_face_with_labels_that_are_ignored(loss_kwargs: dict[str, object]) -> None:
    # Its logits are float32 whatever the weights are.
    assert_same(_llama(loss_kwargs), _llama(loss_kwargs, parts(2)), rtol=1e-4, atol=1e-6)


def test_together_with_blocks_that_run_twice_and_a_loss_in_chunks() -> None:
    others = [
        choice("checkpointing", "LlamaForCausalLM.model.layers.0"),
        choice("chunked_loss", "LlamaForCausalLM.lm_head", num_chunks=2, gradients_in="forward"),
    ]
    assert_same(_llama({}), _llama({}, [*parts(2), *others]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (models.Normalised, "batch norm in training"),
        (models.Dropped, "dropout draws random numbers"),
        (models.Contrastive, "as many classes as the batch has examples"),
        (models.Centred, r"aten.mean.dim works along the rows at micro_batch_models.py:\d+"),
        (models.Balanced, "not one mean or sum"),
        (models.Counting, "writes to a tensor from outside at micro_batch_models.py"),
    ],
)
def test_what_parts_cannot_stand_for_is_refused_with_the_reason(kind: type[torch.nn.Module], reason: str) -> None:
    with pytest.raises(ApplyError, match=reason):
        train_numbers(kind, 2)


def test_dropout_is_taken_where_it_is_allowed() -> None:
    other = train(models.Dropped, lambda m, step: m(*numbers_of(step, BATCH)), parts(2, draws_anew=True))
    plain = train_numbers(models.Dropped, 1)
    assert other.losses != plain.losses
    assert other.losses == pytest.approx(plain.losses, rel=0.3)


def test_a_frozen_batch_norm_is_none() -> None:
    def frozen() -> torch.nn.Module:
        model = models.Normalised()
        model.norm.eval()
        return model

    def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
        return model(*numbers_of(step, BATCH))

    assert_same(train(frozen, loss), train(frozen, loss, parts(2)), **CLOSE)


def _applied(model: torch.nn.Module, num_parts: int = 2):
    return apply_choices(parts(num_parts), model, [torch.optim.SGD(model.parameters())])


def test_gradients_that_are_there_already_are_added_to_once() -> None:
    plain, split = models.Regression(), models.Regression()
    split.load_state_dict(plain.state_dict())
    with _applied(split):
        for model in (plain, split):
            for step in range(3):
                (model(*numbers_of(step, BATCH)) * 4).backward()
    for expected, found in zip(plain.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, **CLOSE)


def test_two_losses_of_one_model_in_one_backward_pass() -> None:
    plain, split = models.Regression(), models.Regression()
    split.load_state_dict(plain.state_dict())
    with _applied(split):
        for model in (plain, split):
            (model(*numbers_of(0, BATCH)) + 3 * model(*numbers_of(1, 4))).backward()
    for expected, found in zip(plain.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, **CLOSE)


def test_small_outputs_are_put_together_and_have_no_gradients_of_their_own() -> None:
    model = models.Tokens()
    tokens, targets = tokens_of(0, BATCH)
    expected = model(tokens, targets)[0]
    with _applied(model):
        logits, loss = model(tokens, targets)
        torch.testing.assert_close(logits, expected, **CLOSE)
        with pytest.raises(ApplyError, match="computes its own loss"):
            (loss + logits.square().mean()).backward()


def test_large_outputs_are_left_out_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tightfit.techniques.micro_batches.split_outputs.SMALL_OUTPUT_BYTES", 64)
    model = models.Tokens()
    with _applied(model):
        logits, loss = model(*tokens_of(0, BATCH))
        loss.backward()
        for use in (lambda: logits.shape, lambda: logits[0], lambda: torch.argmax(logits, dim=-1)):
            with pytest.raises(ApplyError, match="the output 0 of the model"):
                use()


def test_without_gradients_the_batch_stays_whole() -> None:
    model = models.Tokens()
    with _applied(model) as session, torch.no_grad():
        logits, loss = model(tokens_of(0, BATCH)[0])
        assert logits.shape == (BATCH, 7, 11)
        assert loss is None
        assert not session.statistics


def test_what_cannot_be_split_is_refused() -> None:
    values, target = numbers_of(0, 1)
    model = models.Regression()
    with _applied(model), pytest.raises(ApplyError, match="one example"):
        model(values, target)
    values, target = numbers_of(0, 4)
    with _applied(model), pytest.raises(ApplyError, match="requires a gradient"):
        model(values.requires_grad_(), target)
    hook = model.body.layers[0][0].weight.register_hook(lambda gradient: gradient)
    with _applied(model), pytest.raises(ApplyError, match="hook on its gradient"):
        model(values.detach(), target)
    hook.remove()
    with _applied(model), torch.autocast("cpu", torch.float16), pytest.raises(ApplyError, match="GradScaler"):
        model(values.detach(), target)
    assert all(p.grad is None for p in model.parameters())


def test_autocast_around_the_model() -> None:
    torch.set_default_dtype(torch.float32)

    def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(*tokens_of(step, BATCH))[1]

    assert_same(train(models.Tokens, loss), train(models.Tokens, loss, parts(2)), rtol=5e-2, atol=5e-3)


@pytest.mark.parametrize("workload", ["large", "causal"])
def test_the_traced_saving_is_about_the_promised_one(workload: str) -> None:
    plain = traced(models.__file__, workload)
    options = list(MicroBatches().options(Profile(plain, find(DEVICE))))
    assert [option.settings["num_parts"] for option in options] == [2, 4, 8]
    before = int(timeline(plain).max())
    for option in options[1:2]:
        found = int(timeline(traced(models.__file__, workload, [option])).max())
        promised = int((timeline(plain) + _by_event(option, len(plain.events))).max())
        assert found < before
        assert found == pytest.approx(promised, abs=MicroBatches.tolerance * (before - promised))


def test_gradients_that_are_there_before_a_pass_are_held_beside_those_of_its_parts() -> None:
    plain = traced(models.__file__, "accumulated")
    option = next(iter(MicroBatches().options(Profile(plain, find(DEVICE)))))
    found = int(timeline(traced(models.__file__, "accumulated", [option])).max())
    promised = int((timeline(plain) + _by_event(option, len(plain.events))).max())
    assert found == pytest.approx(promised, rel=0.05)


def test_blocks_that_keep_their_products_run_in_parts_under_autocast() -> None:
    # Weights that a forward without gradients has cast would be missing when blocks are run again after the cache of casts was emptied.
    plain = traced(models.__file__, "causal", autocast=True)
    halves = next(iter(MicroBatches().options(Profile(plain, find(DEVICE)))))
    blocks = [
        o
        for o in SelectiveCheckpointing().options(Profile(plain, find(DEVICE)))
        if o.where.endswith(("layers.1", "layers.2"))
    ]
    assert len(blocks) == 2
    both = traced(models.__file__, "causal", [halves, *blocks], autocast=True)
    assert timeline(both).max() < timeline(plain).max()


def _by_event(option, num_events: int):
    total = torch.zeros(num_events, dtype=torch.int64)
    for change in option.changes:
        total[change.begin : change.end] += change.num_bytes
    return total.numpy()


def test_a_loss_beside_the_model_is_advice() -> None:
    plain = traced(models.__file__, "beside")
    assert list(MicroBatches().options(Profile(plain, find(DEVICE)))) == []
    (row,) = MicroBatches().advice(Profile(plain, find(DEVICE)))
    assert "gradient_accumulation_steps=2" in row.what
    assert row.saves_bytes > 0


def test_a_contrastive_loss_is_refused_on_the_virtual_card() -> None:
    plain = traced(models.__file__, "contrastive")
    option = next(iter(MicroBatches().options(Profile(plain, find(DEVICE)))))
    with pytest.raises(ApplyError, match="as many classes"):
        traced(models.__file__, "contrastive", [option])


def test_what_checkpoints_do_in_their_first_runs_repeats_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    proved = []

    def prove(*args: Any, **kwargs: Any) -> Any:
        proved.append(args)
        return row_proof.prove(*args, **kwargs)

    monkeypatch.setattr(example_wise_check, "prove", prove)
    chosen = [*parts(2), *(choice("checkpointing", f"Regression.body.layers.{number}") for number in range(2))]
    planned = train(models.Regression, lambda model, step: model(*numbers_of(step, 4)), chosen)
    assert_same(train(models.Regression, lambda model, step: model(*numbers_of(step, 4))), planned, **CLOSE)
    assert len(proved) == 1


def test_another_model_under_the_same_autocast_has_the_gradients_of_its_plain_run() -> None:
    # Autocast casts its weight once for both calls, and adds up their gradients in bfloat16: what it has cast is not ours to drop.
    torch.set_default_dtype(torch.float32)
    found = []
    for chosen in ([], parts(2)):
        torch.manual_seed(0)
        model, other = models.Tokens(), torch.nn.Linear(64, 64)
        apply_choices(chosen, model, [torch.optim.SGD(model.parameters(), lr=0.1)], check_steps=0)
        for step in range(3):
            values = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
            other.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                before = other(values[:8]).float().square().mean()
                loss = model(*tokens_of(step, BATCH))[1]
                after = other(values[8:]).float().sin().mean()
            (before + after).backward()
            loss.backward()
            assert other.weight.grad is not None
            found.append(other.weight.grad.clone())
    assert all(map(torch.equal, found[:3], found[3:]))


class ThenBare(models.Tokens):
    """Returns bare logits where no targets are given."""

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        logits, loss = super().forward(tokens, targets)
        return logits if loss is None else loss


class ThenCounted(ThenBare):
    """From the fourth call on it counts, and draws with Python's random."""

    def __init__(self) -> None:
        super().__init__()
        self.num_counted = 0

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        scale = 1.0
        if targets is None:
            self.num_counted += 1
            scale = random.random() + self.num_counted
        return super().forward(tokens, targets) * scale


@pytest.mark.parametrize("kind", [ThenBare, ThenCounted])
def test_a_later_batch_that_cannot_be_split_runs_whole(kind: type[torch.nn.Module]) -> None:
    counts: list[Any] = []

    def loss_of(model: Any, step: int) -> torch.Tensor:
        tokens, targets = tokens_of(step, BATCH)
        if step < 1:
            return model(tokens, targets)
        loss = model(tokens).logsumexp(-1).square().mean() + (model(tokens, targets) if step == 2 else 0.0)
        counts.append((getattr(model, "num_counted", 0), random.random()))
        return loss

    def trained(num_parts: int) -> Trained:
        random.seed(0)
        return train(kind, loss_of, parts(num_parts) if num_parts > 1 else ())

    forget_apply_errors()
    assert_same(trained(1), trained(2), **CLOSE)
    assert counts[:2] == counts[2:]
    assert apply_error() is None


def write_to_a_weight(model: ThenBare) -> None:
    model.frozen.weight.data.add_(0.1)


def add_to_a_gradient(model: ThenBare) -> None:
    model.body(torch.ones(2, 16)).sum().backward()


@pytest.mark.parametrize("act", [write_to_a_weight, add_to_a_gradient])
def test_a_later_batch_that_has_left_something_behind_is_refused(act: Callable[[ThenBare], None]) -> None:
    class ThenActs(ThenBare):
        def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
            if targets is None:
                act(self)
            return super().forward(tokens, targets)

    def loss_of(model: Any, step: int) -> torch.Tensor:
        tokens, targets = tokens_of(step, BATCH)
        return model(tokens, targets) if step < 1 else model(tokens).square().mean()

    with pytest.raises(ApplyError, match="micro_batches"):
        train(ThenActs, loss_of, parts(2))
