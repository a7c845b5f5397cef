"""One attention layer in a full cache: slots written in place, a cache that concatenates, and StreamingLLM's pattern.

The pattern is what the released code does for every token: evict by concatenation, append by concatenation, rotate every key,
attend with materialised float32 weights. In bfloat16 on a CPU what counts is the attention of the single query.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from _timing import Bar, best_times, exit_with
from torch import Tensor

from sinklab.attention.operation import Inputs
from sinklab.attention.paths import decode as path_decode
from sinklab.operations.softmax import Softmax
from sinklab.policies.sink_window import SinkWindow
from sinklab.streaming.layer import SlotLayer
from sinklab.streaming.table import SlotTable
from sinklab.streaming.traits import Rotation

SINKS, HELD, SIZE = 4, 1024, 64
STEPS = 20


def measure() -> list[Bar]:
    """Bars for 8 and 32 heads in float32, and for the attention of one query in bfloat16."""
    bars = []
    for heads, limit in ((8, 1.15), (32, 1.5)):
        ring, concatenated, pattern = Ring(heads), Concatenated(heads), Pattern(heads)
        require_equal(heads)
        times = best_times({"ring": repeat(ring), "cat": repeat(concatenated), "pattern": repeat(pattern)}, rounds=20)
        label = f"decoding layer, {heads} heads, {HELD} tokens held, float32"
        bars.append(Bar("10", f"{label}: torch.cat cache ÷ ours", times["cat"] / times["ring"], ">=", limit))
        bars.append(Bar("10", f"{label}: StreamingLLM's pattern ÷ ours", times["pattern"] / times["ring"], ">=", 3.0))
    for heads, kv_heads in ((8, 8), (32, 32), (32, 8)):
        bars.append(one_query(heads, kv_heads))
    return bars


def repeat(layer: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], None]:
    """Some steps of a layer, after as many as fill it; the same ones for all."""
    given = [step_of(layer.heads, number) for number in range(STEPS)]
    for number in range(HELD + 8):
        layer(*given[number % STEPS])

    def run() -> None:
        for one in given:
            layer(*one)

    return run


def step_of(heads: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of one token, before they are rotated."""
    generator = torch.Generator().manual_seed(number)
    query, key, value = torch.randn(3, 1, heads, 1, SIZE, generator=generator).unbind()
    return query, key, value


FREQUENCIES = 10_000.0 ** -(torch.arange(0, SIZE, 2).double() / SIZE)


def rotated(states: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions as transformers applies them, tables gathered by position."""
    cosines, sines = TABLES[0][positions], TABLES[1][positions]
    return states * cosines + torch.cat((-states[..., SIZE // 2 :], states[..., : SIZE // 2]), dim=-1) * sines


def tables(length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``(length, SIZE)``."""
    angles = (torch.arange(length).double()[:, None] * FREQUENCIES).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


TABLES = tables(1 << 16)


class Ring:
    """A slot layer and the table that plan each of its steps; the table's share is counted in full, though layers share it."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        policy = SinkWindow(num_sinks=SINKS, window=HELD - SINKS)
        self.table = SlotTable(policy, torch.device("cpu"))
        pairs = torch.arange(SIZE // 2)
        self.layer = SlotLayer(self.table, Rotation(FREQUENCIES, pairs, pairs + SIZE // 2, SIZE))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        step = self.table.step = self.table.plan(1, None)
        position = step.position_ids[0]
        keys, values = self.layer.update(rotated(key, position), value)
        return F.scaled_dot_product_attention(rotated(query, position), keys, values)


class Concatenated:
    """A cache that drops the oldest key and appends the newest by concatenation; positions are the original ones."""

    def __init__(self, heads: int) -> None:
        self.heads, self.seen = heads, 0
        self.keys = self.values = torch.zeros(1, heads, 0, SIZE)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        position = torch.tensor([self.seen])
        self.seen += 1
        self.keys = torch.cat((self.keys[:, :, -HELD:], rotated(key, position)), dim=2)
        self.values = torch.cat((self.values[:, :, -HELD:], value), dim=2)
        return F.scaled_dot_product_attention(rotated(query, position), self.keys, self.values)


class Pattern:
    """StreamingLLM's pattern (arXiv 2309.17453): keys are held unrotated, and all of them are rotated for every token."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.keys = self.values = torch.zeros(1, heads, 0, SIZE)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = torch.cat((self.keys, key), dim=2), torch.cat((self.values, value), dim=2)
        length = keys.shape[2]
        standing = rotated(keys, torch.arange(length))
        scores = torch.matmul(rotated(query, torch.tensor([length - 1])), standing.transpose(2, 3)) / SIZE**0.5
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        outputs = torch.matmul(weights, values)
        self.keys, self.values = keys, values
        if length > HELD:
            self.keys, self.values = (
                torch.cat((states[:, :, :SINKS], states[:, :, length - HELD + SINKS :]), dim=2) for states in (keys, values)
            )
        return outputs


def require_equal(heads: int) -> None:
    """The ring and the pattern give the same outputs, before and after tokens are evicted."""
    ring, pattern = Ring(heads), Pattern(heads)
    for number in range(HELD + 40):
        given = step_of(heads, number)
        apart = (ring(*given) - pattern(*given)).abs().max()
        if not apart <= 1e-5:
            raise AssertionError(f"token {number}: outputs are {apart:.1e} apart; nothing is timed")


def one_query(heads: int, kv_heads: int) -> Bar:
    """The stock kernel against the decode path, in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(1, heads, 1, SIZE, generator=generator).bfloat16()
    keys, values = torch.randn(2, 1, kv_heads, HELD, SIZE, generator=generator).bfloat16().unbind()
    inputs = Inputs(queries, keys, values, None, False, SIZE**-0.5)

    def ours() -> Tensor:
        return path_decode.head_outputs(Softmax(), inputs)

    def stock() -> Tensor:
        return F.scaled_dot_product_attention(queries, keys, values, enable_gqa=heads > kv_heads)

    apart = (ours() - stock()).abs().max()
    if not apart <= 1e-2:  # outputs of size 0.1, weights rounded to 8 bits
        raise AssertionError(f"outputs are {apart:.1e} apart; nothing is timed")
    times = best_times({"ours": lambda: [ours() for _ in range(10)], "stock": lambda: [stock() for _ in range(10)]}, rounds=20)
    what = f"attention of one query, {heads} heads on {kv_heads}, {HELD} keys, bfloat16: SDPA ÷ ours"
    return Bar("10", what, times["stock"] / times["ours"], ">=", 3.0)


if __name__ == "__main__":
    exit_with(measure)
