"""Another cache in `generate`: exact ones give the plain tokens, a lossy one says how far its logits are, and what gives other tokens is not used."""

import contextlib
import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tightfit.errors import UsageError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

from tightfit.runtime.generation.generation_caches import with_cache  # noqa: E402 - after the check for torch


def model_of(model_type: str = "llama", **changes: Any) -> Any:
    torch.manual_seed(0)
    settings = {
        "vocab_size": 200, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(model_type, **{**settings, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.1)
    return model


IDS = torch.arange(5, 29).reshape(2, 12)


def tokens(model: Any, **changes: Any) -> Any:
    torch.manual_seed(1)
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), **{"max_new_tokens": 24, **changes})


@contextlib.contextmanager
def cache(kind: str, told: list[str], **changes: Any) -> Iterator[None]:
    with with_cache(kind, told.append, **changes):
        yield


@pytest.mark.parametrize("changes", [{"do_sample": False}, {"do_sample": True}, {"num_beams": 3}, {"max_length": 30, "max_new_tokens": None}])  # fmt: skip
def test_a_static_cache_gives_the_plain_tokens_and_random_state(changes: dict[str, Any]) -> None:
    model, told = model_of(), []
    plain, after = tokens(model, **changes), torch.rand(1)
    made = []
    prepare = transformers.GenerationMixin._prepare_static_cache

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        made.append(1)
        return prepare(self, *args, **kwargs)

    transformers.GenerationMixin._prepare_static_cache = counted
    try:
        with cache("static", told):
            assert torch.equal(tokens(model, **changes), plain)
            assert torch.equal(torch.rand(1), after)
            assert torch.equal(tokens(model, **changes), plain)
    finally:
        transformers.GenerationMixin._prepare_static_cache = prepare
    # Once to compare, and in both calls of the program.
    assert len(made) == 3
    assert "the same tokens as the plain one" in told[0]
    assert len(told) == 1
    assert torch.equal(tokens(model, **changes), plain)


def test_the_difference_of_a_lossy_cache_is_said() -> None:
    model, told = model_of(), []
    with cache("fp8", told):
        tokens(model, do_sample=False)
    assert "lossy" in told[0]
    assert "logits differ by at most" in told[0]


def test_a_cache_that_gives_other_tokens_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model, told = model_of(), []
    plain = tokens(model)
    update = transformers.cache_utils.StaticLayer.update
    monkeypatch.setattr(
        transformers.cache_utils.StaticLayer,
        "update",
        lambda self, keys, values, *args, **kwargs: update(self, -keys, values, *args, **kwargs),
    )
    with cache("static", told):
        assert torch.equal(tokens(model), plain)
    assert "the plain one is kept" in told[0]


def test_what_a_model_cannot_have_leaves_the_plain_cache() -> None:
    model, told = model_of("gemma3_text", sliding_window=8, head_dim=16), []
    plain = tokens(model)
    with cache("fp8", told):
        assert torch.equal(tokens(model), plain)
    assert "cannot be used" in told[0]


def test_a_cache_of_the_programs_stays_and_mistakes_are_told() -> None:
    model, told = model_of(), []
    plain = tokens(model, past_key_values=transformers.DynamicCache(config=model.config))
    with cache("static", told):
        own = transformers.DynamicCache(config=model.config)
        assert torch.equal(tokens(model, past_key_values=own), plain)
        assert own.get_seq_length() == 35
    assert any("a cache of its own" in line for line in told)
    with pytest.raises(UsageError, match="one of static"), cache("paged", told):
        pass
    with pytest.raises(UsageError, match="not on a GPU"), cache("offloaded", told, checks=False):
        tokens(model)


def test_another_way_of_generating_is_compared_anew() -> None:
    model, told = model_of(), []
    ways = [
        {"do_sample": False},
        {"do_sample": False, "max_new_tokens": 9},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": False, "prompt_lookup_num_tokens": 3},
    ]
    one, mask = IDS[:1], torch.ones_like(IDS)
    padded = torch.tensor([[0] * 4 + [1] * 8, [1] * 12])

    def all_of() -> list[Any]:
        torch.manual_seed(2)
        made = [model.generate(one, **{"max_new_tokens": 12, **way}) for way in ways]
        made += [
            model.generate(IDS, attention_mask=each, max_new_tokens=12, do_sample=False) for each in (mask, padded)
        ]
        with torch.inference_mode():
            made.append(model.generate(one, max_new_tokens=12, do_sample=False))
        with torch.no_grad():
            made.append(
                model.generate(inputs_embeds=model.get_input_embeddings()(one), max_new_tokens=12, do_sample=False)
            )
        return [*made, torch.rand(2)]

    plain = all_of()
    with cache("static", told):
        assert all(torch.equal(found, expected) for found, expected in zip(all_of(), plain, strict=True))
    # Tokens that are looked up in the prompt are taken back where they are wrong, which a static cache has no way to do.
    assert [line for line in told if "it cannot be used" in line]
    assert not hasattr(model, "_cache")


def test_a_cache_that_the_program_gets_back_is_the_plain_one() -> None:
    model, told = model_of(), []

    def turns() -> list[Any]:
        first = tokens(model, do_sample=False, return_dict_in_generate=True)
        tokens(model, do_sample=False)
        longer = torch.cat([first.sequences, IDS[:, :5]], dim=1)
        return [
            first.sequences,
            model.generate(longer, past_key_values=first.past_key_values, max_new_tokens=30, do_sample=False),
        ]

    plain = turns()
    with cache("static", told):
        assert all(torch.equal(found, expected) for found, expected in zip(turns(), plain, strict=True))
    assert any("returns its cache" in line for line in told)


def test_calls_within_calls_and_hooks_see_what_they_see_plainly() -> None:
    model, told, seen = model_of(), [], []

    class Nested(transformers.LogitsProcessor):
        """Asks the model itself in the middle of an answer."""

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            seen.append(model.generate(IDS[:1, :7], max_new_tokens=3, do_sample=False))
            return scores

    def both() -> Any:
        processor = transformers.LogitsProcessorList([Nested()])
        return tokens(model, do_sample=False, max_new_tokens=6, logits_processor=processor)

    plain, number = both(), len(seen)
    with cache("static", told):
        assert torch.equal(both(), plain)
    assert len(seen) == 2 * number
    assert all(torch.equal(seen[at], seen[at + number]) for at in range(number))

    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    tokens(model, do_sample=False)
    number = len(calls)
    with cache("static", told):
        tokens(model, do_sample=False)
    handle.remove()
    assert len(calls) == 2 * number


def test_two_threads_that_generate_at_once_have_a_cache_each() -> None:
    model, told = model_of(), []
    expected = [tokens(model, do_sample=False), model.generate(IDS + 1, max_new_tokens=24, do_sample=False)]
    begun, go_on = threading.Event(), threading.Event()

    class Waits(transformers.StoppingCriteria):
        """Holds the first call in the middle of its answer."""

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            begun.set()
            assert go_on.wait(60)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    found: list[Any] = []
    criteria = transformers.StoppingCriteriaList([Waits()])
    with cache("static", told):
        thread = threading.Thread(
            target=lambda: found.append(tokens(model, do_sample=False, stopping_criteria=criteria))
        )
        thread.start()
        assert begun.wait(60)
        found.insert(0, model.generate(IDS + 1, max_new_tokens=24, do_sample=False))
        go_on.set()
        thread.join()
    assert torch.equal(found[1], expected[0]) and torch.equal(found[0], expected[1])


def test_a_model_that_is_trained_and_copied_in_between_generates_as_plainly() -> None:
    def trained() -> list[Any]:
        model = model_of("gpt2", bos_token_id=1, eos_token_id=199)
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for step in range(3):
            torch.manual_seed(step)
            rows = torch.randint(2, 190, (4, 20))
            model.train()(rows, labels=rows).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            found.append(model.generate(rows[:1, :5], max_new_tokens=10, do_sample=True))
            found.append(copy.deepcopy(model).generate(rows[:, :6], max_new_tokens=9, do_sample=False))
        return [*found, *model.state_dict().values()]

    plain = trained()
    with cache("static", []):
        assert all(torch.equal(found, expected) for found, expected in zip(trained(), plain, strict=True))
