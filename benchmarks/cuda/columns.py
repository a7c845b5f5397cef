"""Column statistics against the forward that they describe, at 8k, 32k and 128k tokens; and ``measure()`` of a whole model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _bench import Bench
from column_statistics import eager_with_statistics
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from sinklab import measure as measure_model
from sinklab.attention.call import AttentionCall, Site, Statistics
from sinklab.attention.statistics import columns
from sinklab.attention.statistics.columns import LogSumExpCapture, column_statistics
from sinklab.attention.visibility import Causal
from sinklab.models.loading import wrap_model
from sinklab.registry import operations

COLUMNS = frozenset({"columns"})
ROWS = frozenset({"columns", "entropy", "maximum"})
aten = torch.ops.aten

KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]] = {
    "flash": lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False),
    "cudnn": lambda q, k, v: aten._scaled_dot_product_cudnn_attention(q, k, v, None, False, 0.0, True),
    "efficient": lambda q, k, v: aten._scaled_dot_product_efficient_attention(q, k, v, None, False, 0.0, True),
}
"""The kernels by name; outputs come first, and the log-sum-exp second, where there is one."""


def sums(bench: Bench) -> None:
    """Column sums: times, errors."""
    lengths = (520, 640) if bench.quick else (8192, 32768, 131072)
    bench.turn()
    for length in lengths:
        for heads in (8, 32) if length < lengths[-1] or bench.quick else (8,):
            for size in (64, 128):
                label = f"bfloat16, T = {length:,}, {heads} heads of {size}"
                with bench.attempt(f"column sums ({label})"), torch.no_grad():
                    of_length(bench, label, length, heads, size, torch.bfloat16)
    for length in lengths[:2]:
        label = f"float32, T = {length:,}, 8 heads of 64"
        with bench.attempt(f"column sums ({label})"), torch.no_grad():
            of_length(bench, label, length, 8, 64, torch.float32)
    with bench.attempt("outputs under capture"), torch.no_grad():
        bench.bar("15", "outputs under capture, largest difference", untouched(bench, lengths[0]), "<=", 0.0, "")


def of_length(bench: Bench, label: str, length: int, heads: int, size: int, dtype: torch.dtype) -> None:
    """The bars of one length."""
    calls = [
        make_call(bench, length, heads, size, dtype, seed)
        for seed in range(bench.sets(3 * length * heads * size * dtype.itemsize))
    ]
    worst, way = error(calls[0])
    bench.bar("15", f"largest relative error of a column sum ({label})", worst, "<=", 1e-2, "", way=way)

    def at(number: int) -> AttentionCall:
        return calls[number % len(calls)]

    candidates = {"default": lambda number: forward(at(number)), "total": lambda number: with_statistics(at(number), COLUMNS)}
    names = serving(calls[0])
    for name in names:
        candidates[name] = lambda number, name=name: KERNELS[name](at(number).queries, at(number).keys, at(number).values)
    if "flash" in names:
        candidates["flash + sums"] = lambda number: flash_with_sums(at(number))
    times = bench.times(candidates, 0.5)
    picked = kernel_of(calls[0])
    details = {"ms": times, "way": way, "forward": picked}
    bench.bar(
        "15", f"forward ({picked}) + column sums ÷ forward ({label})", times["total"] / times["default"], "<=", 2.0, **details
    )
    if "flash" in names:
        bench.bar("15", f"flash + column sums ÷ flash ({label})", times["flash + sums"] / times["flash"], "<=", 2.0)
    if names:
        best = min(names, key=lambda name: times[name])
        bench.figure("15", f"forward + column sums ÷ best forward, {best} ({label})", times["total"] / times[best])
        flops = 2 * length * length * size * heads  # causal
        bench.figure("15", f"best forward, {best} ({label})", flops / times[best] / 1e9, "TFLOP/s")


def rows(bench: Bench) -> None:
    """Column sums with the entropy and the maximum of every row; not at 128k tokens, where a call takes seconds."""
    lengths = (520, 640) if bench.quick else (8192, 32768)
    bench.turn()
    for length in lengths:
        label = f"bfloat16, T = {length:,}, 8 heads of 64"
        with bench.attempt(f"rows ({label})"), torch.no_grad():
            calls = [make_call(bench, length, 8, 64, torch.bfloat16, seed) for seed in range(2)]
            call = calls[0]
            with LogSumExpCapture() as captured:
                forward(call)
            way = columns._choose(dataclasses.replace(call, log_sum_exp=captured.log_sum_exp), ROWS)
            times = bench.times(
                {
                    "forward": lambda number, calls=calls: forward(calls[number % 2]),
                    "total": lambda number, calls=calls: with_statistics(calls[number % 2], ROWS),
                },
                1.0,
            )
            what = f"forward + column sums, entropy, maximum ÷ forward ({label}; {way})"
            bench.bar("15", what, times["total"] / times["forward"], "<=", 2.0, ms=times)
    length = lengths[0]
    label = f"bfloat16, T = {length:,}, 8 heads of 64"
    with bench.attempt(f"eager matrix ({label})"), torch.no_grad(), torch.device(bench.device):
        call = make_call(bench, length, 8, 64, torch.bfloat16, 0)
        times = bench.times(
            {
                "eager": lambda number: eager_with_statistics(call),
                "rows": lambda number: with_statistics(call, ROWS),
                "sums": lambda number: with_statistics(call, COLUMNS),
            },
            1.0,
        )
        bench.figure("2", f"eager matrix + statistics ÷ ours, with rows ({label})", times["eager"] / times["rows"], ms=times)
        bench.bar("2", f"eager matrix + statistics ÷ ours, column sums ({label})", times["eager"] / times["sums"], ">=", 3.5)
        eager, ours = bench.peak(lambda: eager_with_statistics(call)), bench.peak(lambda: with_statistics(call, COLUMNS))
        bench.bar("2", f"extra memory ÷ eager's ({label})", ours / eager, "<=", 0.05, mib={"ours": ours, "eager": eager})


def memory(bench: Bench) -> None:
    """Peak memory beyond the inputs, and how it grows."""
    lengths = (256, 1024) if bench.quick else (8192, 32768, 131072)
    bench.turn()
    for size, needs, what in ((64, COLUMNS, "column sums"), (128, COLUMNS, "column sums"), (64, ROWS, "column sums and rows")):
        found: dict[int, float] = {}
        tried = lengths[:2] if needs is ROWS else lengths
        for length in tried:
            label = f"bfloat16, T = {length:,}, 8 heads of {size}"
            with bench.attempt(f"memory of {what} ({label})"), torch.no_grad():
                call = make_call(bench, length, 8, size, torch.bfloat16, 0)
                found[length] = bench.peak(lambda call=call, needs=needs: with_statistics(call, needs))
                alone = bench.peak(lambda call=call: forward(call))
                bench.figure("6", f"extra memory, forward + {what} ({label})", found[length], "MiB", forward=alone)
        for shorter, longer in itertools.pairwise(tried):
            if shorter in found and longer in found:
                label = f"bfloat16, 8 heads of {size}"
                grown = f"memory of {what} at {longer:,} ÷ at {shorter:,} tokens ({label})"
                bench.bar("6", grown, found[longer] / found[shorter], "<=", 4.4)


def model(bench: Bench) -> None:
    """``measure()`` of a Llama with random weights against the model's own forward."""
    length, width = (256, 64) if bench.quick else (4096, 768)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512 if bench.quick else 32000,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=2 if bench.quick else 12,
        num_attention_heads=width // 64 or 1,
        max_position_embeddings=length,
    )
    with torch.device(bench.device):
        llama = LlamaForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    loaded = wrap_model(llama.eval(), name="llama, random weights")
    tokens = torch.randint(config.vocab_size, (1, length), device=bench.device)

    def measured(probes: tuple[str, ...]) -> Callable[[int], object]:
        return lambda number: measure_model(
            loaded, probes=probes, corpus="random_tokens", seq_len=length, samples=4, batch_size=1, bos="none"
        )

    def passes(number: int) -> object:
        for _ in range(4):
            result = loaded.model(input_ids=tokens, use_cache=False, logits_to_keep=1)
        return result

    bench.turn()
    million = sum(weight.numel() for weight in llama.parameters()) / 1e6
    label = f"{million:.0f}M parameters, bfloat16, 4 texts of {length:,} tokens"
    for probes, limit in ((("sink_rate",), 2.0), (("sink_rate", "attention_received", "entropy"), 2.0)):
        what = f"measure() with {', '.join(probes)} ÷ forward ({label})"
        with bench.attempt(what), torch.no_grad():
            times = bench.times({"forward": passes, "measure": measured(probes)}, 1.5)
            bench.bar("end to end", what, times["measure"] / times["forward"], "<=", limit, ms=times)


# --- calls ------------------------------------------------------------------------------------------------------------------


def make_call(bench: Bench, length: int, heads: int, size: int, dtype: torch.dtype, seed: int) -> AttentionCall:
    """A causal softmax call of normal random numbers, one sample."""
    queries, keys, values = (bench.randn(1, heads, length, size, dtype=dtype, seed=3 * seed + part) for part in range(3))
    positions = torch.arange(length, device=bench.device)[None]
    documents = torch.zeros_like(positions)
    return AttentionCall(
        site=Site("benchmark", 0),
        queries=queries,
        keys=keys,
        values=values,
        scaling=size**-0.5,
        visible=Causal(0, bench.device),
        operation=operations.make("softmax"),
        query_positions=positions,
        key_positions=positions,
        query_documents=documents,
        key_documents=documents,
    )


def forward(call: AttentionCall) -> Tensor:
    return F.scaled_dot_product_attention(call.queries, call.keys, call.values, is_causal=True)


def with_statistics(call: AttentionCall, needs: frozenset[str]) -> tuple[Tensor, Statistics]:
    """The forward with whatever kernel torch takes, its log-sum-exp caught, and the statistics."""
    with LogSumExpCapture() as captured:
        output = forward(call)
    return output, column_statistics(dataclasses.replace(call, log_sum_exp=captured.log_sum_exp), needs)


def flash_with_sums(call: AttentionCall) -> tuple[Tensor, Statistics]:
    """The flash kernel by name, and the statistics."""
    output, log_sum_exp = KERNELS["flash"](call.queries, call.keys, call.values)[:2]
    return output, column_statistics(dataclasses.replace(call, log_sum_exp=log_sum_exp), COLUMNS)


def serving(call: AttentionCall) -> list[str]:
    """The kernels that take such tensors."""
    found = []
    for name, kernel in KERNELS.items():
        if name == "cudnn" and call.queries.dtype == torch.float32:
            continue  # torch never gives it such tensors; called by name it takes them, in a sixth of the time of any other
        try:
            kernel(call.queries, call.keys, call.values)
        except (RuntimeError, NotImplementedError):
            continue
        found.append(name)
    return found


def kernel_of(call: AttentionCall) -> str:
    """The kernel that torch takes by itself."""
    code = torch._fused_sdp_choice(call.queries, call.keys, call.values, None, 0.0, True)
    return torch.nn.attention.SDPBackend(code).name.lower().removesuffix("_attention")


def error(call: AttentionCall) -> tuple[float, str]:
    """Largest relative error of a column sum of two heads against float64, and the way that was taken."""
    with LogSumExpCapture() as captured:
        forward(call)
    given = dataclasses.replace(call, log_sum_exp=captured.log_sum_exp)
    found = column_statistics(given, COLUMNS).column_sum
    assert found is not None
    worst, length = 0.0, call.q_len
    for head in dict.fromkeys((0, call.num_heads - 1)):
        expected = torch.zeros(length, dtype=torch.float64, device=found.device)
        keys, rows = call.keys[0, head].double(), max(1, 2**26 // length)
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            scores = call.queries[0, head, start:stop].double() @ keys[:stop].mT * call.scaling
            hidden = torch.arange(stop, device=found.device) > torch.arange(start, stop, device=found.device)[:, None]
            expected[:stop] += torch.softmax(scores.masked_fill_(hidden, -torch.inf), dim=-1).sum(dim=0)
        worst = max(worst, float((found[0, head].double() / expected - 1).abs().max()))
    return worst, columns._choose(given, COLUMNS)


def untouched(bench: Bench, length: int) -> float:
    """Largest difference that the capture makes to outputs."""
    worst = 0.0
    for dtype in (torch.bfloat16, torch.float32):
        call = make_call(bench, length, 8, 64, dtype, 0)
        with LogSumExpCapture():
            watched = forward(call)
        worst = max(worst, float((watched - forward(call)).abs().max()))
    return worst


PARTS = {"columns": sums, "rows": rows, "memory": memory, "measure": model}
