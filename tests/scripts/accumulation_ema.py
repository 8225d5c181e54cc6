"""MLP-Mixer with gradient accumulation, an EMA copy, clipping and a plateau scheduler."""

import argparse
import copy
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm


class FeedForward(nn.Sequential):
    def __init__(self, dim, hidden_dim, dropout):
        super().__init__(
            nn.Linear(dim, hidden_dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden_dim, dim), nn.Dropout(dropout)
        )


class MixerBlock(nn.Module):
    def __init__(self, dim, num_patches, token_dim, channel_dim, dropout):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.token_mix = FeedForward(num_patches, token_dim, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.channel_mix = FeedForward(dim, channel_dim, dropout)

    def forward(self, x):
        x = x + self.token_mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mix(self.norm2(x))


class MLPMixer(nn.Module):
    def __init__(self, image_size, patch_size, dim, depth, num_classes, dropout=0.0):
        super().__init__()
        num_patches = (image_size // patch_size) ** 2
        self.patch_embed = nn.Conv2d(3, dim, patch_size, patch_size)
        self.blocks = nn.Sequential(
            *[MixerBlock(dim, num_patches, dim // 2, dim * 4, dropout) for _ in range(depth)]
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


class EMA:
    """Keep a slow copy of the weights."""

    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for ema_value, value in zip(self.module.state_dict().values(), model.state_dict().values()):
            if ema_value.dtype.is_floating_point:
                ema_value.mul_(self.decay).add_(value, alpha=1 - self.decay)
            else:
                ema_value.copy_(value)


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def make_data(num_images, image_size, num_classes):
    labels = torch.randint(0, num_classes, (num_images,))
    prototypes = torch.randn(num_classes, 3, image_size, image_size)
    return TensorDataset(prototypes[labels] + torch.randn(num_images, 3, image_size, image_size), labels)


@torch.no_grad()
def validate(model, loader, criterion, device):
    model.eval()
    loss_sum, correct, total = 0.0, 0, 0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        out = model(x)
        loss_sum += criterion(out, y).item() * x.size(0)
        correct += (out.argmax(1) == y).sum().item()
        total += x.size(0)
    return loss_sum / total, correct / total


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--image_size", type=int, default=224)
    ap.add_argument("--patch_size", type=int, default=16)
    ap.add_argument("--dim", type=int, default=512)
    ap.add_argument("--depth", type=int, default=8)
    ap.add_argument("--num_classes", type=int, default=10)
    ap.add_argument("--num_images", type=int, default=256)
    ap.add_argument("--batch_size", type=int, default=16)
    ap.add_argument("--accumulation_steps", type=int, default=4)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--momentum", type=float, default=0.9)
    ap.add_argument("--ema_decay", type=float, default=0.99)
    ap.add_argument("--checkpoint", default="best.pt")
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    set_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    data = make_data(args.num_images, args.image_size, args.num_classes)
    split = len(data) * 7 // 8
    train_set = torch.utils.data.Subset(data, range(split))
    val_set = torch.utils.data.Subset(data, range(split, len(data)))
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=2 * args.batch_size)

    model = MLPMixer(args.image_size, args.patch_size, args.dim, args.depth, args.num_classes).to(device)
    ema = EMA(model, args.ema_decay)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum, nesterov=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)

    best = float("inf")
    history = []
    for epoch in range(args.epochs):
        model.train()
        optimizer.zero_grad()
        pbar = tqdm(train_loader, desc=f"epoch {epoch}")
        for step, (x, y) in enumerate(pbar):
            x, y = x.to(device), y.to(device)
            loss = criterion(model(x), y) / args.accumulation_steps
            loss.backward()
            if (step + 1) % args.accumulation_steps == 0 or step + 1 == len(train_loader):
                grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                ema.update(model)
                pbar.set_postfix(grad_norm=f"{grad_norm.item():.2f}")
            history.append(loss.item() * args.accumulation_steps)
        val_loss, val_acc = validate(ema.module, val_loader, criterion, device)
        scheduler.step(val_loss)
        print(f"epoch {epoch} train loss {np.mean(history):.4f} val loss {val_loss:.4f} val acc {val_acc:.3f}")
        if val_loss < best:
            best = val_loss
            torch.save({"model": model.state_dict(), "ema": ema.module.state_dict()}, args.checkpoint)

    state = torch.load(args.checkpoint, map_location=device)
    model.load_state_dict(state["ema"])
    print("best val loss", validate(model, val_loader, criterion, device)[0])
    if device == "cuda":
        print(f"peak memory {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
