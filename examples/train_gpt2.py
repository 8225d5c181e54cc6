"""Train GPT-2 (124M parameters) on synthetic tokens: an ordinary script that knows nothing about tightfit.

On a card:   python examples/train_gpt2.py --batch-size 8
Without one: tightfit estimate examples/train_gpt2.py --device NAME -- --batch-size 8
"""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train GPT-2 from scratch on random tokens.")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per step")
    parser.add_argument("--sequence-length", type=int, default=1024, help="tokens per sequence, at most 1024")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    device = "cuda"

    config = GPT2Config()
    model = GPT2LMHeadModel(config).to(device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, weight_decay=0.1)

    tokens = torch.randint(config.vocab_size, (arguments.steps * arguments.batch_size, arguments.sequence_length))
    loader = DataLoader(TensorDataset(tokens), batch_size=arguments.batch_size, shuffle=True, pin_memory=True)

    for step, (batch,) in enumerate(loader):
        input_ids = batch.to(device, non_blocking=True)
        with torch.autocast(device_type=device, dtype=torch.bfloat16):
            loss = model(input_ids, labels=input_ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step} loss {loss.item():.4f}")

    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB on {torch.cuda.get_device_name()}")


if __name__ == "__main__":
    main()
