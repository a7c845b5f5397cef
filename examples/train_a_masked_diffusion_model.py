"""Train a small masked diffusion language model, and follow its sinks while it fills in texts.

A decoder of this library whose prefix is all of a row sees both ways. In every row a share of the tokens, drawn anew from 0 to
1, becomes a mask, and the loss at these is divided by the share (Nie et al. 2025, arXiv 2502.09992). With the recipe emergence,
half an hour of a core, it learns to use its context; docs/denoising.md says where its sinks are. What is saved is read again by
sinklab denoise FOLDER --mask-token N.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinklab import denoise, load_model
from sinklab.registry import recipes
from sinklab.training.config import PretrainingConfig
from sinklab.training.data import prepare_data
from sinklab.training.initial import build_model
from sinklab.training.optimizers import make_optimizer, make_schedule
from sinklab.training.process import compiles, default_cache
from sinklab.training.trainer import RowOrder

IGNORED = -100


def hide(rows: Tensor, mask: int, end: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that end as those of an encoder do, with masks between their first and last token; targets, and the shares."""
    rows = torch.cat((rows[:, :-1], rows.new_full((len(rows), 1), end)), dim=1)
    share = torch.rand(len(rows), 1, generator=generator).clamp(min=1e-3)
    masked = torch.rand(rows.shape, generator=generator) < share
    masked[:, 0] = masked[:, -1] = False
    return rows.masked_fill(masked, mask), rows.masked_fill(~masked, IGNORED), share


def train(config: PretrainingConfig, folder: Path) -> int:
    """Train as the recipe says, with another objective; save model and tokenizer, and give the id of the mask token."""
    data, training = prepare_data(config, default_cache()), config.training
    context, mask = config.model.max_position_embeddings, data.identity["tokenizer"]["vocab_size"]
    both_ways = config.model.model_copy(update={"prefix": context, "max_position_embeddings": context + 1})
    model = build_model(config.model_copy(update={"model": both_ways}), data.tokenizer, mask + 1).train()
    forward = torch.compile(model) if compiles(config) else model
    optimizer = make_optimizer(model, config.optimizer)
    schedule = make_schedule(optimizer, config.schedule, training.steps)
    order = iter(RowOrder(len(data.train), training.batch_size, training.steps, config.data.seed))
    generator = torch.Generator().manual_seed(config.data.seed)
    for step in range(1, training.steps + 1):
        rows = torch.stack([data.train[next(order)]["input_ids"] for _ in range(training.batch_size)])
        inputs, targets, share = hide(rows, mask, data.tokenizer.eos_token_id, generator)
        logits = forward(input_ids=inputs, use_cache=False).logits.flatten(0, 1).float()
        losses = cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="none").view_as(targets)
        ((losses / share).sum() / targets.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % training.log_every == 0 or step == training.steps:
            print(f"step {step:,}: {losses.detach().sum() / (targets != IGNORED).sum():.3f} nats at a masked token", flush=True)
    model.save_pretrained(folder)
    data.tokenizer.add_special_tokens({"mask_token": "<mask>"})
    data.tokenizer.save_pretrained(folder)
    return int(mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="emergence", help="as in 'sinklab list recipes'")
    parser.add_argument("--rate", type=float, default=0.5, help="learning rate over that of the recipe")
    parser.add_argument("--steps", type=int, help="those of the recipe by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/diffusion"))
    given = parser.parse_args()
    config = recipes[given.recipe]()
    config.optimizer.learning_rate *= given.rate
    config.training.seed = config.data.seed = given.seed
    if given.steps is not None:
        config.training.steps, config.schedule.warmup_steps = given.steps, min(config.schedule.warmup_steps, given.steps // 2)
    torch.set_num_threads(config.training.threads or torch.get_num_threads())
    mask = train(config, given.out)
    corpus = config.data.corpus
    denoise(load_model(str(given.out)), corpus=corpus, mask_token=mask, order="random").show()


if __name__ == "__main__":
    main()
