"""Train a T5-shaped model with Accelerate and gradient accumulation, on random tokens.

Will it fit?   tightfit estimate examples/accelerate_t5.py --device "RTX 4060"
"""

import argparse

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import T5Config, T5ForConditionalGeneration

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--num-layers", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--sequence-length", type=int, default=512)
parser.add_argument("--steps", type=int, default=10)
args = parser.parse_args()

accelerator = Accelerator(gradient_accumulation_steps=2)
config = T5Config(
    d_model=args.width,
    d_ff=4 * args.width,
    num_layers=args.num_layers,
    num_heads=args.width // 64,
    decoder_start_token_id=0,
)
model = T5ForConditionalGeneration(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
tokens = torch.randint(config.vocab_size, (2 * args.steps * args.batch_size, args.sequence_length))
loader = DataLoader(TensorDataset(tokens), batch_size=args.batch_size)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for (batch,) in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")
