"""Short texts: measuring the sink rate against asking the model for its matrices (`output_attentions`) and averaging these.

Both sides give the rate of Gu et al. 2024 of every key in every head, and are compared before they are timed. GPT-2 has no
positions past 1,024.
"""

from __future__ import annotations

import functools

import torch
from _timing import Bar, best_times, exit_with
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from sinklab import attend, load_model
from sinklab.probes.sink_rate import GU2024, SinkRate

THRESHOLD = 0.3
LENGTHS = {"embedded:softmax": (128, 256, 512, 1024, 4096), "GPT-2 small, random weights": (128, 256, 512, 1024)}


def pair(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same model twice: with the attention that it comes with, and with matrices."""
    if name.startswith("embedded:"):
        fast, eager = load_model(name).model, load_model(name).model
        eager.set_attn_implementation("eager")
        return fast, eager
    models = []
    for implementation in ("sdpa", "eager"):
        torch.manual_seed(0)
        models.append(GPT2LMHeadModel._from_config(GPT2Config(), attn_implementation=implementation).eval())
    return models[0], models[1]


@torch.inference_mode()
def by_matrices(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Whether each key passes the threshold, ``(layers, heads, keys)``."""
    attentions = model(input_ids=tokens, output_attentions=True, use_cache=False, logits_to_keep=1).attentions
    seen = torch.arange(tokens.shape[1], 0, -1)
    return torch.stack([weights[0].sum(dim=1) / seen > THRESHOLD for weights in attentions])


@torch.inference_mode()
def by_sinklab(model: PreTrainedModel, tokens: Tensor) -> object:
    """The table of the probe."""
    with attend(model, [SinkRate(threshold=THRESHOLD)]) as session:
        model(input_ids=tokens, use_cache=False, logits_to_keep=1)
    return session.table()


def measure() -> list[Bar]:
    bars = []
    for name, lengths in LENGTHS.items():
        fast, eager = pair(name)
        for length in lengths:
            tokens = torch.randint(5, 500, (1, length), generator=torch.Generator().manual_seed(0))
            table = by_sinklab(fast, tokens)
            rows = table[(table["metric"] == GU2024.name) & table["head"].notna()]  # type: ignore[index]
            found = torch.zeros(by_matrices(eager, tokens).shape, dtype=torch.bool)
            found[rows["layer"].tolist(), rows["head"].tolist(), rows["key_position"].tolist()] = torch.tensor(
                (rows["value"] > 0).tolist()
            )
            # A mean within rounding of the threshold may fall on either side of it.
            assert int((found != by_matrices(eager, tokens)).sum()) <= 1, f"{name}, {length} tokens: the rates differ"
            times = best_times(
                {
                    "matrices": functools.partial(by_matrices, eager, tokens),
                    "sinklab": functools.partial(by_sinklab, fast, tokens),
                },
                2 if length > 500 else 5,
            )
            what = f"sink rate of {length} tokens ÷ output_attentions and the mean of its matrices ({name})"
            bars.append(Bar("short texts", what, times["sinklab"] / times["matrices"], "<=", 1.0))
    return bars


if __name__ == "__main__":
    exit_with(measure)
