"""Prompts under policies that score tokens: read in chunks, against the same tokens read one by one, equal logits first."""

from __future__ import annotations

from collections.abc import Callable

import torch
from _peers import make_llama
from _timing import Bar, best_times, exit_with
from torch import Tensor
from transformers import LlamaForCausalLM

from sinklab.policies.base import ScoredPolicy
from sinklab.policies.heavy_hitter import HeavyHitter
from sinklab.policies.value_norm import ValueNorm
from sinklab.streaming.scored import ScoredCache

HELD = 1024
SINGLY = 24
SIZES = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6}
SIZES |= {"num_key_value_heads": 6}
POLICIES = (
    HeavyHitter(heavy=HELD // 2 - 1, recent=HELD // 2),
    HeavyHitter(heavy=HELD // 2 - 1, recent=HELD // 2, positions="original"),
    ValueNorm(num_sinks=4, large=HELD // 2 - 5, recent=HELD // 2),
)


@torch.no_grad()
def measure() -> list[Bar]:
    """A bar for each policy: a prompt twice as long as the cache, half of which fills it, and as much of it token by token."""
    model = make_llama(sharpened=2.0, **SIZES)
    text = torch.randint(0, 1024, (1, 2 * HELD), generator=torch.Generator().manual_seed(1))
    return [compare(model, text, policy) for policy in POLICIES]


def compare(model: LlamaForCausalLM, text: Tensor, policy: ScoredPolicy) -> Bar:
    """The bar of one policy.

    Raises:
        AssertionError: logits of both ways are more than 1e-3 apart.
    """
    filling, full = (ScoredCache(policy, model) for _ in range(2))
    model(text, past_key_values=full, logits_to_keep=1)

    def chunks() -> Tensor:
        filling.reset()
        return model(text, past_key_values=filling, logits_to_keep=1).logits

    def singly(cache: ScoredCache) -> Callable[[], Tensor]:
        def run() -> Tensor:
            logits = [model(text[:, at : at + 1], past_key_values=cache).logits for at in range(SINGLY)]
            return logits[-1]

        return run

    whole = ScoredCache(policy, model)
    model(text, past_key_values=whole, logits_to_keep=1)
    apart = float((model(text[:, :SINGLY], past_key_values=whole).logits[:, -1:] - singly(full)()).abs().max())
    if not apart <= 1e-3:
        raise AssertionError(f"{policy.describe()}: logits are {apart:.1e} apart; nothing is timed")
    times = best_times({"chunks": chunks, "singly": singly(full)}, rounds=3)
    ratio = (times["singly"] / SINGLY) / (times["chunks"] / text.shape[1])
    what = f"prompt of {text.shape[1]} tokens into {policy.describe()}: a token alone ÷ a token in chunks"
    return Bar("scored", what, ratio, ">=", 10.0)


if __name__ == "__main__":
    exit_with(measure)
