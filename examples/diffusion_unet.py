"""Train a diffusion model's U-Net (diffusers) to predict noise, on random images.

Will it fit?   tightfit estimate examples/diffusion_unet.py --device "RTX 3060"
"""

import argparse

import torch
from diffusers import DDPMScheduler, UNet2DModel
from torch.nn import functional

parser = argparse.ArgumentParser()
parser.add_argument("--resolution", type=int, default=64)
parser.add_argument("--channels", type=int, default=128)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--steps", type=int, default=5)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
model = UNet2DModel(
    sample_size=args.resolution,
    block_out_channels=(args.channels, 2 * args.channels),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    norm_num_groups=8,
).to(device)
scheduler = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

for step in range(args.steps):
    images = torch.randn(args.batch_size, 3, args.resolution, args.resolution, device=device)
    noise = torch.randn_like(images)
    timesteps = torch.randint(1000, (args.batch_size,), device=device)
    predicted = model(scheduler.add_noise(images, noise, timesteps), timesteps).sample
    loss = functional.mse_loss(predicted, noise)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.3f}")
