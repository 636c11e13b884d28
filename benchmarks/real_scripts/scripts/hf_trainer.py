"""A small causal language model and the Trainer of transformers, with gradient accumulation."""

import tempfile

import torch
from clock import LONGER, Clock
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments


class Sequences(Dataset):
    """Counts up from a random start by a random stride, with some noise."""

    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        start = torch.randint(64, (count, 1), generator=generator)
        stride = torch.randint(1, 4, (count, 1), generator=generator)
        self.tokens = (start + stride * torch.arange(48)) % 64
        noisy = torch.rand(self.tokens.shape, generator=generator) < 0.1
        self.tokens[noisy] = torch.randint(64, (int(noisy.sum()),), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Ticks(TrainerCallback):
    def __init__(self, clock):
        self.clock = clock

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            self.clock.step(logs["loss"])


def main():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    model, clock = GPT2LMHeadModel(config), Clock()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_steps=150 * LONGER,
            learning_rate=1e-3,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        Trainer(model=model, args=arguments, train_dataset=Sequences(2400 * LONGER), callbacks=[Ticks(clock)]).train()
    clock.end(model)


if __name__ == "__main__":
    main()
