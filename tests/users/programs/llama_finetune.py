"""A fine-tune of a Llama: a loop of its own, bf16, an evaluation, generation of a sample, the model saved. The model is tiny and made from its config."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--output", default="finetuned")
args = parser.parse_args()

config = LlamaConfig(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=4_000,
)
model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
tokens = torch.randint(config.vocab_size, (32, 128))

for epoch in range(args.epochs):
    model.train()
    for rows in tokens.split(args.batch_size):
        rows = rows.cuda()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss.item():.3f}")
    model.eval()
    with torch.no_grad():
        held_out = tokens[:8].cuda()
        perplexity = model(input_ids=held_out, labels=held_out).loss.exp().item()
        print(f"perplexity {perplexity:.1f}")
        sample = model.generate(held_out[:1, :8], max_new_tokens=4, do_sample=False)
        print(sample[0].tolist())
model.save_pretrained(args.output)
