"""A script that calls `generate` of a small Llama: the sum of its tokens and what the allocator held, as one line of JSON."""

import json

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=2048,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
)
model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
ids = torch.randint(2048, (16, 512), device="cuda")
with torch.no_grad():
    tokens = model.generate(ids, max_new_tokens=48, min_new_tokens=48, do_sample=False, pad_token_id=0)
print(json.dumps({"tokens": tokens[:, 512:].tolist(), "allocated": torch.cuda.max_memory_allocated()}))
