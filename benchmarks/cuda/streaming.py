"""A decoding step in a full ``SinkCache`` against ``StaticCache``, the bytes it must read, and itself much later."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _bench import Bench, Candidate
from torch import Tensor
from transformers import Cache, LlamaConfig, LlamaForCausalLM, StaticCache

from sinklab.attention.seam import register_operation
from sinklab.operations.softmax import Softmax
from sinklab.policies.sink_window import SinkWindow
from sinklab.streaming.cache import SinkCache
from sinklab.streaming.host import compile_steps
from sinklab.streaming.layer import SlotLayer
from sinklab.streaming.table import SlotTable
from sinklab.streaming.traits import Rotation

SINKS, STEPS = 4, 16


def decode(held: int, bench: Bench) -> None:
    """One token of a model of 0.4 billion parameters, eager and compiled into CUDA graphs."""
    held = 128 if bench.quick else held
    model = make_model(bench)
    text = torch.randint(model.config.vocab_size, (1, held + 64), device=bench.device)
    label = f"Llama {model.config.num_hidden_layers} × {model.config.hidden_size}, bfloat16, {held:,} held"
    candidates: dict[str, Candidate] = {}
    keep: list[object] = []  # caches are known to their models by weak references
    with torch.no_grad():
        with bench.attempt(f"SinkCache ({label})"):
            ours = filled(model, SinkCache(model, num_sinks=SINKS, window=held - SINKS - 1, chunk=1024), text[:, :held])
            keep.append(ours)
            for name, backend in (("ours", "sdpa"), ("ours, sinklab_softmax", register_operation(Softmax()))):
                switch = functools.partial(model.set_attn_implementation, backend)
                candidates[name] = Candidate(steps(model, ours, text), before=switch)
        with bench.attempt(f"StaticCache ({label})"):
            static = filled(model, StaticCache(config=model.config, max_cache_len=held), text[:, : held - STEPS])
            switch = functools.partial(model.set_attn_implementation, "sdpa")
            back = functools.partial(rewind, static)
            candidates["static"] = Candidate(steps(model, static, text), before=switch, after=back)
        for name, candidate in candidates.items():
            with bench.attempt(f"{name}, first steps ({label})"):
                bench.times({name: candidate}, 0.0, least=1)
        model.set_attn_implementation("sdpa")
        mode = {"mode": "reduce-overhead"} if bench.cuda else {"backend": "eager"}
        with bench.attempt(f"SinkCache, compiled ({label})"):
            compiled = copy.deepcopy(model)
            cache = like(ours, SinkCache(compiled, num_sinks=SINKS, window=held - SINKS - 1), compiled, text)
            keep += [compiled, cache]
            compile_steps(compiled, **mode)
            apart = gap(compiled, cache, model, copy.deepcopy(ours), text)
            told_skips(bench, f"SinkCache ({label})")
            bench.bar("17", f"compiled and eager step, largest gap of logits in deviations ({label})", apart, "<=", 0.2, "")
            candidate = Candidate(steps(compiled, cache, text))
            bench.times({"compiled": candidate}, 0.0, least=1)
            candidates["ours, compiled"] = candidate
        with bench.attempt(f"StaticCache, compiled ({label})"):
            peer = copy.deepcopy(model)
            cache = filled(peer, StaticCache(config=peer.config, max_cache_len=held), text[:, : held - STEPS])
            keep += [peer, cache]
            peer.model.forward = torch.compile(peer.model.forward, dynamic=False, **mode)
            candidate = Candidate(steps(peer, cache, text), after=functools.partial(rewind, cache))
            bench.times({"compiled": candidate}, 0.0, least=1)
            candidates["static, compiled"] = candidate
            told_skips(bench, f"SinkCache and StaticCache ({label})")
        bench.turn()
        with bench.attempt(f"steps ({label})"):
            source = bench.randn(2**20 if bench.quick else 2**29)
            target = torch.empty_like(source)
            times = bench.times({**candidates, "copy": lambda number: target.copy_(source)}, 2.0)
            rate = 2 * source.nbytes / times.pop("copy") * 1e3
            step = {name: value / STEPS for name, value in times.items()}
            read = bytes_of(model, ours)
            report(bench, label, step, read, rate)


def told_skips(bench: Bench, what: str) -> None:
    """Tell how often CUDA graphs were left out in this process: then the compiled steps are launched one kernel at a time."""
    skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    bench.figure("17", f"compiled graphs without CUDA graphs so far, {what}", skips, "")


def report(bench: Bench, label: str, step: dict[str, float], read: dict[str, int], rate: float) -> None:
    """The bars of one cache size.

    Args:
        step: milliseconds of each way.
        read: bytes of the weights, and of the keys and values.
        rate: bytes a second that a copy reads and writes.
    """
    floor = sum(read.values()) / rate * 1e3
    details = {"ms": step, "bytes": read, "floor_ms": floor}
    bench.figure("17", "copy of 1 GiB, read and written", rate / 1e9, "GB/s")
    for name, value in step.items():
        bench.figure("11", f"a step: {name} ({label})", value, "ms")
    for one, other in (("ours", "static"), ("ours, sinklab_softmax", "static"), ("ours, compiled", "static, compiled")):
        if one in step and other in step:
            what = f"a step, SinkCache ÷ StaticCache: {one} ÷ {other} ({label})"
            bench.bar("11", what, step[one] / step[other], "<=", 1.3, **details)
    mine, theirs = ([name for name in step if name.startswith(who)] for who in ("ours", "static"))
    if mine and theirs:
        first, second = (min(names, key=lambda name: step[name]) for names in (mine, theirs))
        what = f"a step, best SinkCache ÷ best StaticCache: {first} ÷ {second} ({label})"
        bench.bar("11", what, step[first] / step[second], "<=", 1.3)
    for name in ("ours, compiled", "static, compiled"):
        if name in step:
            what = f"share of the byte floor: {name} ({label})"
            if name.startswith("ours"):
                bench.bar("17", what, floor / step[name], ">=", 0.6, "", **details)
            else:
                bench.figure("17", what, floor / step[name], "")


def far(bench: Bench) -> None:
    """The same cache near the beginning and a million tokens on: as fast, and with the same logits."""
    held, near = (128, 256) if bench.quick else (4096, 8192)
    model = make_model(bench)
    text = torch.randint(model.config.vocab_size, (1, near + 64), device=bench.device)
    label = f"Llama {model.config.num_hidden_layers} × {model.config.hidden_size}, bfloat16, {held:,} held"
    caches: dict[int, SinkCache] = {}
    with bench.attempt(f"far away, filling ({label})"), torch.no_grad():
        cache = SinkCache(model, num_sinks=SINKS, window=held - SINKS - 1)
        caches[near] = filled(model, cache, text[:, :near], 2048)
        caches[1_000_000] = copy.deepcopy(cache)
        ring = held - SINKS
        advance(caches[1_000_000], (1_000_000 - near) // ring * ring)
    bench.turn()
    with bench.attempt(f"far away ({label})"), torch.no_grad():
        logits = {
            position: torch.cat(
                [model(text[:, at : at + 1], past_key_values=cache).logits for at in range(near, near + 8)], dim=1
            )
            for position, cache in caches.items()
        }
        times = bench.times({str(position): steps(model, cache, text) for position, cache in caches.items()}, 2.0)
        ratio = times["1000000"] / times[str(near)]
        what = f"a step at position 1,000,000 ÷ at {near:,} ({label})"
        bench.bar("11", what, ratio, "<=", 1.05, ms={name: value / STEPS for name, value in times.items()})
        bench.bar("11", what, ratio, ">=", 0.95)
        apart = float((logits[near] - logits[1_000_000]).abs().max())
        bench.bar("12", f"logits at position 1,000,000 against those at {near:,} ({label})", apart, "<=", 1e-4, "")


def layer(bench: Bench) -> None:
    """One attention layer: slots written in place, and StreamingLLM's pattern."""
    bench.turn()
    for dtype, within in ((torch.float32, 1e-4), (torch.bfloat16, 3e-2)):
        what = f"decoding layer, 16 heads of 64, {str(dtype).removeprefix('torch.')}: outputs of the pattern and ours"
        with bench.attempt(what), torch.no_grad():
            held = 256
            ring, pattern = Ring(bench, held, dtype), Pattern(bench, held, dtype)
            apart = 0.0
            for number in range(held + 24):
                token = bench.randn(3, 1, 16, 1, 64, dtype=dtype, seed=number)
                apart = max(apart, float((ring(*token) - pattern(*token)).abs().max()))
            bench.bar("10", what, apart, "<=", within, "")
    for held in (64,) if bench.quick else (4096, 32768):
        what = f"decoding layer, 16 heads of 64, {held:,} held, bfloat16: StreamingLLM's pattern ÷ ours"
        with bench.attempt(what), torch.no_grad():
            tokens = bench.randn(STEPS, 3, 1, 16, 1, 64)
            ring, pattern = Ring(bench, held, torch.bfloat16), Pattern(bench, held, torch.bfloat16)
            ring.fill(tokens[0])
            pattern.keys, pattern.values = (bench.randn(1, 16, held, 64, seed=seed) for seed in (1, 2))
            times = bench.times({"ours": repeated(ring, tokens), "pattern": repeated(pattern, tokens)}, 1.0)
            details = {name: value / STEPS for name, value in times.items()}
            bench.bar("10", what, times["pattern"] / times["ours"], ">=", 3.0, ms=details)


# --- models and caches ------------------------------------------------------------------------------------------------------


def make_model(bench: Bench) -> LlamaForCausalLM:
    """About 0.4 billion random parameters in bfloat16, four query heads to a key-value head; frequencies stay float32."""
    width = 64 if bench.quick else 1536
    config = LlamaConfig(
        vocab_size=256 if bench.quick else 16384,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2 if bench.quick else 12,
        num_attention_heads=4 if bench.quick else 12,
        num_key_value_heads=1 if bench.quick else 3,
        max_position_embeddings=1 << 17,
    )
    torch.manual_seed(0)
    with torch.device(bench.device):
        return LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16).eval()


def filled(model: LlamaForCausalLM, cache: Cache, text: Tensor, piece: int = 4096) -> Cache:
    """The cache behind a text, read in pieces."""
    for part in text.split(piece, dim=1):
        model(part, past_key_values=cache, logits_to_keep=1)
    return cache


def steps(model: LlamaForCausalLM, cache: Cache, text: Tensor) -> Callable[[int], None]:
    """Some steps, of tokens that are on the device already."""
    tokens = text[:, :STEPS].split(1, dim=1)

    def run(number: int) -> None:
        for token in tokens:
            model(token, past_key_values=cache)

    return run


def rewind(cache: StaticCache) -> None:
    """Take back the last steps."""
    for layer in cache.layers:
        layer.cumulative_length.sub_(STEPS)


def like(filled: SinkCache, cache: SinkCache, model: LlamaForCausalLM, text: Tensor) -> SinkCache:
    """The cache of a copy of the model, holding what another holds, without reading it again."""
    model(text[:, :8], past_key_values=cache)
    for mine, other in zip(cache.layers, filled.layers, strict=True):
        for name in mine.buffers:
            getattr(mine, name).copy_(getattr(other, name))
    table = filled.table
    cache.table.restore({name: value.clone() for name, value in table.state().items()}, table.counts())
    return cache


def gap(compiled: LlamaForCausalLM, cache: SinkCache, model: LlamaForCausalLM, eager: SinkCache, text: Tensor) -> float:
    """Largest difference of the logits of a few compiled steps to those of eager ones, in standard deviations."""
    worst = 0.0
    for at in range(8, 14):
        token = text[:, at : at + 1]
        expected = model(token, past_key_values=eager).logits.float()
        found = compiled(token, past_key_values=cache).logits.float()
        worst = max(worst, float((found - expected).abs().max() / expected.std()))
    return worst


def advance(cache: SinkCache, tokens: int) -> None:
    """Let the table say that so many more tokens, whole turns of the ring, have gone by, of which the last are those held."""
    table = cache.table
    pinned = len(table.pinned)
    table.seen = table.seen + tokens
    table.index[:, pinned:] += tokens
    table.columns += tokens
    table.base = table.base + tokens  # positions are counted from there: those of the keys in the ring stay


def bytes_of(model: LlamaForCausalLM, cache: SinkCache) -> dict[str, int]:
    """What a step cannot but read."""
    weights = sum(weight.nbytes for name, weight in model.named_parameters() if "embed_tokens" not in name)
    return {"weights": weights, "held": sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)}


# --- one layer --------------------------------------------------------------------------------------------------------------


def repeated(layer: Callable[[Tensor, Tensor, Tensor], Tensor], tokens: Tensor) -> Callable[[int], None]:
    def run(number: int) -> None:
        for one in tokens:
            layer(*one)

    return run


class Rotary:
    """Rotary positions as transformers applies them, tables gathered by position."""

    def __init__(self, bench: Bench, dtype: torch.dtype) -> None:
        self.frequencies = 10_000.0 ** -(torch.arange(0, 64, 2).double() / 64)
        angles = (torch.arange(1 << 17).double()[:, None] * self.frequencies).repeat(1, 2)
        self.cosines, self.sines = (table.to(bench.device, dtype) for table in (angles.cos(), angles.sin()))

    def __call__(self, states: Tensor, positions: Tensor | slice) -> Tensor:
        half = torch.cat((-states[..., 32:], states[..., :32]), dim=-1)
        return states * self.cosines[positions] + half * self.sines[positions]


class Ring:
    """A slot layer and the table that plans each of its steps; the table's share is counted in full, though layers share it."""

    def __init__(self, bench: Bench, held: int, dtype: torch.dtype) -> None:
        self.rotary = Rotary(bench, dtype)
        self.table = SlotTable(SinkWindow(num_sinks=SINKS, window=held - SINKS), bench.device)
        pairs = torch.arange(32, device=bench.device)
        self.layer = SlotLayer(self.table, Rotation(self.rotary.frequencies.to(bench.device), pairs, pairs + 32, 64))

    def fill(self, token: Tensor) -> None:
        """Random keys and values in every slot, as behind two turns of the ring."""
        for _ in range(SINKS + 1):
            self(*token)
        table, slots = self.table, self.table.policy.num_slots
        seen = torch.arange(2 * slots)
        # The last token that wants a slot has it; pinned ones have theirs for good.
        table.index = torch.full((1, slots), -1).scatter_reduce_(1, table.policy.slots(seen)[None], seen[None], "amax")
        table.seen, table.columns, table.full = torch.tensor([len(seen)]), len(seen), True
        for states in (self.layer.keys, self.layer.values):
            states[:, :, SINKS:].normal_()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        step = self.table.step = self.table.plan(1, None)
        position = step.position_ids[0]
        keys, values = self.layer.update(self.rotary(key, position), value)
        return F.scaled_dot_product_attention(self.rotary(query, position), keys, values)


class Pattern:
    """StreamingLLM's pattern (arXiv 2309.17453): keys are held unrotated, and all of them are rotated for every token."""

    def __init__(self, bench: Bench, held: int, dtype: torch.dtype) -> None:
        self.rotary, self.held = Rotary(bench, dtype), held
        self.keys = self.values = torch.zeros(1, 16, 0, 64, device=bench.device, dtype=dtype)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = torch.cat((self.keys, key), dim=2), torch.cat((self.values, value), dim=2)
        length = keys.shape[2]
        standing = self.rotary(keys, slice(length))
        scores = torch.matmul(self.rotary(query, slice(length - 1, length)), standing.transpose(2, 3)) / 64**0.5
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        self.keys, self.values = keys, values
        if length > self.held:
            self.keys, self.values = (
                torch.cat((states[:, :, :SINKS], states[:, :, length - self.held + SINKS :]), dim=2)
                for states in (keys, values)
            )
        return torch.matmul(weights, values)


PARTS: dict[str, Callable[[Bench], None]] = {
    "stream4k": functools.partial(decode, 4096),
    "stream32k": functools.partial(decode, 32768),
    "layer": layer,
    "far": far,
}
