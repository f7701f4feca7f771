"""Train low-rank adapters of peft on a frozen GPT-2 of transformers."""

import sys

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

WIDTH, LAYERS, LENGTH, BATCH = (32, 1, 16, 2) if "tiny" in sys.argv else (256, 4, 128, 8)
torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(n_embd=WIDTH, n_layer=LAYERS, n_head=4, vocab_size=8192, use_cache=False)
)
model = get_peft_model(
    model, LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
loader = DataLoader(torch.randint(0, 8192, (2048, LENGTH)), batch_size=BATCH, shuffle=True)
for _ in range(1000):
    for tokens in loader:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
