"""attention_statistics(): equal to the dense matrix in float64, linear in memory, and clear about tensors that do not fit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sinklab import attention_statistics
from sinklab.errors import ConfigurationError, InputError


def tensors(
    q_len: int = 70, kv_len: int = 70, *, heads: int = 4, kv_heads: int = 2, width: int = 16, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    q = torch.randn(2, heads, q_len, width, generator=random, dtype=torch.float64) * 1.5
    k = torch.randn(2, kv_heads, kv_len, width, generator=random, dtype=torch.float64) * 1.5
    k[:, :, 0] = q.mean((1, 2))[:, None] * 8  # something of a sink
    return q.to(dtype), k.to(dtype)


def dense(q: Tensor, k: Tensor, visible: Tensor, scale: float, sinks: Tensor | None = None) -> dict[str, Tensor]:
    """Every statistic from the whole matrix, in float64."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~visible, -torch.inf)
    log_sum_exp = scores.logsumexp(-1)
    total = log_sum_exp if sinks is None else torch.logaddexp(log_sum_exp, sinks[None, :, None].double())
    weights = torch.exp(scores - total[..., None])
    alone = torch.exp(scores - log_sum_exp[..., None])
    return {
        "column_sum": weights.sum(2),
        "row_mass": weights.sum(-1),
        "null_mass": 1 - weights.sum(-1),
        "row_entropy": torch.special.entr(alone).sum(-1),
        "row_max": weights.amax(-1),
        "log_sum_exp": log_sum_exp,
    }


def causal(q: Tensor, k: Tensor) -> Tensor:
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])


RULES = {
    "causal": ({"causal": True}, causal),
    "full": ({"causal": False}, lambda q, k: torch.ones(1, 1, dtype=torch.bool)),
    "window": ({"causal": True, "window": 9}, lambda q, k: causal(q, k) & ~causal(q, k).tril(k.shape[2] - q.shape[2] - 9)),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lengths", [(70, 70), (13, 70), (600, 600)], ids=str)
def test_statistics_are_those_of_the_dense_matrix(rule, lengths):
    arguments, mask = RULES[rule]
    q, k = tensors(*lengths)
    visible = mask(q, k)
    found = attention_statistics(q, k, **arguments)
    # float64 on both sides: scores of some 30 carry 16 · 2⁻⁵³ · 30, a column sums 600 weights.
    for name, expected in dense(q, k, visible, 16**-0.5).items():
        torch.testing.assert_close(
            getattr(found, name), expected, atol=1e-10, rtol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )
    counts = visible.expand(q.shape[2], k.shape[2]).sum(0).float()
    assert torch.equal(found.column_count.expand(1, 1, -1)[0, 0], counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [70, 600])
def test_other_dtypes_are_worked_through_in_float32(dtype, length):
    q, k = tensors(length, length, dtype=dtype)
    found = attention_statistics(q, k, causal=True, scale=0.25)
    expected = dense(q, k, causal(q, k), 0.25)
    # A score is 16 products, each rounded by 2⁻²⁴ of the sum of their sizes (at most 16 · 5 · 40 · 0.25), and so is the
    # log-sum-exp; a weight carries their difference as a relative error. The fused way takes log2(e) of both besides.
    size = float((q.double().abs().amax() * k.double().abs().amax()) * 16 * 0.25)
    relative = 4 * 16 * 2**-24 * size
    assert relative < 0.01
    for name, value in expected.items():
        got = getattr(found, name)
        assert got.dtype == torch.float32
        allowed = relative * (value.abs() if name in ("column_sum", "row_max") else 1) * (7 if name == "row_entropy" else 1)
        assert ((got.double() - value).abs() <= allowed + 1e-6).all(), name


def test_padding_masks_and_masks_of_every_pair():
    q, k = tensors(20, 20, kv_heads=4)
    real = torch.ones(2, 20, dtype=torch.bool)
    real[1, :6] = False
    found = attention_statistics(q, k, causal=True, mask=real, query_mask=real)
    visible = causal(q, k) & real[:, None, None]
    same = attention_statistics(q, k, causal=False, mask=visible, query_mask=real)
    expected = dense(q[1:, :, 6:], k[1:, :, 6:], causal(q[1:, :, 6:], k[1:, :, 6:]), 0.25)
    for name, value in expected.items():
        rows = getattr(found, name)
        torch.testing.assert_close(rows[1:, :, 6:], value, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(getattr(same, name), rows, atol=1e-12, rtol=1e-12)
        assert (rows[1, :, :6] == 0).all(), name


def test_sink_logits_take_their_share():
    q, k = tensors()
    sinks = torch.tensor([-2.0, 0.0, 3.0, 8.0])
    found = attention_statistics(q, k, causal=True, sink_logits=sinks)
    for name, expected in dense(q, k, causal(q, k), 0.25, sinks).items():
        torch.testing.assert_close(getattr(found, name), expected, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(found.row_mass + found.null_mass, torch.ones_like(found.row_mass))


def test_gradients_are_neither_needed_nor_made():
    q, k = (tensor.requires_grad_() for tensor in tensors())
    assert not attention_statistics(q, k, causal=True).column_sum.requires_grad


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that any operator gives."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return result


@pytest.mark.parametrize("length", [2048, 4096])
def test_memory_is_linear(length):
    q, k = (tensor[:1, :1] for tensor in tensors(length, length, kv_heads=1, dtype=torch.float32))
    with Largest() as largest:
        attention_statistics(q, k, causal=True)
    # Tiles and blocks of a fixed size whatever the length, and copies of queries and keys with one more column.
    assert largest.numbers <= 2**20 < length**2


BAD = {
    "no tensor": (lambda q, k: ([1], k), {}, r"`q` is list; expected a floating-point tensor \(batch, heads"),
    "three axes": (lambda q, k: (q, k[0]), {}, r"`k` is torch\.float64 \(2, 70, 16\); expected a floating-point tensor"),
    "nothing": (lambda q, k: (q[:, :, :0], k), {}, r"`q` is torch\.float64 \(2, 4, 0, 16\); expected .* each at least 1"),
    "integers": (lambda q, k: (q, k.long()), {}, r"`k` is torch\.int64 .*; expected a floating-point tensor"),
    "dtypes": (lambda q, k: (q, k.float()), {}, r"has dtype torch\.float64 and `k` torch\.float32; .*k\.to\(dtype=q\.dtype\)"),
    "devices": (lambda q, k: (q, k.to("meta")), {}, r"`q` has device cpu and `k` meta; .*k\.to\(device=q\.device\)"),
    "NaN": (lambda q, k: (q, k.where(k < 5, torch.nan)), {}, r"`k` has NaN or infinities in \d+ of 4480 numbers"),
    "widths": (lambda q, k: (q, k[..., :8]), {}, r"\(2, 4, 70, 16\) and `k` \(2, 2, 70, 8\), .*width must be the same"),
    "samples": (lambda q, k: (q, k[:1]), {}, r"\(2, 4, 70, 16\) and `k` \(1, 2, 70, 16\), .*batch and width must be the same"),
    "heads": (lambda q, k: (q[:, :3], k), {}, r"\(2, 3, 70, 16\) and `k` \(2, 2, 70, 16\), .*or a multiple"),
    "later queries": (lambda q, k: (q, k[:, :, :60]), {}, r"`q` has 70 queries and `k` 60 keys; causal attention"),
    "mask of numbers": (lambda q, k: (q, k), {"mask": torch.ones(2, 70)}, r"`mask` is torch\.float32 \(2, 70\) on cpu"),
    "mask of a shape": (
        lambda q, k: (q, k), {"mask": torch.ones(70, 70).bool()}, r"of shape \(2, 70\) or \(2, 4, 70, 70\) on cpu"
    ),
    "query mask": (lambda q, k: (q, k), {"query_mask": torch.ones(2, 60).bool()}, r"`query_mask` is torch\.bool \(2, 60\)"),
    "sink logits": (lambda q, k: (q, k), {"sink_logits": torch.zeros(2)}, r"has shape \(2,\); .*each of the 4 heads"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_tensors_that_do_not_fit_are_refused_in_a_line(case):
    change, arguments, message = BAD[case]
    with pytest.raises(InputError, match=message) as error:
        attention_statistics(*change(*tensors()), causal=True, **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"causal": True, "scale": float("nan")}, r"`scale` is nan; expected a finite number"),
        ({"causal": True, "window": 2.5}, r"`window` is 2\.5; expected a whole number of keys"),
        ({"causal": True, "window": 0}, r"`window` is 0 with causal=True"),
        ({"causal": False, "window": 4}, r"`window` is 4 with causal=False"),
    ],
)
def test_settings_that_cannot_take_effect_are_refused(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        attention_statistics(*tensors(), **arguments)
