"""Give a trained model other attention, train it on, and see what that costs and whether its sink goes.

Every operation starts from the same weights and reads the same rows as softmax, which is trained on beside it: what softmax
does without any change is not the operation's doing. Without arguments the model is a GPT-2 of one layer, trained here for a
moment; --model and --text ask the question of a causal language model and a text of your own. What came of it:
docs/train.md#another-attention-in-a-trained-model.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import tempfile
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PrinterCallback, Trainer, TrainingArguments, set_seed

from sinklab import SinkCallback, attach, load_model
from sinklab.corpora.bigram_backcopy import CHARACTERS, TRIGGERS, BigramBackcopy
from sinklab.registry import operations, split_specs

OPERATIONS = "softmax,gated:double=true,gated_heads:double=true,sink_logit:initial=-4,softmax_plus_one,softpick"

COLUMNS = {
    "probe_loss": "loss",
    "sink_rate": "sink rate (%)",
    "first_token_attention": "weight on the first token",
    "sink_loss_gap": "sink worth (nats)",
}
"""Numbers of the callback, on rows kept apart; the last is what a window without the first token loses more."""

HELD_OUT = 64
"""Rows kept apart, the first ones."""


def letters(number: int, length: int = 64) -> Tensor:
    """Rows of a made-up language in which heads copy behind triggers and have nothing to do elsewhere; token 0 in front."""
    alphabet, passages = CHARACTERS + TRIGGERS, itertools.islice(BigramBackcopy().passages(seed=0), number)
    return torch.tensor([[0, *(1 + alphabet.index(letter) for letter in text[: length - 1])] for text in passages])


def small_model(seed: int) -> PreTrainedModel:
    """A new GPT-2 of one layer for :func:`letters`."""
    set_seed(seed)
    size = {"vocab_size": 64, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64}
    quiet = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**size, **quiet, bos_token_id=0, eos_token_id=0))


def own_model(folder: str, text: Path, length: int, number: int) -> tuple[PreTrainedModel, Tensor]:
    """A model, and rows of a text with its BOS in front, ``(number or fewer, length)``."""
    loaded = load_model(folder)
    bos = [] if loaded.tokenizer.bos_token_id is None else [loaded.tokenizer.bos_token_id]
    tokens = loaded.tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
    step = length - len(bos)
    starts = range(0, min(number * step, len(tokens) - step + 1), step)
    return loaded.model, torch.tensor([bos + tokens[start : start + step] for start in starts])


def train(model: PreTrainedModel, rows: Tensor, given: argparse.Namespace) -> list[dict[str, float]]:
    """Train, and give the numbers of the callback before the first step and behind the last."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=given.steps, per_device_train_batch_size=given.batch_size, learning_rate=given.rate,
            lr_scheduler_type="cosine", warmup_steps=given.steps // 10, seed=given.seed, report_to="none", use_cpu=True,
            disable_tqdm=True, logging_strategy="no", save_strategy="no",
        )  # fmt: skip
        read = [{"input_ids": row, "labels": row} for row in rows[HELD_OUT:]]
        trainer = Trainer(model=model.train(), args=arguments, train_dataset=read)
        watch = SinkCallback(rows[:HELD_OUT], every=given.steps, window=rows.shape[1] // 4, trainer=trainer)
        trainer.add_callback(watch)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [logged for logged in trainer.state.log_history if "probe_loss" in logged]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a directory with a causal language model and its tokenizer")
    parser.add_argument("--text", type=Path, help="a text file, with --model")
    parser.add_argument("--operations", default=OPERATIONS, help="from 'sinklab list operations', with settings behind a colon")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=256, help="tokens of a row, with --model")
    parser.add_argument("--rate", type=float, default=1e-2, help="learning rate; for a model of your own rather 1e-4 to 1e-3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a CSV file for the table")
    given = parser.parse_args()
    number = given.steps * given.batch_size + HELD_OUT
    if (given.model is None) != (given.text is None):
        parser.error("--model and --text go together")
    if given.model is None:
        model, rows = small_model(given.seed), letters(number)
        train(model, rows, given)
    else:
        model, rows = own_model(given.model, given.text, given.length, number)
        if len(rows) < HELD_OUT + given.batch_size:
            parser.error(f"{given.text} has {len(rows)} rows of {given.length} tokens; {HELD_OUT} are kept apart")
    found = {}
    for operation in split_specs(given.operations):
        set_seed(given.seed)
        changed = copy.deepcopy(model)
        if operation != "softmax":
            attach(changed, operations.read(operation))
        first, *_, last = train(changed, rows, given)
        found[operation] = {"loss at the start": first["probe_loss"], **{COLUMNS[name]: last[name] for name in COLUMNS}}
    table = pd.DataFrame(found).T
    print(table.round(3).to_string())
    if given.out is not None:
        table.to_csv(given.out, index_label="operation")


if __name__ == "__main__":
    main()
