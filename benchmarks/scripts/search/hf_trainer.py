"""Train a BERT for classification with the Trainer of transformers, its defaults."""

import sys
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

WIDTH, LAYERS, LENGTH, BATCH = (32, 1, 16, 2) if "tiny" in sys.argv else (192, 4, 128, 16)
torch.manual_seed(0)
model = BertForSequenceClassification(
    BertConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=4 * WIDTH,
        vocab_size=8192,
    )
)
samples = [
    {"input_ids": torch.randint(0, 8192, (LENGTH,)), "labels": number % 2} for number in range(2048)
]
Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1000,
        report_to=[],
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
    ),
    train_dataset=samples,
).train()
