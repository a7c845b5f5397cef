"""Decoding with a bounded cache against the two packages that do it, same weights, same attended tokens, equal logits first.

mit-han-lab/streaming-llm (transformers 4.33) and attention_sinks 0.4.0 (transformers 4.34) run in environments of their own
(``benchmarks/peers/setup.sh``). They attend to sinks, window and the token at hand, as ``SinkCache`` does. What the cache costs
is told apart from what the model costs by the same model with a plain cache held at the same size, there and here.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable

import torch
from _peers import PEERS, Worker, make_llama, peer_environments, save_for_peers
from _timing import Bar, exit_with
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from sinklab.attention.seam import register_operation
from sinklab.operations.softmax import Softmax
from sinklab.streaming.cache import SinkCache

SINKS = 4
CHECKED = 40
"""Tokens behind the prompt whose logits must agree before anything is timed."""
STEPS, ROUNDS = 10, 12

SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
TEN_MILLION = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6}
TEN_MILLION |= {"num_key_value_heads": 6}
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def measure() -> list[Bar]:
    """One bar for each peer, model and cache size; none, and why, where no peer is installed."""
    environments = peer_environments()
    for name in PEERS:
        if name not in environments:
            say(f"SKIPPED {name}: no environment for it; make one with benchmarks/peers/setup.sh and set SINKLAB_PEERS")
    if not environments:
        return []
    workers = {name: Worker(path) for name, path in environments.items()}
    plain = Worker(next(iter(environments.values())))
    try:
        return [
            equal_logits(TINY, 64, 8.0, workers),
            equal_logits(TINY, 256, 8.0, workers),
            *compare("Llama 4 × 512", SMALL, 1024, "float32", 1.35, workers, plain),
            *compare("Llama 4 × 512", SMALL, 4096, "float32", 3.5, workers, plain),
            *compare("Llama 6 × 384", TEN_MILLION, 1024, "float32", 1.35, workers, plain),
            *compare("Llama 6 × 384", TEN_MILLION, 1024, "bfloat16", 1.35, workers, plain),
        ]
    finally:
        for worker in (*workers.values(), plain):
            worker.close()


def compare(
    name: str, sizes: dict[str, int], held: int, dtype: str, limit: float, workers: dict[str, Worker], plain: Worker
) -> list[Bar]:
    """The bars of one model and cache size."""
    model = make_llama(sharpened=2.0, **sizes)
    tokens = prompt(held)
    label = f"{name}, {held} tokens held, {dtype}"
    apart = equal_logits(sizes, held, 2.0, workers).measured
    with tempfile.TemporaryDirectory() as folder:
        save_for_peers(model, folder)
        peers = {**workers, "plain": plain}
        settings = {"folder": folder, "sinks": SINKS, "window": held - SINKS}
        for library, worker in peers.items():
            worker.ask("load", library=library, dtype=dtype, **settings)
            worker.read(tokens, held)
        if dtype != "float32":
            frequencies = model.model.rotary_emb.inv_freq.clone()
            model = model.to(getattr(torch, dtype))
            model.model.rotary_emb.inv_freq = frequencies  # they stay float32, as from_pretrained() has it
        candidates: dict[str, Callable[[], float]] = {
            **{library: lambda worker=worker: worker.ask("time", steps=STEPS) for library, worker in peers.items()},
            "SinkCache": steps_of(model, tokens, held),
            "DynamicCache": steps_of(model, tokens, held, dynamic=True),
            "SinkCache, sinklab_softmax": steps_of(model, tokens, held, backend=register_operation(Softmax())),
            "SinkCache, eager": steps_of(model, tokens, held, backend="eager"),
            "DynamicCache, eager": steps_of(model, tokens, held, backend="eager", dynamic=True),
        }
        best = dict.fromkeys(candidates, float("inf"))
        for number in range(ROUNDS + 1):
            for library, run in candidates.items():
                taken = run()
                best[library] = min(best[library], taken) if number else best[library]
    best["plain transformers of 2023"] = best.pop("plain")
    say(
        f"{label}: logits {apart:.0e} apart; ms a token: "
        + ", ".join(f"{key} {1e3 * value:.2f}" for key, value in best.items())
    )
    ours = best["SinkCache, sinklab_softmax"]
    bars = [Bar("streaming", f"{label}: {library} ÷ ours", best[library] / ours, ">=", limit) for library in workers]
    ratio = best["SinkCache"] / best["DynamicCache"]
    bars.append(Bar("streaming", f"{label}: SinkCache ÷ DynamicCache held at that size, sdpa", ratio, "<=", 1.05))
    return bars


def equal_logits(sizes: dict[str, int], held: int, sharpened: float, workers: dict[str, Worker]) -> Bar:
    """How far the logits of the peers are from ours, in float32, for tokens read one by one behind a full cache.

    Raises:
        AssertionError: they are not equal to 1e-4, or the comparison would not notice a window that is one token too long.
    """
    model, tokens = make_llama(sharpened=sharpened, **sizes), prompt(held)
    own = read(model, tokens, held)
    longer = float((own - read(model, tokens, held, window=held - SINKS + 1)).abs().max())
    with tempfile.TemporaryDirectory() as folder:
        save_for_peers(model, folder)
        apart = 0.0
        for library, worker in workers.items():
            worker.ask("load", library=library, dtype="float32", folder=folder, sinks=SINKS, window=held - SINKS)
            apart = max(apart, float((own - worker.read(tokens, held)).abs().max()))
    if not apart <= 1e-4 or longer < 1e-3:
        raise AssertionError(
            f"{held} tokens held: logits are {apart:.1e} apart, and one token more moves them by {longer:.1e}; nothing is timed"
        )
    what = f"Llama {sizes['num_hidden_layers']} × {sizes['hidden_size']}, {held} tokens held: logits of the peers and ours"
    return Bar("streaming", what, apart, "<=", 1e-4, "")


def prompt(held: int) -> list[int]:
    """Tokens to fill a cache, and those whose logits are compared."""
    return torch.randint(0, 1024, (held + CHECKED,), generator=torch.Generator().manual_seed(1)).tolist()


@torch.no_grad()
def read(model: LlamaForCausalLM, tokens: list[int], held: int, window: int | None = None) -> Tensor:
    """Logits of the tokens behind the first ``held``, read one by one."""
    cache = SinkCache(model, num_sinks=SINKS, window=window or held - SINKS)
    given = torch.tensor([tokens])
    model(given[:, :held], past_key_values=cache)
    logits = [model(given[:, index : index + 1], past_key_values=cache).logits for index in range(held, len(tokens))]
    return torch.cat(logits, dim=1)[0].float()


def steps_of(
    model: LlamaForCausalLM, tokens: list[int], held: int, *, backend: str = "sdpa", dynamic: bool = False
) -> Callable[[], float]:
    """A function that takes some steps in a full cache and gives the CPU seconds of one."""
    cache = DynamicCache(config=model.config) if dynamic else SinkCache(model, num_sinks=SINKS, window=held - SINKS)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        for start in range(0, held, 512):
            model(torch.tensor([tokens[start : min(start + 512, held)]]), past_key_values=cache)
    token = torch.tensor([[1]])

    @torch.no_grad()
    def run() -> float:
        model.set_attn_implementation(backend)
        start = time.process_time()
        for _ in range(STEPS):
            model(token, past_key_values=cache)
            if dynamic:
                cache.crop(-1)
        return (time.process_time() - start) / STEPS

    return run


def say(line: str) -> None:
    """A line beside the table."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    exit_with(measure)
