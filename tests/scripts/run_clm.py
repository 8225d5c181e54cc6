"""Train a causal language model from scratch with the Hugging Face Trainer.

$ python run_clm.py --model_type llama --block_size 512 --per_device_train_batch_size 8
"""

import argparse
import logging
import math

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

logger = logging.getLogger(__name__)


class RandomTokenDataset(Dataset):
    def __init__(self, num_samples, block_size, vocab_size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, vocab_size, (num_samples, block_size), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_type", choices=["gpt2", "llama"], default="gpt2")
    parser.add_argument("--num_hidden_layers", type=int, default=12)
    parser.add_argument("--hidden_size", type=int, default=768)
    parser.add_argument("--num_attention_heads", type=int, default=12)
    parser.add_argument("--vocab_size", type=int, default=50257)
    parser.add_argument("--block_size", type=int, default=512)
    parser.add_argument("--num_train_samples", type=int, default=256)
    parser.add_argument("--num_eval_samples", type=int, default=16)
    parser.add_argument("--output_dir", default="clm-output")
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--num_train_epochs", type=float, default=1.0)
    parser.add_argument("--max_steps", type=int, default=-1)
    parser.add_argument("--eval_steps", type=int, default=16)
    parser.add_argument("--warmup_steps", type=int, default=4)
    parser.add_argument("--optim", default="adamw_torch")
    parser.add_argument("--logging_steps", type=int, default=1)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def build_config(args):
    if args.model_type == "gpt2":
        return GPT2Config(
            vocab_size=args.vocab_size,
            n_positions=args.block_size,
            n_embd=args.hidden_size,
            n_layer=args.num_hidden_layers,
            n_head=args.num_attention_heads,
            bos_token_id=args.vocab_size - 1,
            eos_token_id=args.vocab_size - 1,
        )
    return LlamaConfig(
        vocab_size=args.vocab_size,
        max_position_embeddings=args.block_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 8 // 3,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=args.num_attention_heads,
        num_key_value_heads=args.num_attention_heads // 2,
    )


def preprocess_logits_for_metrics(logits, labels):
    if isinstance(logits, tuple):
        logits = logits[0]
    return logits.argmax(dim=-1)


def compute_metrics(eval_preds):
    preds, labels = eval_preds
    return {"accuracy": float((preds[:, :-1] == labels[:, 1:]).mean())}


def main():
    args = parse_args()
    logging.basicConfig(level=logging.INFO)
    set_seed(args.seed)
    model = AutoModelForCausalLM.from_config(build_config(args))
    logger.info("Training new model from scratch, %.1fM parameters", model.num_parameters() / 2**20)

    training_args = TrainingArguments(
        output_dir=args.output_dir,
        per_device_train_batch_size=args.per_device_train_batch_size,
        per_device_eval_batch_size=args.per_device_eval_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        gradient_checkpointing=args.gradient_checkpointing,
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        num_train_epochs=args.num_train_epochs,
        max_steps=args.max_steps,
        warmup_steps=args.warmup_steps,
        lr_scheduler_type="cosine",
        optim=args.optim,
        bf16=torch.cuda.is_available() and torch.cuda.is_bf16_supported(),
        logging_steps=args.logging_steps,
        eval_strategy="steps",
        eval_steps=args.eval_steps,
        save_strategy="no",
        report_to="none",
        seed=args.seed,
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=RandomTokenDataset(args.num_train_samples, args.block_size, args.vocab_size, seed=0),
        eval_dataset=RandomTokenDataset(args.num_eval_samples, args.block_size, args.vocab_size, seed=1),
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    result = trainer.train()
    trainer.log_metrics("train", result.metrics)

    metrics = trainer.evaluate()
    try:
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
    except OverflowError:
        metrics["perplexity"] = float("inf")
    trainer.log_metrics("eval", metrics)


if __name__ == "__main__":
    main()
