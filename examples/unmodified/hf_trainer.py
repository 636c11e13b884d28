"""A tiny GPT-2, made from a config and trained by the Trainer of transformers on the bytes of some Python source.

Nothing is downloaded. The script knows nothing of gradvitals:

    python examples/unmodified/hf_trainer.py
    gradvitals run examples/unmodified/hf_trainer.py
"""

import argparse
import inspect
from dataclasses import dataclass, field

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class DataArguments:
    num_sequences: int = field(default=320, metadata={"help": "Sequences to train on."})
    sequence_length: int = field(default=32, metadata={"help": "Bytes in each."})


@dataclass
class Arguments(TrainingArguments):
    output_dir: str = "out"
    num_train_epochs: float = 2.0
    per_device_train_batch_size: int = 4
    gradient_accumulation_steps: int = 4
    learning_rate: float = 2e-3
    warmup_steps: float = 5
    max_grad_norm: float = 1.0
    logging_steps: float = 10
    save_strategy: str = "no"
    report_to: str = "none"
    disable_tqdm: bool = True
    use_cpu: bool = True


class Sequences(torch.utils.data.Dataset):
    def __init__(self, arguments):
        text = torch.tensor(list(inspect.getsource(argparse).encode()))
        length, count = arguments.sequence_length, arguments.num_sequences
        self.rows = text[: length * count].view(count, length)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main():
    data_args, training_args = HfArgumentParser((DataArguments, Arguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0)
    model = GPT2LMHeadModel(config)
    trainer = Trainer(model=model, args=training_args, train_dataset=Sequences(data_args))
    result = trainer.train()
    print(f"{result.global_step} steps, training loss {result.training_loss:.4f}")
    trainer.save_model()


if __name__ == "__main__":
    main()
