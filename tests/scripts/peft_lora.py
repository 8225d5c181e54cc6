"""Fine-tune a Llama-style model with LoRA adapters in bf16, with gradient checkpointing."""

import argparse
import time

import torch
from peft import LoraConfig, TaskType, get_peft_model, get_peft_model_state_dict
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup


class InstructionDataset(Dataset):
    """A prompt whose loss is masked out and an answer that repeats it, as token ids."""

    def __init__(self, num_samples, max_seq_length, vocab_size):
        generator = torch.Generator().manual_seed(3)
        half = max_seq_length // 2
        prompt = torch.randint(3, vocab_size, (num_samples, half), generator=generator)
        self.input_ids = torch.cat([prompt, prompt], dim=1)
        self.labels = self.input_ids.clone()
        self.labels[:, :half] = -100

    def __len__(self):
        return len(self.input_ids)

    def __getitem__(self, index):
        return {"input_ids": self.input_ids[index], "labels": self.labels[index]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden_size", type=int, default=1024)
    parser.add_argument("--intermediate_size", type=int, default=2816)
    parser.add_argument("--num_hidden_layers", type=int, default=8)
    parser.add_argument("--num_attention_heads", type=int, default=16)
    parser.add_argument("--num_key_value_heads", type=int, default=4)
    parser.add_argument("--vocab_size", type=int, default=32000)
    parser.add_argument("--max_seq_length", type=int, default=512)
    parser.add_argument("--lora_r", type=int, default=16)
    parser.add_argument("--lora_alpha", type=int, default=32)
    parser.add_argument("--lora_dropout", type=float, default=0.05)
    parser.add_argument("--target_modules", nargs="+", default=["q_proj", "k_proj", "v_proj", "o_proj"])
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--no_gradient_checkpointing", action="store_true")
    parser.add_argument("--learning_rate", type=float, default=2e-4)
    parser.add_argument("--num_samples", type=int, default=128)
    parser.add_argument("--num_epochs", type=int, default=1)
    parser.add_argument("--adapter_path", default="adapter.pt")
    args = parser.parse_args()

    torch.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
        print(f"Using {torch.cuda.get_device_name(0)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.num_hidden_layers,
        num_attention_heads=args.num_attention_heads,
        num_key_value_heads=args.num_key_value_heads,
        max_position_embeddings=args.max_seq_length,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    if not args.no_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    peft_config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=args.target_modules,
        bias="none",
    )
    model = get_peft_model(model, peft_config)
    model.print_trainable_parameters()
    model.to(device)

    loader = DataLoader(
        InstructionDataset(args.num_samples, args.max_seq_length, args.vocab_size),
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
    )
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=args.learning_rate, weight_decay=0.0)
    total_steps = max(1, args.num_epochs * len(loader) // args.gradient_accumulation_steps)
    scheduler = get_cosine_schedule_with_warmup(optimizer, int(0.03 * total_steps), total_steps)

    model.train()
    started = time.time()
    for epoch in range(args.num_epochs):
        running = 0.0
        for step, batch in enumerate(loader):
            batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
            loss = model(**batch).loss / args.gradient_accumulation_steps
            loss.backward()
            running += loss.item()
            if (step + 1) % args.gradient_accumulation_steps == 0:
                torch.nn.utils.clip_grad_norm_(trainable, 0.3)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad(set_to_none=True)
                print(f"epoch {epoch} step {step + 1} loss {running:.4f} lr {scheduler.get_last_lr()[0]:.2e}")
                running = 0.0
    if device.type == "cuda":
        torch.cuda.synchronize()
        print(f"max memory: {torch.cuda.max_memory_allocated() / 1024**3:.2f} GB")
    print(f"took {time.time() - started:.1f}s")
    torch.save(get_peft_model_state_dict(model), args.adapter_path)
    model.save_pretrained("adapter")
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
