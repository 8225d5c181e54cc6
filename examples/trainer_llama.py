"""Fine-tune a Llama-shaped model with the Hugging Face Trainer, on random tokens.

Will it fit?   tightfit estimate examples/trainer_llama.py --device "RTX 4090"
Make it fit:   tightfit plan examples/trainer_llama.py --device "RTX 4090" -o plan.json
               tightfit run --plan plan.json examples/trainer_llama.py
"""

import argparse
import tempfile

import torch
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def collate(rows):
    input_ids = torch.stack([row for (row,) in rows])
    return {"input_ids": input_ids, "labels": input_ids}


parser = argparse.ArgumentParser()
parser.add_argument("--hidden-size", type=int, default=2048)
parser.add_argument("--num-layers", type=int, default=16)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--sequence-length", type=int, default=2048)
parser.add_argument("--steps", type=int, default=10)
args = parser.parse_args()

config = LlamaConfig(
    hidden_size=args.hidden_size,
    intermediate_size=4 * args.hidden_size,
    num_hidden_layers=args.num_layers,
    num_attention_heads=args.hidden_size // 64,
    num_key_value_heads=max(1, args.hidden_size // 256),
    vocab_size=32_000,
)
tokens = torch.randint(config.vocab_size, (args.steps * args.batch_size, args.sequence_length))
with tempfile.TemporaryDirectory() as folder:
    Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=args.batch_size,
            max_steps=args.steps,
            bf16=torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=TensorDataset(tokens),
        data_collator=collate,
    ).train()
