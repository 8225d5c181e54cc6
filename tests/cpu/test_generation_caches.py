"""Another cache in `generate`: exact ones give the plain tokens, a lossy one says how far its logits are, and what gives other tokens is not used."""

import contextlib
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
        out = model.generate(IDS, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True)
    assert type(out.past_key_values).__name__ == "QuantizedCache"
    plain = model.generate(IDS, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True)
    assert torch.equal(out.logits[0], plain.logits[0])
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
