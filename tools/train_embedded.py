"""How the embedded models were trained: one recipe, run with softmax and with unnormalised sigmoid, from three seeds each.

``python tools/train_embedded.py prepare`` trains the tokenizer and encodes the corpus;
``… train softmax`` and ``… train sigmoid --seed 1`` train (and resume) one model each; ``… ship`` writes the checkpoints, the
training log and their hashes into the package. ``make embedded`` runs all of it; ``make embedded SEEDS="3 4"`` trains from
further seeds, which are not shipped.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import platform
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sinklab.attention.session import attend
from sinklab.corpora.base import Encoder, hash_tokens
from sinklab.corpora.python_source import PythonSource
from sinklab.models.embedded import BUILD, FOLDER, SEEDS, TRAINED
from sinklab.models.language_model import SinkLM, SinkLMConfig
from sinklab.probes.sink_rate import SinkRate
from sinklab.training.process import has_bfloat16
from sinklab.training.tokenizer import encode, train_bpe

__all__ = ["OPERATIONS", "Recipe", "main"]

OPERATIONS: dict[str, dict[str, object]] = {
    "softmax": {"name": "softmax"},
    # Ramapuram et al. 2024 (arXiv 2409.04431): bias = -log(context). Without it the sigmoid trails the softmax's loss.
    "sigmoid": {"name": "sigmoid", "bias": -math.log(256)},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every number of the training; the same for both models but for ``operation``."""

    vocab_size: int = 2048
    hidden_size: int = 128
    intermediate_size: int = 352
    num_layers: int = 6
    num_heads: int = 2
    head_dim: int = 64
    context: int = 256
    batch_size: int = 8
    steps: int = 5_000
    learning_rate: float = 5e-3
    min_learning_rate: float = 5e-4
    warmup_steps: int = 200
    weight_decay: float = 0.1
    adam_betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    seed: int = 0
    held_out_rows: int = 200
    sink_rows: int = 100
    sink_seq_len: int = 64
    sink_threshold: float = 0.3


class Chunks(Dataset):
    """Rows of BOS and ``context - 1`` consecutive tokens of the encoded corpus."""

    def __init__(self, tokens: np.ndarray, context: int, bos: int) -> None:
        self.tokens, self.content, self.bos = tokens, context - 1, bos

    def __len__(self) -> int:
        return len(self.tokens) // self.content

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.tokens[index * self.content : (index + 1) * self.content].astype(np.int64)
        row = torch.cat((torch.tensor([self.bos]), torch.from_numpy(piece)))
        return {"input_ids": row, "labels": row}


class HeldOut(TrainerCallback):
    """Every ``every`` steps, to a JSON-lines log: held-out loss at the training context and sink rate of position 0."""

    def __init__(self, recipe: Recipe, loss_rows: torch.Tensor, sink_rows: torch.Tensor, log: Path, every: int = 500) -> None:
        self.recipe, self.loss_rows, self.sink_rows, self.log, self.every = recipe, loss_rows, sink_rows, log, every
        self.started = time.time()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: SinkLM, **kwargs: object
    ) -> None:
        if state.global_step % self.every == 0 or state.global_step == args.max_steps:
            plain: Any = getattr(model, "_orig_mod", model)
            record = {
                "step": state.global_step,
                "held_out_loss": held_out_loss(plain, self.loss_rows),
                "sink_rate_gu2024": sink_rate(plain, self.sink_rows, self.recipe.sink_threshold),
                "seconds": round(time.time() - self.started, 1),
            }
            with self.log.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(json.dumps(record), flush=True)


@torch.no_grad()
def held_out_loss(model: SinkLM, rows: torch.Tensor) -> float:
    """Mean next-token loss in nats, float32."""
    training, _ = model.training, model.eval()
    losses = [model(input_ids=part, labels=part).loss.item() * len(part) for part in rows.split(20)]
    model.train(training)
    return sum(losses) / len(rows)


@torch.no_grad()
def sink_rate(model: SinkLM, rows: torch.Tensor, threshold: float) -> float:
    """Gu et al.'s sink rate of position 0 in percent (arXiv 2410.10781), by the probe that the audit uses."""
    training, _ = model.training, model.eval()
    probe = SinkRate(threshold=threshold)
    with attend(model, [probe]) as session:
        model(input_ids=rows)
    model.train(training)
    table = session.table()
    whole = table[(table["metric"] == "gu2024") & table["layer"].isna()]
    return float(whole.loc[whole["key_position"] == 0, "value"].iloc[0])


def prepare(recipe: Recipe) -> None:
    """Train the tokenizer on every eighth training file and encode the training split, documents ended by EOS."""
    BUILD.mkdir(parents=True, exist_ok=True)
    corpus = PythonSource()
    documents = [path.read_text(encoding="utf-8", errors="replace") for path in corpus.files("train")]
    tokenizer = train_bpe(documents[::8], recipe.vocab_size)
    tokenizer.save_pretrained(BUILD / "tokenizer")
    pieces = [np.append(ids, tokenizer.eos_token_id).astype(np.uint16) for ids, _ in encode(tokenizer, documents)]
    tokens = np.concatenate(pieces)
    np.save(BUILD / "tokens.npy", tokens)
    identity = {
        **dataclasses.asdict(corpus.identity),
        "files": len(documents),
        "characters": sum(map(len, documents)),
        "tokens": len(tokens),
        "sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
    }
    (BUILD / "corpus.json").write_text(json.dumps(identity, indent=2) + "\n")
    print(json.dumps(identity))


def train(operation: str, recipe: Recipe) -> None:
    """Train one model, going on from its last checkpoint if there is one."""
    # One thread: the matrices are small, and the two trainings run side by side on two cores.
    torch.set_num_threads(1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUILD / "tokenizer")
    encoder = Encoder(vocab_size=len(tokenizer), bos_token_id=tokenizer.bos_token_id, tokenizer=tokenizer)
    corpus = PythonSource()
    loss_rows = corpus.sample(encoder, seq_len=recipe.context, samples=recipe.held_out_rows, seed=1, bos=True)
    sink_rows = corpus.sample(encoder, seq_len=recipe.sink_seq_len, samples=recipe.sink_rows, seed=2, bos=True)
    transformers.set_seed(recipe.seed)
    config = SinkLMConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.context,
        initialization="normal",
        operation=OPERATIONS[operation],
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    # In bf16 on CPU eager attention is three times faster than SDPA at this length.
    model = SinkLM(config)
    if operation == "softmax":
        model.set_attn_implementation("eager")
    folder = BUILD / folder_of(operation, recipe.seed)
    folder.mkdir(parents=True, exist_ok=True)
    resume = any(folder.glob("checkpoint-*"))
    half = has_bfloat16("cpu")  # the shipped models were trained in it; imitated, a step takes eleven times as long
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=recipe.steps,
            per_device_train_batch_size=recipe.batch_size,
            learning_rate=recipe.learning_rate,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr": recipe.min_learning_rate},
            warmup_steps=recipe.warmup_steps,
            weight_decay=recipe.weight_decay,
            adam_beta1=recipe.adam_betas[0],
            adam_beta2=recipe.adam_betas[1],
            max_grad_norm=recipe.max_grad_norm,
            optim="adamw_torch_fused",
            bf16=half,
            use_cpu=True,
            torch_compile=any(map(shutil.which, ("g++", "clang++"))),  # inductor needs a C++ compiler; a third faster
            seed=recipe.seed,
            data_seed=recipe.seed,
            logging_steps=100,
            save_steps=1000,
            save_total_limit=2,
            report_to="none",
            disable_tqdm=True,
            dataloader_drop_last=True,
        ),
        train_dataset=Chunks(np.load(BUILD / "tokens.npy"), recipe.context, tokenizer.bos_token_id),
        callbacks=[HeldOut(recipe, loss_rows, sink_rows, folder / "log.jsonl")],
    )
    trainer.train(resume_from_checkpoint=resume)
    model.save_pretrained(folder / TRAINED)
    tokenizer.save_pretrained(folder / TRAINED)
    run = {
        "operation": OPERATIONS[operation],
        "recipe": dataclasses.asdict(recipe),
        "tokens_seen": recipe.steps * recipe.batch_size * recipe.context,
        "corpus": json.loads((BUILD / "corpus.json").read_text()),
        "held_out_sha256": hash_tokens(loss_rows),
        "sink_rows_sha256": hash_tokens(sink_rows),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__},
        "dtype": "bfloat16" if half else "float32",
        "hardware": f"CPU, 1 thread, {platform.machine()}",
    }
    (folder / "training.json").write_text(json.dumps(run, indent=2) + "\n")


def folder_of(operation: str, seed: int) -> str:
    """Name of the folder of a training, here and in the package."""
    return f"{operation}-{seed}" if seed else operation


def ship() -> None:
    """Copy the finished checkpoints, their logs and hashes into the package; what was not trained here stays as it is there."""
    names = [folder_of(operation, seed) for operation in OPERATIONS for seed in SEEDS]
    finished = [name for name in names if (BUILD / name / "training.json").exists()]
    left = [name for name in names if name not in finished]
    print(f"not trained to the end in {BUILD}, left as shipped: {', '.join(left) or 'none'}")
    for name in finished:
        source, target = BUILD / name, FOLDER / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source / TRAINED, target)
        run = json.loads((source / "training.json").read_text())
        run["log"] = [json.loads(line) for line in (source / "log.jsonl").read_text().splitlines()]
        run["safetensors_sha256"] = hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest()
        (target / "training.json").write_text(json.dumps(run, indent=1) + "\n")
        for path in target.iterdir():
            path.chmod(0o644)  # safetensors makes files private
        print(f"{name}: {os.path.getsize(target / 'model.safetensors') / 1e6:.1f} MB, {run['log'][-1]}")


def main() -> None:
    """Command line of ``python tools/train_embedded.py``."""
    parser = argparse.ArgumentParser(description=__doc__)
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("prepare", help="train the tokenizer and encode the corpus")
    trainer = steps.add_parser("train", help="train one model, or go on with it")
    trainer.add_argument("operation", choices=sorted(OPERATIONS))
    trainer.add_argument("--seed", type=int, default=0, help=f"those from {SEEDS[0]} to {SEEDS[-1]} are shipped")
    steps.add_parser("ship", help="copy the finished checkpoints into the package")
    arguments = parser.parse_args()
    if arguments.step == "prepare":
        prepare(Recipe())
    elif arguments.step == "train":
        train(arguments.operation, Recipe(seed=arguments.seed))
    else:
        ship()


if __name__ == "__main__":
    main()
