"""Sequence to sequence with T5 from a config: Adafactor, label smoothing, generate() for evaluation.

The task is to reverse a sequence of tokens.
"""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import Adafactor, T5Config, T5ForConditionalGeneration
from transformers.optimization import AdafactorSchedule

PAD, EOS = 0, 1


class ReverseDataset(Dataset):
    def __init__(self, num_samples, max_length, vocab_size, seed):
        self.rows = []
        g = torch.Generator().manual_seed(seed)
        for _ in range(num_samples):
            length = int(torch.randint(max_length // 2, max_length, (1,), generator=g))
            self.rows.append(torch.randint(3, vocab_size, (length,), generator=g))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        eos = torch.tensor([EOS])
        return torch.cat([self.rows[index], eos]), torch.cat([self.rows[index].flip(0), eos])


def collate(rows):
    sources, targets = zip(*rows)
    input_ids = torch.nn.utils.rnn.pad_sequence(sources, batch_first=True, padding_value=PAD)
    labels = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=-100)
    return {"input_ids": input_ids, "attention_mask": (input_ids != PAD).long(), "labels": labels}


def label_smoothed_loss(logits, labels, epsilon):
    log_probs = -F.log_softmax(logits, dim=-1)
    padding = labels.eq(-100)
    safe = labels.clamp(min=0)
    nll = log_probs.gather(dim=-1, index=safe.unsqueeze(-1)).squeeze(-1)
    smoothed = log_probs.sum(dim=-1, dtype=torch.float32)
    nll.masked_fill_(padding, 0.0)
    smoothed.masked_fill_(padding, 0.0)
    active = padding.numel() - padding.long().sum()
    return (1 - epsilon) * nll.sum() / active + epsilon * smoothed.sum() / (active * logits.shape[-1])


def evaluate(model, loader, device, args):
    model.eval()
    matches, total = 0, 0
    for batch in loader:
        generated = model.generate(
            input_ids=batch["input_ids"].to(device),
            attention_mask=batch["attention_mask"].to(device),
            max_new_tokens=args.max_new_tokens,
            num_beams=args.num_beams,
            do_sample=False,
        )
        for output, label in zip(generated.cpu(), batch["labels"]):
            label = label[label != -100]
            output = output[1 : 1 + len(label)]
            matches += int((output == label[: len(output)]).sum())
            total += len(label)
    model.train()
    return matches / total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--d_model", type=int, default=512)
    parser.add_argument("--d_ff", type=int, default=2048)
    parser.add_argument("--num_layers", type=int, default=6)
    parser.add_argument("--num_heads", type=int, default=8)
    parser.add_argument("--vocab_size", type=int, default=32128)
    parser.add_argument("--max_source_length", type=int, default=256)
    parser.add_argument("--train_batch_size", type=int, default=8)
    parser.add_argument("--eval_batch_size", type=int, default=4)
    parser.add_argument("--num_train_samples", type=int, default=128)
    parser.add_argument("--num_eval_samples", type=int, default=8)
    parser.add_argument("--num_epochs", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=None, help="relative step when not given")
    parser.add_argument("--label_smoothing", type=float, default=0.1)
    parser.add_argument("--num_beams", type=int, default=1)
    parser.add_argument("--max_new_tokens", type=int, default=32)
    parser.add_argument("--output_dir", default="t5-out")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    config = T5Config(
        vocab_size=args.vocab_size,
        d_model=args.d_model,
        d_kv=args.d_model // args.num_heads,
        d_ff=args.d_ff,
        num_layers=args.num_layers,
        num_heads=args.num_heads,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=PAD,
    )
    model = T5ForConditionalGeneration(config).to(device)
    model.train()
    if args.learning_rate is None:
        optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
        scheduler = AdafactorSchedule(optimizer)
    else:
        optimizer = Adafactor(
            model.parameters(), scale_parameter=False, relative_step=False, warmup_init=False, lr=args.learning_rate
        )
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)

    train_data = ReverseDataset(args.num_train_samples, args.max_source_length, args.vocab_size, seed=0)
    eval_data = ReverseDataset(args.num_eval_samples, args.max_source_length, args.vocab_size, seed=1)
    train_loader = DataLoader(train_data, batch_size=args.train_batch_size, shuffle=True, collate_fn=collate)
    eval_loader = DataLoader(eval_data, batch_size=args.eval_batch_size, collate_fn=collate)

    step = 0
    for epoch in range(args.num_epochs):
        for batch in train_loader:
            batch = {k: v.to(device) for k, v in batch.items()}
            outputs = model(**batch)
            if args.label_smoothing == 0:
                loss = outputs.loss
            else:
                loss = label_smoothed_loss(outputs.logits, batch["labels"], args.label_smoothing)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            print(f"step {step} loss {loss.item():.4f}")
        accuracy = evaluate(model, eval_loader, device, args)
        print(f"epoch {epoch} token accuracy {accuracy:.4f}")
        torch.cuda.empty_cache()
    model.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
