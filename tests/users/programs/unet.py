"""A U-Net for segmentation with AMP and a scaler, a scheduler, loader workers, validation, checkpoints and a log. Tiny."""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Scans(Dataset):
    def __init__(self, count, size):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.randn(1, self.size, self.size), torch.randint(2, (self.size, self.size))


class Block(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down1, self.down2 = Block(1, width), Block(width, 2 * width)
        self.pool, self.up = nn.MaxPool2d(2), nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join, self.head = Block(2 * width, width), nn.Conv2d(width, 2, 1)

    def forward(self, image):
        first = self.down1(image)
        second = self.down2(self.pool(first))
        return self.head(self.join(torch.cat([first, self.up(second)], dim=1)))


def dice(model, loader):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for image, mask in loader:
            found = model(image.cuda()).argmax(1)
            total += (found == mask.cuda()).float().mean().item()
    return total / len(loader)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    args = parser.parse_args()
    args.runs.mkdir(exist_ok=True)
    train = DataLoader(Scans(24, args.size), args.batch_size, shuffle=True, num_workers=2, pin_memory=True)
    valid = DataLoader(Scans(8, args.size), 2 * args.batch_size, num_workers=1)
    model = UNet(16).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    scaler, best = torch.amp.GradScaler("cuda"), 0.0
    for epoch in range(args.epochs):
        model.train()
        for image, mask in train:
            image, mask = image.cuda(non_blocking=True), mask.cuda(non_blocking=True)
            with torch.autocast("cuda", torch.float16):
                loss = nn.functional.cross_entropy(model(image), mask)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        score = dice(model, valid)
        with open(args.runs / "log.jsonl", "a") as log:
            log.write(json.dumps({"epoch": epoch, "loss": loss.item(), "dice": score}) + "\n")
        if score > best:
            best = score
            torch.save({"model": model.state_dict(), "epoch": epoch}, args.runs / "best.pt")


if __name__ == "__main__":
    main()
