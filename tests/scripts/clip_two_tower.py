"""Contrastive image-text pre-training (two towers) on one GPU."""

import argparse
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class ImageTower(nn.Module):
    """A residual CNN with a final projection."""

    def __init__(self, width, embed_dim):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=2, padding=3)
        self.blocks = nn.ModuleList()
        channels = width
        for factor in (1, 2, 4):
            self.blocks.append(
                nn.ModuleDict(
                    {
                        "body": nn.Sequential(
                            nn.Conv2d(channels, width * factor, 3, stride=2, padding=1, bias=False),
                            nn.BatchNorm2d(width * factor),
                            nn.GELU(),
                            nn.Conv2d(width * factor, width * factor, 3, padding=1, bias=False),
                            nn.BatchNorm2d(width * factor),
                        ),
                        "skip": nn.Conv2d(channels, width * factor, 1, stride=2),
                    }
                )
            )
            channels = width * factor
        self.proj = nn.Linear(channels, embed_dim, bias=False)

    def forward(self, images):
        x = self.stem(images)
        for block in self.blocks:
            x = F.gelu(block["body"](x) + block["skip"](x))
        return self.proj(x.mean(dim=(2, 3)))


class TextTower(nn.Module):
    def __init__(self, vocab_size, context_length, width, layers, heads, embed_dim):
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.positional_embedding = nn.Parameter(0.01 * torch.randn(context_length, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.transformer = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(width**-0.5 * torch.randn(width, embed_dim))
        self.register_buffer("attn_mask", torch.full((context_length, context_length), float("-inf")).triu(1))

    def forward(self, text):
        x = self.token_embedding(text) + self.positional_embedding
        x = self.ln_final(self.transformer(x, mask=self.attn_mask))
        # features at the end-of-text token, which has the highest id of each sequence
        x = x[torch.arange(x.shape[0], device=x.device), text.argmax(dim=-1)]
        return x @ self.text_projection


class CLIP(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.visual = ImageTower(args.vision_width, args.embed_dim)
        self.text = TextTower(
            args.vocab_size, args.context_length, args.text_width, args.text_layers, args.text_heads, args.embed_dim
        )
        self.logit_scale = nn.Parameter(torch.ones([]) * np.log(1 / 0.07))

    def forward(self, images, text):
        image_features = F.normalize(self.visual(images), dim=-1)
        text_features = F.normalize(self.text(text), dim=-1)
        return image_features, text_features, self.logit_scale.exp()


class PairedDataset(Dataset):
    """An image of a random colour and a caption whose words are that colour's levels."""

    def __init__(self, args):
        self.args = args

    def __len__(self):
        return self.args.num_samples

    def __getitem__(self, i):
        rng = np.random.default_rng(i)
        levels = rng.integers(0, 8, size=3)
        image = rng.normal(0, 0.1, size=(3, self.args.image_size, self.args.image_size)).astype(np.float32)
        image += (levels[:, None, None] / 8).astype(np.float32)
        caption = np.zeros(self.args.context_length, dtype=np.int64)
        length = int(rng.integers(5, self.args.context_length))
        caption[1 : length - 1] = rng.integers(1, 100, size=length - 2)
        caption[1:4] = 100 + levels + 8 * np.arange(3)
        caption[length - 1] = self.args.vocab_size - 1
        return torch.from_numpy(image), torch.from_numpy(caption)


def clip_loss(image_features, text_features, logit_scale):
    logits_per_image = logit_scale * image_features @ text_features.T
    labels = torch.arange(len(image_features), device=image_features.device)
    loss = (F.cross_entropy(logits_per_image, labels) + F.cross_entropy(logits_per_image.T, labels)) / 2
    return loss, logits_per_image


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    all_images, all_texts = [], []
    for images, texts in loader:
        image_features, text_features, logit_scale = model(images.to(device), texts.to(device))
        all_images.append(image_features.cpu())
        all_texts.append(text_features.cpu())
    logits = torch.cat(all_images) @ torch.cat(all_texts).t()
    ranking = torch.argsort(logits, descending=True)
    truth = torch.arange(len(logits)).view(-1, 1)
    ranks = torch.where(ranking == truth)[1].numpy()
    model.train()
    return {f"R@{k}": float(np.mean(ranks < k)) for k in (1, 5)} | {"median_rank": float(np.median(ranks)) + 1}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--num-samples", type=int, default=1024)
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--vision-width", type=int, default=64)
    parser.add_argument("--embed-dim", type=int, default=512)
    parser.add_argument("--vocab-size", type=int, default=49408)
    parser.add_argument("--context-length", type=int, default=77)
    parser.add_argument("--text-width", type=int, default=512)
    parser.add_argument("--text-layers", type=int, default=6)
    parser.add_argument("--text-heads", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--wd", type=float, default=0.2)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--grad-clip-norm", type=float, default=1.0)
    parser.add_argument("--precision", choices=["amp", "amp_bf16", "fp32"], default="amp_bf16")
    parser.add_argument("--log-every-n-steps", type=int, default=2)
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.cuda.manual_seed_all(0)
    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
        print("device:", torch.cuda.get_device_name(0), torch.cuda.get_device_capability())

    model = CLIP(args).to(device)
    named = list(model.named_parameters())
    no_decay = [p for n, p in named if p.ndim < 2 or "bn" in n or "bias" in n or "logit_scale" in n]
    decay = [p for n, p in named if not (p.ndim < 2 or "bn" in n or "bias" in n or "logit_scale" in n)]
    optimizer = torch.optim.AdamW(
        [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": args.wd}],
        lr=args.lr,
        betas=(0.9, 0.98),
        eps=1e-6,
    )
    loader = DataLoader(PairedDataset(args), batch_size=args.batch_size, shuffle=True, drop_last=True)
    total_steps = len(loader) * args.epochs
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / args.warmup) * 0.5 * (1 + math.cos(math.pi * step / total_steps)),
    )
    scaler = torch.amp.GradScaler(device) if args.precision == "amp" and device == "cuda" else None
    amp_dtype = torch.bfloat16 if args.precision == "amp_bf16" else torch.float16

    for epoch in range(args.epochs):
        for i, (images, texts) in enumerate(loader):
            images = images.to(device, non_blocking=True)
            texts = texts.to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(device, dtype=amp_dtype, enabled=device == "cuda" and args.precision != "fp32"):
                image_features, text_features, logit_scale = model(images, texts)
                loss, logits = clip_loss(image_features, text_features, logit_scale)
            if scaler is not None:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip_norm, norm_type=2.0)
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip_norm, norm_type=2.0)
                optimizer.step()
            scheduler.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, math.log(100))
            if i % args.log_every_n_steps == 0:
                labels = torch.arange(len(logits), device=device)
                acc = (logits.argmax(dim=1) == labels).float().mean().item()
                print(
                    f"Train Epoch: {epoch} [{i}/{len(loader)}] Loss: {loss.item():.4f} Acc: {acc:.3f} "
                    f"Logit Scale: {logit_scale.item():.3f}"
                )
        print(f"Eval Epoch: {epoch}", evaluate(model, loader, device))
    torch.save({"epoch": args.epochs, "state_dict": model.state_dict()}, "clip_latest.pt")


if __name__ == "__main__":
    main()
