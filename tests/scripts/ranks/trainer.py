"""The Trainer of Transformers, whose last batch is smaller than the others."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
cfg = GPT2Config(
    vocab_size=64,
    n_positions=32,
    n_embd=32,
    n_layer=2,
    n_head=2,
    resid_pdrop=0,
    embd_pdrop=0,
    attn_pdrop=0,
)
model = GPT2LMHeadModel(cfg)
tokens = torch.randint(64, (61, 16))
data = [{"input_ids": row, "labels": row} for row in tokens]
args = TrainingArguments(
    "out",
    per_device_train_batch_size=8,
    num_train_epochs=2,
    logging_steps=1,
    report_to=[],
    disable_tqdm=True,
    save_strategy="epoch",
    eval_strategy="epoch",
    per_device_eval_batch_size=8,
)
Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:16]).train()
torch.save(model.state_dict(), "ck.pt")
