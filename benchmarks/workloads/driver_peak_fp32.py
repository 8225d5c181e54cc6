"""The training scripts behind the A100-40GB measurements (sources: itu-rad/GPUMemNet, Test_Pipeline/cnn_models, and
itu-rad/CARMA, workloads, which carries the language models).

float32 with Adam (CNNs) or AdamW (language models: the same bytes), cross entropy, batches that a loader makes on the
host and that are moved without pinning. The previous batch, outputs and loss are alive until their names are bound
again. Image scripts print a model summary first (a forward pass of two images); language scripts run one forward pass
of the full batch first and keep its input. Gradients are cleared before the forward pass (images) or after the
optimizer (language models).
"""

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.workloads import torchvision_without_kernels

# Inception V3 is trained on 299 x 299 pixels with no auxiliary head; Xception comes from timm.
IMAGE_MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "vgg16": ("vgg16", {}, 224),
    "resnet50": ("resnet50", {}, 224),
    "mobilenetV2": ("mobilenet_v2", {}, 224),
    "efficientnet": ("efficientnet_b0", {}, 224),
    "inception": ("inception_v3", {"aux_logits": False, "init_weights": False}, 299),
    "Xception": ("xception", {}, 224),
}
# Layers, width, heads; vocabularies are those of bert-large-cased, gpt2 and xlnet.
LANGUAGE_MODELS = {
    "BERT_base": (12, 768, 12),
    "BERT_large": (24, 1024, 16),
    "gpt2_large": (36, 1280, 20),
    "gpt2_xl": (48, 1600, 25),
}
XLNET_MODELS = {"xlnet_base": (12, 768, 12), "xlnet_large": (24, 1024, 16)}
BERT_CASED_VOCABULARY = 28_996


def image_network(model: str) -> torch.nn.Module:
    """The classifier of 1000 classes with random weights, on the host."""
    name, options, _ = IMAGE_MODELS[model]
    if model == "Xception":
        import timm

        return timm.create_model("legacy_xception", pretrained=False, num_classes=1000)
    return getattr(torchvision_without_kernels.models(), name)(num_classes=1000, **options)


def train_images(
    *, model: str = "resnet50", batch_size: int = 32, image_size: int = 0, device: str = "cuda"
) -> Iterator[torch.Tensor]:
    """One classifier; `image_size` 0 means the size that its script trains on."""
    pixels = image_size or IMAGE_MODELS[model][2]
    network = image_network(model)
    network.to(device)
    network(torch.rand(2, 3, pixels, pixels).to(device))
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(network.parameters(), lr=0.001)
    network.train()
    running_loss = 0.0
    while True:
        images, labels = torch.rand(batch_size, 3, pixels, pixels), torch.randint(0, 1000, (batch_size,))
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        outputs = network(images)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
        yield loss


def language_network(model: str, num_layers: int = 0, width: int = 0, num_heads: int = 0) -> torch.nn.Module:
    """BERT for masked tokens or GPT-2, random weights, on the host; sizes of 0 mean those of the named model."""
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    own_layers, own_width, own_heads = LANGUAGE_MODELS[model]
    layers, wide, heads = num_layers or own_layers, width or own_width, num_heads or own_heads
    if model.startswith("BERT"):
        config = BertConfig(
            vocab_size=BERT_CASED_VOCABULARY,
            hidden_size=wide,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * wide,
        )
        return BertForMaskedLM(config)
    return GPT2LMHeadModel(GPT2Config(n_embd=wide, n_layer=layers, n_head=heads))


def train_language_model(
    *,
    model: str = "BERT_base",
    batch_size: int = 32,
    num_tokens: int = 512,
    num_layers: int = 0,
    width: int = 0,
    num_heads: int = 0,
    device: str = "cuda",
) -> Iterator[torch.Tensor]:
    """BERT or GPT-2 on batches padded to `num_tokens`."""
    network = language_network(model, num_layers, width, num_heads).to(device)
    vocabulary = network.config.vocab_size
    example = torch.randint(0, vocabulary, (batch_size, num_tokens)).to(device)
    network(example)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4)
    network.train()
    total_loss = 0.0
    while True:
        tokens = torch.randint(0, vocabulary, (batch_size, num_tokens)).to(device)
        mask = torch.ones(batch_size, num_tokens, dtype=torch.long).to(device)
        labels = tokens.clone() if model.startswith("BERT") else tokens
        outputs = network(input_ids=tokens, attention_mask=mask, labels=labels)
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total_loss += loss.item()
        yield loss


def train_sequence_classifier(
    *,
    model: str = "xlnet_base",
    batch_size: int = 8,
    num_tokens: int = 512,
    num_layers: int = 0,
    width: int = 0,
    num_heads: int = 0,
    device: str = "cuda",
) -> Iterator[torch.Tensor]:
    """XLNet with a sequence head, as the transformers Trainer runs it: gradients clipped to 1, then AdamW.

    The source pads each batch to its longest text, cut at 512 tokens; the longest batch is what a peak sees.
    """
    from transformers import XLNetConfig, XLNetForSequenceClassification

    own_layers, own_width, own_heads = XLNET_MODELS[model]
    wide = width or own_width
    config = XLNetConfig(
        n_layer=num_layers or own_layers, d_model=wide, n_head=num_heads or own_heads, d_inner=4 * wide
    )
    network = XLNetForSequenceClassification(config).to(device)
    network.eval()
    example = torch.randint(0, config.vocab_size, (batch_size, num_tokens)).to(device)
    network(example)
    optimizer = torch.optim.AdamW(network.parameters(), lr=5e-5)
    network.train()
    while True:
        batch = {
            "input_ids": torch.randint(0, config.vocab_size, (batch_size, num_tokens)).to(device),
            "token_type_ids": torch.zeros(batch_size, num_tokens, dtype=torch.long).to(device),
            "attention_mask": torch.ones(batch_size, num_tokens, dtype=torch.long).to(device),
            "labels": torch.ones(batch_size, dtype=torch.long).to(device),
        }
        loss = network(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()
