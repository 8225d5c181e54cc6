"""The training loops behind the RTX 3060 and RTX 4060 measurements (source: Stone-ResearchLife/xMem).

Random weights, float32, eager, default attention, learning rate 1e-3, optimizer defaults of torch, StepLR, four full
steps. Gradients are cleared at the start of a step (0), after the forward pass (1) or after the optimizer (2), and a
step's outputs stay alive until the next forward pass has returned. Image models are moved to the card before their
optimizer is made, language models after.
"""

from collections.abc import Iterator

import torch

from benchmarks.workloads import torchvision_without_kernels

ZERO_AT_START, ZERO_AFTER_FORWARD, ZERO_AFTER_STEP = 0, 1, 2
IMAGE_MODELS = {
    "ConvNeXtTiny": "convnext_tiny",
    "MobileNetV2": "mobilenet_v2",
    "ResNet101": "resnet101",
    "VGG16": "vgg16",
}


def train_images(
    *,
    model: str = "MobileNetV2",
    batch_size: int = 200,
    optimizer: str = "AdamW",
    zero_grad: int = ZERO_AT_START,
    image_size: int = 86,
    device: str = "cuda",
) -> Iterator[torch.Tensor]:
    """A torchvision classifier of 1000 classes on `batch_size` images of 3 x `image_size` x `image_size`."""
    network = getattr(torchvision_without_kernels.models(), IMAGE_MODELS[model])(num_classes=1000)
    network.to(device)
    network.train()
    chosen = getattr(torch.optim, optimizer)(network.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(chosen, step_size=30)
    criterion = torch.nn.CrossEntropyLoss()
    while True:
        images = torch.randn(batch_size, 3, image_size, image_size).to(device)
        labels = torch.randint(0, 1000, (batch_size,)).to(device)
        if zero_grad == ZERO_AT_START:
            chosen.zero_grad()
        outputs = network(images)
        if zero_grad == ZERO_AFTER_FORWARD:
            chosen.zero_grad()
        loss = criterion(outputs, labels)
        loss.backward()
        chosen.step()
        schedule.step()
        if zero_grad == ZERO_AFTER_STEP:
            chosen.zero_grad()
        torch.max(outputs, 1)
        yield loss


def train_language_model(
    *,
    num_layers: int = 6,
    width: int = 768,
    num_heads: int = 12,
    batch_size: int = 10,
    num_tokens: int = 128,
    optimizer: str = "AdamW",
    zero_grad: int = ZERO_AT_START,
    device: str = "cuda",
) -> Iterator[torch.Tensor]:
    """GPT-2 with the sizes of distilbert/distilgpt2 (config.json of that model: n_layer 6, the rest as GPT-2 small)."""
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(n_layer=num_layers, n_embd=width, n_head=num_heads)
    network = AutoModelForCausalLM.from_config(config)
    chosen = getattr(torch.optim, optimizer)(network.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(chosen, step_size=30)
    network.to(device)
    network.train()
    while True:
        tokens = torch.randint(0, config.vocab_size, (batch_size, num_tokens)).to(device)
        mask = torch.ones(batch_size, num_tokens, dtype=torch.long).to(device)
        labels = tokens.clone()
        if zero_grad == ZERO_AT_START:
            chosen.zero_grad()
        outputs = network(input_ids=tokens, attention_mask=mask, labels=labels)
        if zero_grad == ZERO_AFTER_FORWARD:
            chosen.zero_grad()
        loss = outputs.loss
        loss.backward()
        chosen.step()
        schedule.step()
        if zero_grad == ZERO_AFTER_STEP:
            chosen.zero_grad()
        yield loss
