"""Column statistics on the device: every way against float64, in linear memory, and the log-sum-exp of other kernels."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from tests.attention.column_calls import make_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from sinklab.attention.call import AttentionCall
from sinklab.attention.statistics.blocked import blocked_statistics
from sinklab.attention.statistics.columns import LogSumExpCapture, _choose, column_statistics
from sinklab.attention.statistics.on_gpu import gpu_is_exact
from sinklab.attention.visibility import Causal, Everything, Keys, Window

LENGTH = 4096
NEEDS = frozenset({"columns", "log_sum_exp"})
ROWS = frozenset({"columns", "mass", "log_sum_exp", "entropy", "maximum", "scores"})
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def on(device, call: AttentionCall) -> AttentionCall:
    """The call with its tensors on a device."""
    moved = {
        field.name: value.to(device)
        for field in dataclasses.fields(call)
        if isinstance(value := getattr(call, field.name), torch.Tensor)
    }
    return dataclasses.replace(call, **moved)


def in_float64(call: AttentionCall) -> AttentionCall:
    wide = {name: getattr(call, name).double() for name in ("queries", "keys", "values")}
    sinks = None if call.sink_scores is None else call.sink_scores.double()
    return dataclasses.replace(call, **wide, sink_scores=sinks, log_sum_exp=None)


def a_call(device, *, dtype, full=False, heads=4, kv_heads=2, head_dim=64, length=LENGTH, padded=False, sink=False):
    counted = None
    if padded:
        counted = torch.ones(2, length, dtype=torch.bool)
        counted[1, -length // 4 :] = False
    visible = Everything(device) if full else Causal(0, device)
    call = make_call(
        heads=heads, kv_heads=kv_heads, q_len=length, head_dim=head_dim, dtype=dtype, visible=visible, counted=counted
    )
    if sink:
        call = dataclasses.replace(call, sink_scores=torch.linspace(-2.0, 8.0, heads)[None, :, None])
    return on(device, call)


CALLS = {
    "causal": {},
    "full": {"full": True},
    "one key-value head for each": {"kv_heads": 4},
    "one key-value head": {"kv_heads": 1},
    "padding": {"padded": True},
    "sink scores": {"sink": True},
    "sink scores, full, padding": {"sink": True, "full": True, "padded": True},
    "96": {"head_dim": 96},
    "128": {"head_dim": 128},
    "4000 tokens": {"length": 4000},
}


def reference_of(call, needs=NEEDS):
    """In float64, and the call with the log-sum-exp of it, rounded as a kernel gives it."""
    wide = in_float64(call)
    reference = blocked_statistics(wide, needs)
    # Of all queries, those of padding too: that is what a kernel gives.
    everything = dataclasses.replace(wide, query_positions=wide.query_positions.clamp(min=0))
    log_sum_exp = blocked_statistics(everything, frozenset({"log_sum_exp"})).log_sum_exp
    return reference, dataclasses.replace(call, log_sum_exp=log_sum_exp.float())


def assert_near(found, expected, bound, name):
    """Relative to each number; below a hundredth of a query's weight, relative to that."""
    error = float(((found.double() - expected).abs() / expected.abs().clamp(min=1e-2)).max())
    assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}"


@pytest.mark.parametrize("dtype", list(UNIT), ids=str)
@pytest.mark.parametrize("settings", CALLS.values(), ids=list(CALLS))
def test_sums_against_float64(device, settings, dtype):
    length = settings.get("length", LENGTH) if device.type == "cuda" else 300
    call = a_call(device, dtype=dtype, **{**settings, "length": length})
    reference, call = reference_of(call)
    # A weight is exp of a difference of a score and a log-sum-exp, both below 16 here. A score sums up to 128 products: the
    # worst case is 128 roundings of the sum of their sizes, below 128; and a column sums up to 4,096 weights.
    sums = (128 + 16) * 2.0**-22
    for method in (*(("triton",) if device.type == "cuda" else ()), "blocked", "auto"):
        # The order of a product's columns is of no concern to a sum over padding: nothing is left of it.
        got = column_statistics(call, NEEDS, method=method)
        assert_near(got.column_sum, reference.column_sum, sums, f"{method}, column_sum")
        assert torch.equal(got.column_count.expand_as(reference.column_count), reference.column_count)
        assert_near(got.log_sum_exp, reference.log_sum_exp, sums, f"{method}, log_sum_exp")


@pytest.mark.parametrize("dtype", list(UNIT), ids=str)
@pytest.mark.parametrize("method", ["blocked", "fused", "triton", "auto"])
def test_what_rows_look_like(device, dtype, method):
    if method == "triton" and device.type != "cuda":
        pytest.skip("the kernels are for GPUs")
    call = a_call(device, dtype=dtype, sink=True, padded=True, length=1000)
    reference, call = reference_of(call, ROWS)
    got = column_statistics(call, ROWS, method=method)
    for name in ("column_sum", "row_mass", "null_mass", "log_sum_exp", "row_entropy", "row_max", "score_mean"):
        # As above; an entropy multiplies a weight's error by its logarithm, below 16.
        assert_near(getattr(got, name), getattr(reference, name), 16 * (64 + 16) * 2.0**-22, f"{method}, {name}")


BANDS = {
    "window": lambda left: Causal() & Window(100),
    "narrow window": lambda left: Causal() & Window(7),
    "padding on the left": lambda left: Causal() & Keys(left),
    "padding on the left, window": lambda left: Causal() & Keys(left) & Window(100),
    "padding, full": lambda left: Keys(left),
    "window to both sides": lambda left: Window(30),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("band", BANDS)
def test_the_kernels_on_bands_of_visible_keys(cuda, band, dtype):
    """With NaN in what is padding: nothing of it may be read into a number."""
    left = torch.ones(2, 1000, dtype=torch.bool)
    left[1, :333] = False
    counted = left if "padding" in band else None
    call = make_call(kv_heads=2, q_len=1000, head_dim=80, dtype=dtype, visible=BANDS[band](left), counted=counted)
    reference = blocked_statistics(in_float64(call), ROWS)
    if counted is not None:
        call.queries[1, :, :333] = call.keys[1, :, :333] = torch.nan
    moved = dataclasses.replace(on(cuda, call), visible=BANDS[band](left.to(cuda)))
    for needs in (ROWS, NEEDS, frozenset({"columns"})):
        got = column_statistics(moved, needs, method="triton")
        for field in dataclasses.fields(got):
            found, expected = getattr(got, field.name), getattr(reference, field.name)
            if isinstance(found, torch.Tensor):
                bound = 16 * (80 + 16) * 2.0**-22  # as of what rows look like, below
                assert_near(found.cpu().expand_as(expected), expected, bound, f"{band}, {field.name}")


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 5000), (300, 5000)])
def test_the_kernels_behind_cached_keys(cuda, q_len, kv_len):
    call = make_call(kv_heads=2, q_len=q_len, kv_len=kv_len, head_dim=64, dtype=torch.bfloat16)
    reference = blocked_statistics(in_float64(call), ROWS)
    got = column_statistics(dataclasses.replace(on(cuda, call), visible=Causal(kv_len - q_len, cuda)), ROWS, method="triton")
    for name in ("column_sum", "log_sum_exp", "row_entropy", "row_max", "score_mean"):
        assert_near(getattr(got, name).cpu(), getattr(reference, name), 16 * (64 + 16) * 2.0**-22, name)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_kernels_are_exact_and_auto_takes_them(cuda, dtype, head_dim):
    here = torch.device("cuda", torch.cuda.current_device())
    assert gpu_is_exact(here, dtype, head_dim)
    call = a_call(cuda, dtype=dtype, head_dim=head_dim, length=600)
    assert _choose(call) == "triton"


@pytest.mark.parametrize("dtype", list(UNIT), ids=str)
def test_memory_grows_with_the_length(cuda, dtype):
    heads, length, head_dim = 4, 32_768, 64
    call = a_call(cuda, dtype=dtype, heads=heads, length=length, head_dim=head_dim)
    call = dataclasses.replace(
        call, **{name: getattr(call, name)[:1] for name in ("queries", "keys", "values")},
        **{name: getattr(call, name)[:1] for name in ("query_positions", "key_positions", "query_documents", "key_documents")},
    )  # fmt: skip
    call = dataclasses.replace(call, log_sum_exp=torch.full((1, heads, length), 8.0, device=cuda))
    column_statistics(dataclasses.replace(call, **{
        name: getattr(call, name)[:, :, :1024] for name in ("queries", "keys", "values", "log_sum_exp")
    }, **{
        name: getattr(call, name)[:, :1024]
        for name in ("query_positions", "key_positions", "query_documents", "key_documents")
    }), NEEDS, method="auto")  # fmt: skip  # the self-check of the kernel, once
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    column_statistics(call, NEEDS, method="auto")
    extra = torch.cuda.max_memory_allocated() - before
    # Far more than the sums: 16 tensors of (heads, length, 72) in float32.
    assert extra <= 16 * heads * length * (head_dim + 8) * 4
    assert extra < heads * length**2 / 8  # a matrix of one byte for each weight would be eight times as large


BACKENDS = {
    "flash": (SDPBackend.FLASH_ATTENTION, (torch.bfloat16, torch.float16)),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, (torch.float32, torch.bfloat16, torch.float16)),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, (torch.bfloat16, torch.float16)),
    "math": (SDPBackend.MATH, (torch.float32,)),
}


@pytest.mark.parametrize(
    ("backend", "dtype"), [(name, dtype) for name, (_, dtypes) in BACKENDS.items() for dtype in dtypes], ids=str
)
def test_the_captured_log_sum_exp(cuda, backend, dtype):
    """Right, or none; the output is that of the kernel alone. 77 queries: kernels pad rows to 32, 64 or 128."""
    generator = torch.Generator().manual_seed(0)
    seen = set()
    for q_len, kv_len, kv_heads, kind in (
        (77, 77, 4, "causal"), (77, 77, 4, "full"), (77, 77, 4, "mask"), (1, 77, 4, "full"), (77, 77, 2, "causal"),
        (256, 256, 4, "causal"),
    ):  # fmt: skip
        if backend == "flash" and kind == "mask":
            continue
        shapes = (2, 4, q_len, 64), (2, kv_heads, kv_len, 64), (2, kv_heads, kv_len, 64)
        queries, keys, values = (torch.randn(*shape, generator=generator).to(cuda, dtype) for shape in shapes)
        visible = torch.ones(q_len, kv_len, dtype=torch.bool, device=cuda)
        options: dict = {"enable_gqa": kv_heads != 4}
        if kind == "causal":
            visible, options = visible.tril(), {**options, "is_causal": True}
        elif kind == "mask":
            visible = visible.tril()
            visible[:, 5:9] = False
            visible[5:9, 0] = True
            options = {**options, "attn_mask": visible}
        scores = (queries.double() @ keys.double().repeat_interleave(4 // kv_heads, 1).mT / 8).masked_fill(~visible, -torch.inf)
        expected = torch.logsumexp(scores, -1)
        for mode in ("inference", "no_grad", "grad"):
            leaves = [tensor.detach().requires_grad_(mode == "grad") for tensor in (queries, keys, values)]
            context = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": torch.enable_grad}[mode]
            with sdpa_kernel(BACKENDS[backend][0]), context():
                try:
                    alone = F.scaled_dot_product_attention(*leaves, **options)
                except RuntimeError as error:  # the kernel does not take such a call, with sinklab or without
                    if "No available kernel" not in str(error):
                        raise
                    continue
                with LogSumExpCapture() as captured:
                    watched = F.scaled_dot_product_attention(*leaves, **options)
            assert torch.equal(watched, alone)
            found = captured.log_sum_exp
            seen.add((mode, found is not None))
            if found is not None:
                assert found.shape == expected.shape
                assert found.dtype == torch.float32
                # Products of half precision are exact in float32, of which up to 64 are summed; scores are below 8.
                assert float((found.double() - expected).abs().max()) <= 64 * 8 * 2.0**-24, (q_len, kv_len, kind, mode)
    assert seen, f"{backend} took none of the calls"
    if backend == "math":
        assert not any(given for _, given in seen)
    else:
        assert ("grad", True) in seen
