"""The Hugging Face Trainer: evaluation and a checkpoint at each epoch, workers, a tiny classifier made from its config."""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Sentences(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return {"input_ids": torch.randint(1_000, (64,)), "labels": index % 2}


config = BertConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=1_000, num_labels=2
)
Trainer(
    model=BertForSequenceClassification(config),
    args=TrainingArguments(
        output_dir="checkpoints",
        per_device_train_batch_size=4,
        num_train_epochs=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_steps=1,
        bf16=True,
        report_to="none",
    ),
    train_dataset=Sentences(),
    eval_dataset=Sentences(),
).train()
