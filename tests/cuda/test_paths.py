"""Every operation on every path that serves it on the device, against the plain definition in float64: outputs and gradients.

Errors are norms: of the difference, over that of the float64 result. What may be left is rounding, ``u`` at a time.
"""

import pytest
import torch
from tests.attention import path_calls
from tests.attention.path_calls import holes, in_float64

from sinklab.attention.operation import HeadShape, Inputs
from sinklab.attention.paths.table import PATHS, choose, compute, obstacle
from sinklab.registry import operations

BATCH, HEADS, LENGTH, DIM = 2, 4, 300, 64
"""300 is no multiple of a tile of any kernel (16, 64, 128, 256)."""

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
DTYPES = list(UNIT)

OPERATIONS = [
    *({"name": name} for name in operations),
    {"name": "sigmoid", "bias": -2.0, "length_bias": True},
    {"name": "sigmoid", "normalize": True},
    {"name": "mlp_kernel", "normalize": True},
    {"name": "elu_kernel", "normalize": True},
    {"name": "gated", "element_wise": False, "initial_bias": 1.0},
]
BY_FLEX = ["softmax", "sink_logit", "key_value_bias", "qk_norm"]
"""Softmax operations that go through FlexAttention here: one kernel, without a null term, with one, with a null value, and
with mapped queries and keys."""


def named(settings: dict) -> str:
    return ",".join(str(value) for value in settings.values())


def tolerance(dtype: torch.dtype, length: int) -> float:
    """Roundings that a path may have and the plain one does not.

    In half precision weights, their products with values, mapped queries and keys, and gradients are rounded once each, and a
    rounded score moves its weight by its size, which is about 1: a dozen, of at most ``u``. In float32 sums are longer than
    that: worst case, a score of DIM products and an output of ``length``, forwards and again backwards.
    """
    return 12 * UNIT[dtype] if dtype != torch.float32 else 2 * (DIM + length) * UNIT[dtype]


def make_inputs(
    operation, device, dtype, *, kv_heads=2, visible=None, causal=True, length=LENGTH, queries=None, batch=BATCH, heads=HEADS
):
    """One call with its learned parameters away from their start, drawn on the CPU so that all devices have one."""
    torch.manual_seed(0)
    shape = HeadShape(num_heads=heads, num_kv_heads=kv_heads, head_dim=DIM, value_dim=DIM, hidden_size=48)
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        return torch.randn(*size, generator=generator)

    q_len = length if queries is None else queries
    state = {name: value + 0.3 * draw(*value.shape) for name, value in operation.parameters(shape).items()}
    if operation.needs_layer_input:
        state["layer_input"] = draw(batch, q_len, 48)
    tensors = [draw(batch, heads, q_len, DIM), draw(batch, kv_heads, length, DIM), draw(batch, kv_heads, length, DIM)]
    queries, keys, values = (tensor.to(device, dtype).requires_grad_() for tensor in tensors)
    # Parameters stay in float32, as they do in a model under autocast; what enters the layer has the dtype of the rest.
    state = {
        name: value.to(device, dtype if name == "layer_input" else torch.float32).requires_grad_()
        for name, value in state.items()
    }
    visible = None if visible is None else visible.to(device)
    return Inputs(
        queries=queries,
        keys=keys,
        values=values,
        visible=visible,
        causal=causal and visible is None,
        scaling=DIM**-0.5,
        state=state,
    )


def results(operation, inputs, path):
    """Outputs, and gradients of a random sum of them, by name."""
    names = ("outputs", "queries", "keys", "values", *inputs.state)
    return dict(zip(names, path_calls.results(operation, inputs, lambda *given: compute(*given, path)[0]), strict=True))


def errors(found, reference):
    assert all(bool(value.isfinite().all()) for value in found.values()), {
        name: int((~value.isfinite()).sum()) for name, value in found.items()
    }
    return {
        name: float((found[name].double() - value).norm() / value.norm().clamp(min=1e-300)) for name, value in reference.items()
    }


CALLS = {
    "causal, grouped": {},
    "causal": {"kv_heads": 4},
    "full, grouped": {"causal": False},
    "fewer queries, full": {"causal": False, "queries": 70},
    "holes, grouped": {"visible": holes(LENGTH, 200)},
}


def check(operation, inputs, paths, words):
    """Every path that serves the call; the names of those that do."""
    dtype = inputs.queries.dtype
    reference = results(operation, in_float64(inputs), "plain")
    if max(float(value.abs().max()) for value in reference.values()) > torch.finfo(dtype).max:
        pytest.skip(f"the numbers are beyond the range of {dtype}")
    # What a row divides by may be small, and then roundings count for more: on the plain path too, which has as many of them.
    own = errors(results(operation, inputs, "plain"), reference)
    served = [path for path in paths if obstacle(path, operation, inputs) is None]
    for path in served:
        found = errors(results(operation, inputs, path), reference)
        for name, error in found.items():
            bound = tolerance(dtype, inputs.kv_len) + 3 * own[name]
            assert error <= bound, f"{operation}, {words}, {dtype}, path {path}, {name}: {error:.2e} > {bound:.2e}"
    return served


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("settings", OPERATIONS, ids=named)
def test_paths_without_a_compiler(device, settings, dtype):
    operation = operations.make(settings)
    served = set()
    for words, call in CALLS.items():
        inputs = make_inputs(operation, device, dtype, **call)
        served |= set(check(operation, inputs, [path for path in PATHS if path not in ("plain", "flex")], words))
    expected = {"blocks"} if dtype != torch.float16 else set()
    if operation.is_softmax and (dtype != torch.float32 or device.type == "cpu"):
        expected.add("flash")
    assert expected <= served, f"{sorted(expected - served)} served no call"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_flex_softmax(cuda, dtype):
    """Kernels are shared by the operations, so it is one test for each dtype."""
    for name in BY_FLEX:
        operation = operations.make({"name": name})
        for words in ("causal, grouped", "full, grouped", "holes, grouped") if name == "sink_logit" else ("causal, grouped",):
            inputs = make_inputs(operation, cuda, dtype, **CALLS[words])
            assert check(operation, inputs, ["flex"], words) == ["flex"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("settings", [s for s in OPERATIONS if s["name"] in ("sigmoid", "relu", "elu")], ids=named)
def test_flex_similarities(cuda, settings, dtype):
    operation = operations.make(settings)
    inputs = make_inputs(operation, cuda, dtype)
    if reason := obstacle("flex", operation, inputs):
        pytest.skip(reason)
    check(operation, inputs, ["flex"], "causal, grouped")
    if dtype == torch.bfloat16:
        check(operation, make_inputs(operation, cuda, dtype, **CALLS["holes, grouped"]), ["flex"], "holes, grouped")


def test_flex_takes_one_length_after_another(cuda):
    """From the second length on torch makes lengths symbols, which rules must be able to hold; and many rules are no error."""
    for settings in ({"name": "sigmoid", "length_bias": True}, {"name": "relu"}):
        operation = operations.make(settings)
        for length in (300, 201, 517, 128):
            inputs = make_inputs(operation, cuda, torch.bfloat16, length=length)
            assert check(operation, inputs, ["flex"], f"{length} tokens") == ["flex"]


def test_more_rules_than_torch_compiles_by_default(cuda):
    """Its limit is 8 for one function; a process that compares operations has more, and each has a call of its own."""
    for number in range(10):
        operation = operations.make({"name": "sigmoid", "bias": -float(number)})
        with torch.no_grad():
            inputs = make_inputs(operation, cuda, torch.bfloat16, length=130, batch=1)
            found, _ = compute(operation, inputs, "flex")
            expected, _ = compute(operation, in_float64(inputs), "plain")
        assert float((found.double() - expected).norm() / expected.norm()) <= tolerance(torch.bfloat16, 130)


@pytest.mark.parametrize(
    ("settings", "dtype", "call", "path"),
    [
        ({"name": "softmax"}, torch.bfloat16, {}, "flash"),
        ({"name": "softmax"}, torch.bfloat16, {"length": 40}, "flash"),
        ({"name": "key_value_bias"}, torch.float16, {}, "flash"),
        ({"name": "softmax"}, torch.bfloat16, {"visible": holes(LENGTH, 200)}, "flex"),
        ({"name": "softmax"}, torch.float32, {}, "flash"),
        ({"name": "sink_logit"}, torch.float32, {}, "flex"),
        ({"name": "sigmoid"}, torch.bfloat16, {}, "flex"),
        ({"name": "sigmoid"}, torch.bfloat16, {"length": 40}, "plain"),
        ({"name": "elu_kernel"}, torch.bfloat16, {}, "linear"),
        ({"name": "identity"}, torch.float32, {}, "linear"),
        ({"name": "softpick"}, torch.bfloat16, {}, "plain"),
        ({"name": "softmax"}, torch.bfloat16, {"queries": 1, "causal": False}, "flash"),
        ({"name": "softmax_plus_one"}, torch.bfloat16, {"queries": 1, "causal": False}, "flash"),
        ({"name": "sigmoid"}, torch.bfloat16, {"queries": 1, "causal": False}, "flex"),
    ],
    ids=str,
)
def test_auto(cuda, settings, dtype, call, path):
    operation = operations.make(settings)
    inputs = make_inputs(operation, cuda, dtype, **call)
    assert choose(operation, inputs) == path
    reference = results(operation, in_float64(inputs), "plain")
    own = errors(results(operation, inputs, "plain"), reference)
    for name, error in errors(results(operation, inputs, "auto"), reference).items():
        assert error <= tolerance(dtype, inputs.kv_len) + 3 * own[name], name


def test_under_autocast_features_and_state_may_be_float32(device):
    """Queries in float32, as a norm leaves them, and parameters too: every path gets one dtype."""
    for name in ("qk_norm", "key_value_bias", "gated", "elu_kernel"):
        operation = operations.make({"name": name})
        inputs = make_inputs(operation, device, torch.float32)
        reference = results(operation, in_float64(inputs), "plain")
        with torch.autocast(device.type, torch.bfloat16):
            own = errors(results(operation, inputs, "plain"), reference)
            found = results(operation, inputs, "auto")
        for field, error in errors(found, reference).items():
            # Besides, queries, keys and values are rounded first: three more roundings, on both.
            assert error <= tolerance(torch.bfloat16, LENGTH) + 3 * own[field], (name, field)


LONG = 32_768


def rows_in_float64(operation, inputs, rows=512):
    """Causal outputs of the plain definition, a block of rows at a time, in float64 on the device."""
    wide = in_float64(inputs)
    queries, keys = operation.features(wide.queries, wide.keys, wide.state)
    groups = queries.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(groups, dim=1) for tensor in (keys, wide.values))
    nulls = operation.null_scores(queries, wide.scaling, wide.state)
    outputs = []
    for start in range(0, wide.q_len, rows):
        stop = min(start + rows, wide.q_len)
        visible = torch.ones(stop - start, stop, dtype=torch.bool, device=queries.device).tril(start)
        scores = queries[:, :, start:stop] @ keys[:, :, :stop].mT * wide.scaling
        null = nulls if nulls is None or nulls.shape[2] == 1 else nulls[:, :, start:stop]
        mass = operation.null_mass(scores, visible, null) if operation.null_value(wide.state) is not None else None
        part = operation.weights(scores, visible, null) @ values[:, :, :stop]
        outputs.append(operation.finish(part, mass, wide.state))
    return torch.cat(outputs, dim=2)


@pytest.mark.parametrize(
    ("name", "path"),
    [("softmax", "flash"), ("key_value_bias", "flash"), ("sink_logit", "flex"), ("sigmoid", "flex"), ("elu_kernel", "linear")],
)
@torch.no_grad()
def test_a_long_text(cuda, name, path):
    operation = operations.make({"name": name, **({"bias": -10.0} if name == "sigmoid" else {})})
    inputs = make_inputs(operation, cuda, torch.bfloat16, batch=1, heads=2, kv_heads=1, length=LONG)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found, _ = compute(operation, inputs, path)
    extra = torch.cuda.max_memory_allocated() - before
    # Outputs, copies in float32 and states of the chunks: some dozens of numbers as many as the outputs have. A boolean matrix
    # of one head has as many bytes as 64 float32 copies of the outputs of both.
    assert extra < 48 * found.numel() * 4
    assert 64 * found.numel() * 4 == LONG**2
    expected = rows_in_float64(operation, inputs)
    assert bool(found.isfinite().all())
    error = float((found.double() - expected).norm() / expected.norm())
    # States that sum up all keys are rounded to bfloat16 before a chunk meets them, and chunks in the same way.
    assert error <= tolerance(torch.bfloat16, LONG)
