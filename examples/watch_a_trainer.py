"""Watch the sinks of any model in any transformers Trainer: a GPT-2 with a gate on every head, attached and trained."""

from __future__ import annotations

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from sinklab import SinkCallback, attach, load_model, save_model


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, bos_token_id=0, eos_token_id=0)
    model = attach(GPT2LMHeadModel(config), {"name": "gated", "element_wise": False})
    # Every row counts upwards from a random token; token 0 stands in front.
    rows = (torch.randint(1, 64, (256, 1)) + torch.arange(32)) % 64
    rows[:, 0] = 0
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=30,
            per_device_train_batch_size=16,
            learning_rate=1e-2,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
        watch = SinkCallback(rows[:16], every=10, window=8)
        trainer.add_callback(watch)
        trainer.train()
        table = watch.table.table()
        for metric in ("loss", "sink_loss_gap"):
            curve = table[(table["probe"] == "sink_readout") & (table["metric"] == metric)].sort_values("step")
            print(metric, [f"step {step}: {value:.2f}" for step, value in zip(curve["step"], curve["value"], strict=True)])
        save_model(model, f"{folder}/gated")
        print("loaded again:", load_model(f"{folder}/gated").operation)


if __name__ == "__main__":
    main()
