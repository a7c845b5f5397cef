"""Watch the sinks of any model in any transformers Trainer: the same GPT-2 as it is, and with a gate on every head.

Heads that have nothing to say come to rest on the first token, and by step 60 a window without it loses half a nat; gated heads
can be silent, and lose nothing.
"""

from __future__ import annotations

import itertools
import tempfile

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, Trainer, TrainingArguments

from sinklab import SinkCallback, attach, load_model, save_model
from sinklab.corpora.bigram_backcopy import CHARACTERS, TRIGGERS, BigramBackcopy


def texts(number: int, length: int) -> Tensor:
    """Rows of a made-up language in which heads copy behind triggers and have nothing to do elsewhere; token 0 in front."""
    passages = itertools.islice(BigramBackcopy().passages(seed=0), number)
    return torch.tensor(
        [[0, *(1 + (CHARACTERS + TRIGGERS).index(letter) for letter in text[: length - 1])] for text in passages]
    )


def train(model: PreTrainedModel, rows: Tensor) -> None:
    """Train for 60 steps, and print what the callback has seen on the way."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=60, per_device_train_batch_size=32, learning_rate=1e-2, report_to="none", use_cpu=True,
            disable_tqdm=True, logging_strategy="no", save_strategy="no",
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
        watch = SinkCallback(rows[:16], every=20, window=8)
        trainer.add_callback(watch)
        trainer.train()
    table = watch.table.table()
    for metric in ("loss", "sink_loss_gap"):  # the gap: what a window of 8 tokens loses without the first token
        curve = table[(table["probe"] == "sink_readout") & (table["metric"] == metric)].sort_values("step")
        print(metric, [f"step {step}: {value:.2f}" for step, value in zip(curve["step"], curve["value"], strict=True)])


def main() -> None:
    rows = texts(2048, 64)
    config = GPT2Config(
        vocab_size=64, n_embd=64, n_layer=1, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    print("softmax")
    train(GPT2LMHeadModel(config), rows)
    torch.manual_seed(0)
    print("gated")
    model = attach(GPT2LMHeadModel(config), {"name": "gated", "element_wise": False, "double": True})
    train(model, rows)
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, folder)
        print("loaded again:", load_model(folder).operation)


if __name__ == "__main__":
    main()
