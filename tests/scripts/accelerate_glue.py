"""Sentence-pair classification with BERT and a hand-written Accelerate loop (MRPC-like data, made up here)."""

import argparse
import random

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

CLS, SEP, PAD = 101, 102, 0


class SyntheticPairs(Dataset):
    """Two sentences; the label says whether the second one paraphrases (repeats words of) the first."""

    def __init__(self, num_samples, vocab_size, max_length, seed):
        rng = random.Random(seed)
        self.samples = []
        for _ in range(num_samples):
            half = max_length // 2 - 2
            first = [rng.randrange(110, vocab_size) for _ in range(rng.randint(half // 3, half))]
            label = rng.randint(0, 1)
            second = list(first) if label else [rng.randrange(110, vocab_size) for _ in first]
            rng.shuffle(second)
            self.samples.append((first, second, label))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        first, second, label = self.samples[index]
        input_ids = [CLS, *first, SEP, *second, SEP]
        token_type_ids = [0] * (len(first) + 2) + [1] * (len(second) + 1)
        return {"input_ids": input_ids, "token_type_ids": token_type_ids, "labels": label}


def collate_fn(examples):
    """Pad to the longest sample of the batch, so that every batch has its own width."""
    longest = max(len(e["input_ids"]) for e in examples)
    batch = {"input_ids": [], "token_type_ids": [], "attention_mask": []}
    for e in examples:
        missing = longest - len(e["input_ids"])
        batch["input_ids"].append(e["input_ids"] + [PAD] * missing)
        batch["token_type_ids"].append(e["token_type_ids"] + [0] * missing)
        batch["attention_mask"].append([1] * len(e["input_ids"]) + [0] * missing)
    batch = {name: torch.tensor(values) for name, values in batch.items()}
    batch["labels"] = torch.tensor([e["labels"] for e in examples])
    return batch


def training_function(args):
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
    )
    set_seed(args.seed)
    config = BertConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=args.num_attention_heads,
        intermediate_size=4 * args.hidden_size,
        num_labels=2,
    )
    model = BertForSequenceClassification(config)
    model = model.to(accelerator.device)

    train_data = SyntheticPairs(args.num_train_samples, args.vocab_size, args.max_length, seed=0)
    eval_data = SyntheticPairs(args.num_eval_samples, args.vocab_size, args.max_length, seed=1)
    train_dataloader = DataLoader(
        train_data, shuffle=True, collate_fn=collate_fn, batch_size=args.batch_size, drop_last=True
    )
    eval_dataloader = DataLoader(eval_data, shuffle=False, collate_fn=collate_fn, batch_size=args.eval_batch_size)

    no_decay = ("bias", "LayerNorm.weight")
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if not n.endswith(no_decay)],
            "weight_decay": args.weight_decay,
        },
        {"params": [p for n, p in model.named_parameters() if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate)
    num_steps = len(train_dataloader) * args.num_epochs // args.gradient_accumulation_steps
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=min(100, num_steps // 10), num_training_steps=num_steps
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(args.num_epochs):
        model.train()
        total_loss = 0.0
        for step, batch in enumerate(train_dataloader):
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                total_loss += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: train loss {total_loss.item() / len(train_dataloader):.4f}")

        model.eval()
        true_positives = false_positives = false_negatives = correct = seen = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            true_positives += int(((predictions == 1) & (references == 1)).sum())
            false_positives += int(((predictions == 1) & (references == 0)).sum())
            false_negatives += int(((predictions == 0) & (references == 1)).sum())
            correct += (predictions == references).sum().item()
            seen += references.shape[0]
        f1 = 2 * true_positives / max(1, 2 * true_positives + false_positives + false_negatives)
        accelerator.print(f"epoch {epoch}: accuracy {correct / seen:.4f}, f1 {f1:.4f}")

    if args.output_dir is not None:
        accelerator.wait_for_everyone()
        accelerator.unwrap_model(model).save_pretrained(
            args.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
        )
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description="Simple example of a training script.")
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--cpu", action="store_true", help="If passed, will train on the CPU.")
    parser.add_argument("--vocab_size", type=int, default=30522)
    parser.add_argument("--hidden_size", type=int, default=768)
    parser.add_argument("--num_hidden_layers", type=int, default=12)
    parser.add_argument("--num_attention_heads", type=int, default=12)
    parser.add_argument("--max_length", type=int, default=128)
    parser.add_argument("--num_train_samples", type=int, default=512)
    parser.add_argument("--num_eval_samples", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--eval_batch_size", type=int, default=32)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output_dir", default=None)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
