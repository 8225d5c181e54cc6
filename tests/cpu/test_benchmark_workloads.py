"""Every workload of the accuracy benchmark is a training loop that runs: two real steps on the host at a tiny size."""

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# The benchmarks lie beside the package, not in it.
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.workloads import (
    driver_peak_fp32,
    half_precision_step,
    published_fp32,
    recorded_24_layers,
    recorded_32_layers,
    timm_sweep,
    torchvision_without_kernels,
)

needs_torchvision = pytest.mark.skipif(
    not torchvision_without_kernels.is_installed(), reason="torchvision is not installed"
)
needs_timm = pytest.mark.skipif(
    importlib.util.find_spec("timm") is None or not torchvision_without_kernels.is_installed(),
    reason="timm or torchvision is not installed",
)
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)
SMALL_TEXT = {"batch_size": 2, "num_tokens": 8, "num_layers": 1, "width": 24, "num_heads": 2, "device": "cpu"}
SMALL_RECORDED = SMALL_TEXT | {"inner_width": 32}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The libraries that the workloads use warn about matters of their own (a missing image decoder, a loss name)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


def two_steps(workload: Iterator[Any]) -> list[Any]:
    yielded = [next(workload), next(workload)]
    workload.close()
    return yielded


def losses_are_finite(yielded: list[torch.Tensor]) -> bool:
    return all(loss.numel() == 1 and bool(torch.isfinite(loss)) for loss in yielded)


@needs_transformers
@pytest.mark.parametrize(("optimizer", "zero_grad"), [("Adam", 0), ("AdamW", 1), ("AdamW", 2)])
def test_the_published_language_model_trains_wherever_gradients_are_cleared(optimizer: str, zero_grad: int) -> None:
    yielded = two_steps(published_fp32.train_language_model(optimizer=optimizer, zero_grad=zero_grad, **SMALL_TEXT))
    assert losses_are_finite(yielded)


@needs_torchvision
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("ConvNeXtTiny", "AdamW"), ("MobileNetV2", "Adagrad"), ("ResNet101", "SGD"), ("VGG16", "RMSprop")],
)
def test_the_published_image_models_train(model: str, optimizer: str) -> None:
    yielded = two_steps(
        published_fp32.train_images(model=model, optimizer=optimizer, batch_size=2, image_size=32, device="cpu")
    )
    assert losses_are_finite(yielded)


@needs_transformers
@pytest.mark.parametrize("model", sorted(half_precision_step.LANGUAGE_MODELS))
def test_the_half_precision_step_trains_a_language_model(model: str) -> None:
    assert two_steps(half_precision_step.train_language_model(model=model, **SMALL_TEXT)) == [None, None]


@needs_torchvision
def test_the_half_precision_step_trains_an_image_model() -> None:
    workload = half_precision_step.train_images(model="resnet18", batch_size=2, image_size=32, device="cpu")
    assert two_steps(workload) == [None, None]


@needs_transformers
@pytest.mark.parametrize(
    ("model", "num_parameters"),
    [("gpt2", 124_439_808), ("distilbert-base-uncased", 66_362_880), ("bert-base-uncased", 109_482_240)],
)
def test_the_half_precision_models_have_the_published_number_of_parameters(model: str, num_parameters: int) -> None:
    import transformers

    with torch.device("meta"):
        network = getattr(transformers, half_precision_step.LANGUAGE_MODELS[model][1]).from_config(
            half_precision_step.language_config(model)
        )
    assert sum(parameter.numel() for parameter in network.parameters()) == num_parameters


@needs_torchvision
@pytest.mark.parametrize("model", ["resnet50", "mobilenetV2", "efficientnet"])
def test_the_driver_peak_image_models_train(model: str) -> None:
    workload = driver_peak_fp32.train_images(model=model, batch_size=2, image_size=32, device="cpu")
    assert losses_are_finite(two_steps(workload))


@needs_torchvision
def test_the_driver_peak_networks_are_the_named_ones() -> None:
    published = {"vgg16": 138_357_544, "inception": 23_834_568}
    with torch.device("meta"):
        for model, num_parameters in published.items():
            network = driver_peak_fp32.image_network(model)
            assert sum(parameter.numel() for parameter in network.parameters()) == num_parameters


@needs_timm
def test_xception_comes_from_timm() -> None:
    workload = driver_peak_fp32.train_images(model="Xception", batch_size=2, image_size=64, device="cpu")
    assert losses_are_finite(two_steps(workload))


@needs_transformers
@pytest.mark.parametrize("model", ["BERT_base", "gpt2_large"])
def test_the_driver_peak_language_models_train(model: str) -> None:
    assert losses_are_finite(two_steps(driver_peak_fp32.train_language_model(model=model, **SMALL_TEXT)))


@needs_transformers
def test_the_driver_peak_sequence_classifier_trains() -> None:
    yielded = two_steps(driver_peak_fp32.train_sequence_classifier(**SMALL_TEXT))
    assert losses_are_finite(yielded)
    assert not yielded[0].requires_grad


@needs_timm
def test_the_timm_sweep_trains() -> None:
    workload = timm_sweep.train(model="resnet10t", batch_size=2, image_size=32, device="cpu")
    assert losses_are_finite(two_steps(workload))


def test_the_recorded_24_layer_model_trains_and_infers() -> None:
    assert two_steps(recorded_24_layers.train(**SMALL_RECORDED)) == [None, None]
    assert two_steps(recorded_24_layers.infer(**SMALL_RECORDED)) == [None, None]


def test_the_recorded_32_layer_model_trains_and_runs_forward() -> None:
    assert losses_are_finite(two_steps(recorded_32_layers.train(**SMALL_RECORDED)))
    logits = two_steps(recorded_32_layers.forward_only(**SMALL_RECORDED))[-1]
    assert logits.shape == (2, 8, recorded_32_layers.VOCABULARY)
    assert logits.requires_grad


@pytest.mark.parametrize("loss_module", [recorded_24_layers, recorded_32_layers])
def test_the_written_out_loss_is_cross_entropy(loss_module: Any) -> None:
    logits, targets = torch.randn(2, 5, 11, dtype=torch.float64), torch.randint(0, 11, (2, 5))
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert torch.allclose(loss_module.cross_entropy(logits, targets), expected)


@pytest.mark.parametrize("attention_module", [recorded_24_layers, recorded_32_layers])
def test_the_written_out_attention_is_causal(attention_module: Any) -> None:
    network = attention_module.LanguageModel(1, 8, 2, 16, 4)
    tokens = torch.randint(0, attention_module.VOCABULARY, (1, 4))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % attention_module.VOCABULARY
    assert torch.allclose(network(tokens)[:, :-1], network(changed)[:, :-1])
    assert not torch.allclose(network(tokens)[:, -1], network(changed)[:, -1])
