"""Train an unconditional DDPM on small images with diffusers."""

import argparse
import os

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm


class Circles(Dataset):
    """Images of one coloured disc each, in [-1, 1]."""

    def __init__(self, num_images, resolution):
        self.num_images, self.resolution = num_images, resolution

    def __len__(self):
        return self.num_images

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        cx, cy, radius, r, g, b = torch.rand(6, generator=generator).tolist()
        axis = torch.linspace(0, 1, self.resolution)
        inside = ((axis[None, :] - cx) ** 2 + (axis[:, None] - cy) ** 2 < (0.1 + 0.3 * radius) ** 2).float()
        return {"images": torch.stack([inside * c for c in (r, g, b)]) * 2 - 1}


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resolution", type=int, default=64)
    parser.add_argument("--block_out_channels", type=int, nargs="+", default=[64, 128, 256, 256])
    parser.add_argument("--layers_per_block", type=int, default=2)
    parser.add_argument("--norm_num_groups", type=int, default=32)
    parser.add_argument("--num_images", type=int, default=512)
    parser.add_argument("--train_batch_size", type=int, default=16)
    parser.add_argument("--eval_batch_size", type=int, default=4)
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--lr_warmup_steps", type=int, default=10)
    parser.add_argument("--ddpm_num_steps", type=int, default=1000)
    parser.add_argument("--num_inference_steps", type=int, default=20)
    parser.add_argument("--prediction_type", default="epsilon", choices=["epsilon", "sample"])
    parser.add_argument("--use_ema", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--ema_max_decay", type=float, default=0.9999)
    parser.add_argument("--output_dir", default="ddpm-model")
    return parser.parse_args()


@torch.no_grad()
def sample(model, scheduler, args, device):
    images = torch.randn(args.eval_batch_size, 3, args.resolution, args.resolution, device=device)
    scheduler.set_timesteps(args.num_inference_steps)
    for t in scheduler.timesteps:
        images = scheduler.step(model(images, t).sample, t, images).prev_sample
    return ((images / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()


def main():
    args = parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.benchmark = True

    num_blocks = len(args.block_out_channels)
    model = UNet2DModel(
        sample_size=args.resolution,
        in_channels=3,
        out_channels=3,
        layers_per_block=args.layers_per_block,
        norm_num_groups=args.norm_num_groups,
        block_out_channels=tuple(args.block_out_channels),
        down_block_types=("DownBlock2D",) * (num_blocks - 1) + ("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * (num_blocks - 1),
    ).to(device)
    ema_model = None
    if args.use_ema:
        ema_model = EMAModel(
            model.parameters(),
            decay=args.ema_max_decay,
            use_ema_warmup=True,
            model_cls=UNet2DModel,
            model_config=model.config,
        )
        ema_model.to(device)
    noise_scheduler = DDPMScheduler(
        num_train_timesteps=args.ddpm_num_steps, beta_schedule="squaredcos_cap_v2", prediction_type=args.prediction_type
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.95, 0.999), weight_decay=1e-6)
    dataloader = DataLoader(
        Circles(args.num_images, args.resolution), batch_size=args.train_batch_size, shuffle=True, drop_last=True
    )
    lr_scheduler = get_cosine_schedule_with_warmup(optimizer, args.lr_warmup_steps, len(dataloader) * args.num_epochs)
    scaler = torch.amp.GradScaler(device, enabled=device == "cuda")

    global_step = 0
    for epoch in range(args.num_epochs):
        model.train()
        progress_bar = tqdm(total=len(dataloader), desc=f"Epoch {epoch}")
        for batch in dataloader:
            clean_images = batch["images"].to(device)
            noise = torch.randn_like(clean_images)
            timesteps = torch.randint(
                0, noise_scheduler.config.num_train_timesteps, (clean_images.shape[0],), device=device
            ).long()
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
            with torch.autocast(device_type=device, dtype=torch.float16, enabled=device == "cuda"):
                model_output = model(noisy_images, timesteps).sample
                target = noise if args.prediction_type == "epsilon" else clean_images
                loss = F.mse_loss(model_output.float(), target.float())
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            lr_scheduler.step()
            if ema_model is not None:
                ema_model.step(model.parameters())
            global_step += 1
            progress_bar.update(1)
            progress_bar.set_postfix(loss=loss.detach().item(), lr=lr_scheduler.get_last_lr()[0], step=global_step)
        progress_bar.close()
        print(f"epoch {epoch} loss {loss.item():.5f}")

        model.eval()
        if ema_model is not None:
            ema_model.store(model.parameters())
            ema_model.copy_to(model.parameters())
        images = sample(model, noise_scheduler, args, device)
        print("sampled", images.shape, images.mean())
        if ema_model is not None:
            ema_model.restore(model.parameters())

    os.makedirs(args.output_dir, exist_ok=True)
    model.save_pretrained(os.path.join(args.output_dir, "unet"))


if __name__ == "__main__":
    main()
