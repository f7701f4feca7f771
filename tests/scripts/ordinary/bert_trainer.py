"""Fine-tune a small BERT with the Hugging Face Trainer."""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Pairs(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(5, 2000, (64,), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": i % 2}


config = BertConfig(
    vocab_size=2000,
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=512,
)
trainer = Trainer(
    model=BertForSequenceClassification(config),
    args=TrainingArguments(
        output_dir="checkpoints",
        per_device_train_batch_size=16,
        num_train_epochs=1,
        save_steps=100,
        logging_steps=10,
        report_to=[],
        use_cpu=True,
    ),
    train_dataset=Pairs(),
)
trainer.train()
