"""Binary and multi-class segmentation with a U-Net: Dice + cross entropy, AMP, channels_last."""

import argparse
import logging
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.utils.data import DataLoader, Dataset, random_split
from tqdm import tqdm


class DoubleConv(nn.Module):
    """(convolution => BN => ReLU) twice"""

    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class Up(nn.Module):
    def __init__(self, in_channels, out_channels, bilinear):
        super().__init__()
        if bilinear:
            self.up = nn.Sequential(
                nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
                nn.Conv2d(in_channels, in_channels // 2, kernel_size=1),
            )
        else:
            self.up = nn.ConvTranspose2d(in_channels, in_channels // 2, kernel_size=2, stride=2)
        self.conv = DoubleConv(in_channels, out_channels)

    def forward(self, x, skip):
        x = self.up(x)
        dy, dx = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
        x = F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.conv(torch.cat([skip, x], dim=1))


class UNet(nn.Module):
    def __init__(self, n_channels, n_classes, width=64, depth=4, bilinear=False):
        super().__init__()
        self.n_classes = n_classes
        self.inc = DoubleConv(n_channels, width)
        self.downs = nn.ModuleList(
            [nn.Sequential(nn.MaxPool2d(2), DoubleConv(width * 2**i, width * 2 ** (i + 1))) for i in range(depth)]
        )
        self.ups = nn.ModuleList(
            [Up(width * 2 ** (i + 1), width * 2**i, bilinear) for i in reversed(range(depth))]
        )
        self.outc = nn.Conv2d(width, n_classes, kernel_size=1)

    def forward(self, x):
        features = [self.inc(x)]
        for down in self.downs:
            features.append(down(features[-1]))
        x = features.pop()
        for up in self.ups:
            x = up(x, features.pop())
        return self.outc(x)


class Shapes(Dataset):
    """Rectangles of a few classes on a noisy background."""

    def __init__(self, num_images, size, n_classes):
        self.num_images, self.size, self.n_classes = num_images, size, n_classes

    def __len__(self):
        return self.num_images

    def __getitem__(self, idx):
        g = torch.Generator().manual_seed(idx)
        image = 0.2 * torch.randn(3, self.size, self.size, generator=g)
        mask = torch.zeros(self.size, self.size, dtype=torch.long)
        for label in range(1, self.n_classes):
            y, x = torch.randint(0, self.size // 2, (2,), generator=g).tolist()
            h, w = torch.randint(self.size // 8, self.size // 2, (2,), generator=g).tolist()
            mask[y : y + h, x : x + w] = label
        for channel in range(3):
            image[channel] += ((mask >> channel) & 1).float() + 0.1 * mask
        return {"image": image, "mask": mask}


def dice_coeff(inputs, target, epsilon=1e-6):
    inter = 2 * (inputs * target).sum(dim=(-1, -2))
    sets_sum = inputs.sum(dim=(-1, -2)) + target.sum(dim=(-1, -2))
    sets_sum = torch.where(sets_sum == 0, inter, sets_sum)
    return ((inter + epsilon) / (sets_sum + epsilon)).mean()


def dice_loss(logits, target, n_classes):
    one_hot = F.one_hot(target, n_classes).permute(0, 3, 1, 2).float()
    return 1 - dice_coeff(F.softmax(logits, dim=1).float(), one_hot)


@torch.inference_mode()
def evaluate(net, dataloader, device, amp):
    net.eval()
    score = 0.0
    with torch.autocast(device.type if device.type != "mps" else "cpu", enabled=amp):
        for batch in tqdm(dataloader, desc="Validation round", unit="batch", leave=False):
            image = batch["image"].to(device=device, dtype=torch.float32, memory_format=torch.channels_last)
            mask_true = batch["mask"].to(device=device, dtype=torch.long)
            mask_pred = net(image).argmax(dim=1)
            pred = F.one_hot(mask_pred, args.classes).permute(0, 3, 1, 2).float()
            true = F.one_hot(mask_true, args.classes).permute(0, 3, 1, 2).float()
            score += dice_coeff(pred[:, 1:], true[:, 1:])
    net.train()
    return score / max(len(dataloader), 1)


def train_model(model, device, args):
    dataset = Shapes(args.num_images, args.image_size, args.classes)
    n_val = max(1, int(len(dataset) * args.validation / 100))
    train_set, val_set = random_split(
        dataset, [len(dataset) - n_val, n_val], generator=torch.Generator().manual_seed(0)
    )
    loader_args = dict(batch_size=args.batch_size, num_workers=2, pin_memory=torch.cuda.is_available())
    train_loader = DataLoader(train_set, shuffle=True, **loader_args)
    val_loader = DataLoader(val_set, shuffle=False, drop_last=False, **loader_args)

    optimizer = optim.RMSprop(model.parameters(), lr=args.lr, weight_decay=1e-8, momentum=0.9, foreach=True)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    grad_scaler = torch.amp.GradScaler(device.type, enabled=args.amp)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(1, args.epochs + 1):
        model.train()
        epoch_loss = 0.0
        with tqdm(total=len(train_set), desc=f"Epoch {epoch}/{args.epochs}", unit="img") as pbar:
            for batch in train_loader:
                images, true_masks = batch["image"], batch["mask"]
                images = images.to(device=device, dtype=torch.float32, memory_format=torch.channels_last)
                true_masks = true_masks.to(device=device, dtype=torch.long)
                with torch.autocast(device.type if device.type != "mps" else "cpu", enabled=args.amp):
                    masks_pred = model(images)
                    loss = criterion(masks_pred, true_masks)
                    loss += dice_loss(masks_pred, true_masks, args.classes)
                optimizer.zero_grad(set_to_none=True)
                grad_scaler.scale(loss).backward()
                grad_scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                grad_scaler.step(optimizer)
                grad_scaler.update()
                pbar.update(images.shape[0])
                epoch_loss += loss.item()
                pbar.set_postfix(**{"loss (batch)": loss.item()})
        val_score = evaluate(model, val_loader, device, args.amp)
        scheduler.step(val_score)
        print(f"epoch {epoch} loss {epoch_loss / len(train_loader):.4f} validation dice {val_score:.4f}")
        Path(args.checkpoints).mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), str(Path(args.checkpoints) / f"checkpoint_epoch{epoch}.pth"))


def get_args():
    parser = argparse.ArgumentParser(description="Train the UNet on images and target masks")
    parser.add_argument("--epochs", "-e", type=int, default=2)
    parser.add_argument("--batch-size", "-b", dest="batch_size", type=int, default=4)
    parser.add_argument("--learning-rate", "-l", type=float, default=1e-4, dest="lr")
    parser.add_argument("--load", "-f", type=str, default=None, help="Load model from a .pth file")
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--num-images", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--validation", "-v", type=float, default=10.0, help="percent used as validation (0-100)")
    parser.add_argument("--amp", action="store_true", default=False, help="Use mixed precision")
    parser.add_argument("--bilinear", action="store_true", default=False)
    parser.add_argument("--classes", "-c", type=int, default=3)
    parser.add_argument("--checkpoints", default="checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    args = get_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logging.info(f"Using device {device}")
    model = UNet(3, args.classes, args.width, args.depth, args.bilinear)
    model = model.to(memory_format=torch.channels_last)
    if args.load:
        model.load_state_dict(torch.load(args.load, map_location=device))
    model.to(device=device)
    if torch.cuda.device_count() > 1:
        model = nn.DataParallel(model)
    try:
        train_model(model, device, args)
    except torch.cuda.OutOfMemoryError:
        logging.error("Detected OutOfMemoryError! Try --amp or a smaller --batch-size.")
        torch.cuda.empty_cache()
        raise
