"""Train a vision transformer with PyTorch Lightning, on random images.

Will it fit?         tightfit estimate examples/lightning_vit.py --device "RTX 3060"
The largest batch?   tightfit plan examples/lightning_vit.py --device "RTX 3060" --search batch-size
"""

import argparse

import lightning
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class VisionTransformer(lightning.LightningModule):
    def __init__(self, image_size: int, width: int, depth: int, num_classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=16, stride=16)
        self.positions = nn.Parameter(torch.zeros(1, (image_size // 16) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.blocks(tokens).mean(dim=1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(self(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    num_images = args.steps * args.batch_size
    images = torch.randn(num_images, 3, args.image_size, args.image_size)
    loader = DataLoader(TensorDataset(images, torch.randint(1000, (num_images,))), batch_size=args.batch_size)
    model = VisionTransformer(args.image_size, args.width, args.depth)
    trainer = lightning.Trainer(
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)


if __name__ == "__main__":
    main()
