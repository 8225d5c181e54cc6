"""A convolutional classifier for digit-like images with PyTorch Lightning."""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class SyntheticDigits(L.LightningDataModule):
    """28x28 images: a bright blob whose place depends on the class, plus noise."""

    def __init__(self, num_samples, batch_size, num_workers):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(0, 10, (self.hparams.num_samples,), generator=generator)
        images = 0.3 * torch.randn(self.hparams.num_samples, 1, 28, 28, generator=generator)
        for i, label in enumerate(labels.tolist()):
            row, column = 2 + 12 * (label // 5), 1 + 5 * (label % 5)
            images[i, 0, row : row + 8, column : column + 5] += 1.0
        full = TensorDataset(images, labels)
        num_val = self.hparams.num_samples // 8
        self.train_set, self.val_set = random_split(full, [len(full) - num_val, num_val], generator=generator)

    def train_dataloader(self):
        return DataLoader(
            self.train_set, batch_size=self.hparams.batch_size, shuffle=True, num_workers=self.hparams.num_workers
        )

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size, num_workers=self.hparams.num_workers)


class LitClassifier(L.LightningModule):
    def __init__(self, channels=32, learning_rate=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, 2 * channels, 3, padding=1),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(2 * channels * 14 * 14, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, 10),
        )

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", (logits.argmax(dim=1) == y).float().mean(), prog_bar=True)

    def on_train_epoch_end(self):
        metrics = {name: round(value.item(), 4) for name, value in self.trainer.callback_metrics.items()}
        print(f"epoch {self.current_epoch}: {metrics}")

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--max_epochs", type=int, default=2)
    parser.add_argument("--num_samples", type=int, default=4096)
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--accumulate_grad_batches", type=int, default=1)
    parser.add_argument("--save_path", default=None)
    args = parser.parse_args()

    L.seed_everything(42)
    torch.set_float32_matmul_precision("high")
    model = LitClassifier(args.channels, args.learning_rate)
    trainer = L.Trainer(
        accelerator="auto",
        devices=1,
        max_epochs=args.max_epochs,
        precision=args.precision,
        accumulate_grad_batches=args.accumulate_grad_batches,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        log_every_n_steps=5,
    )
    trainer.fit(model, datamodule=SyntheticDigits(args.num_samples, args.batch_size, args.num_workers))
    if args.save_path:
        trainer.save_checkpoint(args.save_path)


if __name__ == "__main__":
    main()
