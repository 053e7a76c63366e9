"""Train with transformers' Trainer in 60 % of a step's memory, and compare its losses with the Trainer's own.

    pip install accelerate
    python examples/train_with_trainer.py

The optimizer is made first, so that its state counts; the Trainer then runs inside of the budget as it does without.
"""

import tempfile
from contextlib import nullcontext

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import cohabit

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}


def train(folder: str, memory: str | None) -> list[float]:
    """Return the loss of each step."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, vocab_size=500))
    texts = torch.randint(0, 500, (24, 32), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=4, max_steps=5, logging_steps=1, save_strategy="no", report_to="none",
        disable_tqdm=True, use_cpu=True, seed=0,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": text, "labels": text} for text in texts])
    optimizer = trainer.create_optimizer()
    with nullcontext() if memory is None else cohabit.budget(memory, model, optimizer, store="file") as budget:
        trainer.train()
        if budget is not None:
            print(f"tensors took up to {budget.peak_bytes} of {budget.limit_bytes} bytes")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        losses, own = train(folder, "60%"), train(folder, None)
    print("losses", losses)
    print("the same as the Trainer's" if losses == own else "other than the Trainer's")


if __name__ == "__main__":
    main()
