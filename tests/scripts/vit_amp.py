"""Vision transformer with AMP, CutMix, label smoothing and optional activation checkpointing."""

import argparse
import time

import numpy as np
import torch
import torch.nn as nn
from torch.cuda.amp import GradScaler, autocast
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset


class Stripes(Dataset):
    """Classes are stripe directions and widths."""

    def __init__(self, length, size, num_classes, train):
        self.length, self.size, self.num_classes, self.train = length, size, num_classes, train

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        rng = np.random.default_rng(index + (0 if self.train else 10**6))
        label = int(rng.integers(self.num_classes))
        angle = np.pi * label / self.num_classes
        yy, xx = np.mgrid[0 : self.size, 0 : self.size]
        wave = np.sin((np.cos(angle) * xx + np.sin(angle) * yy) * 0.8 + rng.uniform(0, 6))
        image = wave[None].repeat(3, axis=0) + rng.normal(0, 0.3, (3, self.size, self.size))
        return torch.tensor(image, dtype=torch.float32), label


class ViT(nn.Module):
    def __init__(self, image_size, patch_size, dim, depth, heads, mlp_dim, num_classes, dropout, use_checkpoint):
        super().__init__()
        assert image_size % patch_size == 0
        num_patches = (image_size // patch_size) ** 2
        self.use_checkpoint = use_checkpoint
        self.patch_size = patch_size
        self.to_patch = nn.Linear(3 * patch_size**2, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, num_patches + 1, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(
            dim, heads, mlp_dim, dropout=dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.pool = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def patchify(self, images):
        b, c, h, w = images.shape
        p = self.patch_size
        x = images.reshape(b, c, h // p, p, w // p, p).permute(0, 2, 4, 3, 5, 1)
        return x.reshape(b, (h // p) * (w // p), p * p * c)

    def forward(self, images):
        x = self.to_patch(self.patchify(images))
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        for layer in self.encoder.layers:
            if self.use_checkpoint and self.training:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        x = self.norm(x)
        pooled, _ = self.pool(x[:, :1], x, x, need_weights=False)
        return self.head(pooled.squeeze(1))


def rand_bbox(height, width, lam):
    cut = np.sqrt(1.0 - lam)
    cut_h, cut_w = int(height * cut), int(width * cut)
    cy, cx = np.random.randint(height), np.random.randint(width)
    y1, y2 = np.clip([cy - cut_h // 2, cy + cut_h // 2], 0, height)
    x1, x2 = np.clip([cx - cut_w // 2, cx + cut_w // 2], 0, width)
    return y1, y2, x1, x2


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(1, self.count)


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0).mul_(100.0 / target.size(0)).item() for k in topk]


def train(loader, model, criterion, optimizer, scheduler, scaler, epoch, device, args):
    losses = AverageMeter()
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(loader):
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        with autocast(enabled=args.amp):
            if np.random.rand() < args.cutmix_prob:
                lam = np.random.beta(args.beta, args.beta)
                rand_index = torch.randperm(images.size(0)).to(device)
                y1, y2, x1, x2 = rand_bbox(images.size(2), images.size(3), lam)
                images[:, :, y1:y2, x1:x2] = images[rand_index, :, y1:y2, x1:x2]
                lam = 1 - (y2 - y1) * (x2 - x1) / (images.size(-1) * images.size(-2))
                output = model(images)
                loss = criterion(output, target) * lam + criterion(output, target[rand_index]) * (1.0 - lam)
            else:
                output = model(images)
                loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        if i % args.print_freq == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            top1 = accuracy(output, target)[0]
            print(f"Epoch [{epoch}][{i}/{len(loader)}] Loss {losses.avg:.4f} Acc@1 {top1:.2f} Time {time.time() - end:.3f}")
            end = time.time()


@torch.no_grad()
def validate(loader, model, device):
    model.eval()
    top1, top5 = AverageMeter(), AverageMeter()
    for images, target in loader:
        images, target = images.to(device), target.to(device)
        acc1, acc5 = accuracy(model(images), target, topk=(1, 5))
        top1.update(acc1, images.size(0))
        top5.update(acc5, images.size(0))
    print(f" * Acc@1 {top1.avg:.3f} Acc@5 {top5.avg:.3f}")
    return top1.avg


def main():
    parser = argparse.ArgumentParser(description="ViT training")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--patch-size", type=int, default=16)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--mlp-dim", type=int, default=1536)
    parser.add_argument("--num-classes", type=int, default=100)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("-b", "--batch-size", type=int, default=32)
    parser.add_argument("-j", "--workers", type=int, default=0)
    parser.add_argument("--train-images", type=int, default=512)
    parser.add_argument("--val-images", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--cutmix-prob", type=float, default=0.5)
    parser.add_argument("--beta", type=float, default=1.0)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--checkpointing", action="store_true", help="trade compute for activation memory")
    parser.add_argument("--resume", default="", help="path to latest checkpoint")
    parser.add_argument("-p", "--print-freq", type=int, default=2)
    args = parser.parse_args()

    np.random.seed(0)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        props = torch.cuda.get_device_properties(0)
        print(f"GPU: {torch.cuda.get_device_name()} with {props.total_memory / 2**30:.1f} GiB")
        torch.backends.cudnn.benchmark = True

    model = ViT(
        args.image_size,
        args.patch_size,
        args.dim,
        args.depth,
        args.heads,
        args.mlp_dim,
        args.num_classes,
        args.dropout,
        args.checkpointing,
    ).to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=args.label_smoothing).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    train_set = Stripes(args.train_images, args.image_size, args.num_classes, train=True)
    val_set = Stripes(args.val_images, args.image_size, args.num_classes, train=False)
    pin = device == "cuda"
    train_loader = DataLoader(
        train_set, args.batch_size, shuffle=True, num_workers=args.workers, pin_memory=pin, drop_last=True
    )
    val_loader = DataLoader(val_set, args.batch_size, num_workers=args.workers, pin_memory=pin)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, total_steps=args.epochs * len(train_loader)
    )
    scaler = GradScaler(enabled=args.amp)
    start_epoch, best_acc1 = 0, 0.0
    if args.resume:
        state = torch.load(args.resume, map_location=device)
        start_epoch, best_acc1 = state["epoch"], state["best_acc1"]
        model.load_state_dict(state["state_dict"])
        optimizer.load_state_dict(state["optimizer"])

    for epoch in range(start_epoch, args.epochs):
        train(train_loader, model, criterion, optimizer, scheduler, scaler, epoch, device, args)
        acc1 = validate(val_loader, model, device)
        best_acc1 = max(acc1, best_acc1)
        torch.save(
            {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "best_acc1": best_acc1,
                "optimizer": optimizer.state_dict(),
            },
            "checkpoint.pth.tar",
        )


if __name__ == "__main__":
    main()
