"""The blocks path equals the plain one in outputs and every gradient, refuses what it cannot do, and forms no score matrix."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.attention.path_calls import Nothing, run, state_of

from sinklab.attention.operation import Inputs
from sinklab.attention.paths import blocks as path_blocks
from sinklab.attention.paths import row_blocks
from sinklab.attention.paths.table import compute
from sinklab.errors import ConfigurationError
from sinklab.operations.sigmoid import Sigmoid
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations

SETTINGS = [
    {"name": "softmax"},
    {"name": "sigmoid"},
    {"name": "sigmoid", "bias": -1.0, "length_bias": True},
    {"name": "sigmoid", "bias": 0.3, "normalize": True},
    {"name": "relu"},
    {"name": "relu", "normalize": True},
    {"name": "relu", "uncounted": 1, "power": 0.5},
    {"name": "elu"},
    {"name": "elu", "normalize": True},
    {"name": "softpick"},
    {"name": "clipped_softmax"},
    {"name": "clipped_softmax", "alpha": 0.7, "zeta": 1.1},
]
"""Every operation with a row kernel, and every branch of the kernels."""


def words(value):
    return "-".join(str(part) for part in value.values()) if isinstance(value, dict) else None


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 16 rows: fifty tokens are then several whole blocks and a ragged one."""
    monkeypatch.setattr(row_blocks, "_FEW", 16)
    monkeypatch.setattr(path_blocks, "_BLOCK_SCORES", 4096)


def tensors(dtype=torch.float64, q_len=50, kv_len=50, size=1.0):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, q_len, 16), (2, 2, kv_len, 16), (2, 2, kv_len, 24))
    queries, keys, values = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return 2.0 * size * queries, keys, values


def masks(q_len=50, kv_len=50):
    """Masks with holes, keys that nobody sees, rows that see nothing and whole blocks of them, by sample and by head."""
    generator = torch.Generator().manual_seed(1)
    positions = torch.arange(q_len)[:, None] - torch.arange(kv_len)
    random = torch.rand(2, 1, q_len, kv_len, generator=generator) > 0.3
    random[:, :, 7] = False
    random[:, :, :, :20] = False
    random[0, :, 14:34] = False
    padding = (positions >= 0)[None, None] & (torch.arange(kv_len) >= torch.tensor([0, 9])[:, None, None, None])
    return {
        "random": random,
        "by head": torch.rand(1, 4, q_len, kv_len, generator=generator) > 0.5,
        "window": ((positions >= 0) & (positions < 10))[None, None],
        "left padding": padding,
        "keys only": torch.arange(kv_len)[None, None, None] % 3 > 0,
        "two dimensions": positions >= -3,
    }


def require_close(found, expected, tolerance):
    for fast, plain in zip(found, expected, strict=True):
        assert fast.dtype == plain.dtype
        assert float((fast - plain).abs().max()) <= tolerance * max(1.0, float(plain.abs().max()))


@pytest.mark.parametrize("settings", SETTINGS, ids=words)
def test_float64_is_exact_under_every_mask(settings):
    operation = operations.make(settings)
    cases = [(50, 50, None, True), (50, 50, None, False), (20, 50, None, True), (50, 20, None, True), (3, 50, None, False)]
    cases += [(50, 50, mask, False) for mask in masks().values()] + [(20, 50, masks(20)["random"], False)]
    for q_len, kv_len, visible, causal in cases:
        given = tensors(q_len=q_len, kv_len=kv_len)
        plain, fast = (run(operation, given, {}, way, visible, causal) for way in ("plain", "blocks"))
        # Sums of some fifty terms in another order, each rounded to 2**-53.
        require_close(fast, plain, 1e-12)


@pytest.mark.parametrize("name", list(operations))
def test_every_operation_with_its_state(name):
    operation = operations[name]()
    state = state_of(operation, 50)
    for visible in (None, masks()["random"]):
        plain, fast = (run(operation, tensors(), state, way, visible, visible is None) for way in ("plain", "blocks"))
        require_close(fast, plain, 1e-12)


@pytest.mark.parametrize("settings", SETTINGS, ids=words)
def test_float32_and_bfloat16_round_as_the_plain_path_does(settings):
    operation = operations.make(settings)
    for dtype in (torch.float32, torch.bfloat16):
        given = tensors(dtype)
        exact = run(operation, [tensor.double() for tensor in given], {}, "plain")
        plain, fast = (run(operation, given, {}, way) for way in ("plain", "blocks"))
        for slow, quick, reference in zip(plain, fast, exact, strict=True):
            size = float(reference.norm())
            error = float((quick.double() - reference).norm()) / size
            if dtype == torch.float32:
                assert error <= 1e-5
                continue
            # The plain path rounds scores, weights and their gradients to bfloat16. Here it is weights before they are divided
            # by the row sum, and outputs and gradients before and after it: one rounding more. A weight that is within a
            # rounding of being clipped may have a gradient here and none there.
            slack = 0.05 if settings["name"] == "clipped_softmax" else 0.0
            assert error <= 2.0 * float((slow.double() - reference).norm()) / size + slack


@pytest.mark.parametrize("size", [-20.0, 0.0, 20.0])
def test_null_scores_and_null_values(size):
    generator = torch.Generator().manual_seed(0)
    scores = size + torch.randn(2, 4, 50, generator=generator, dtype=torch.float64)
    value = torch.randn(4, 24, generator=generator, dtype=torch.float64)
    for visible in (None, masks()["random"]):
        state = {"scores": scores, "value": value}
        plain, fast = (run(Nothing(), tensors(), state, way, visible, visible is None) for way in ("plain", "blocks"))
        require_close(fast, plain, 1e-12)
        if visible is not None:
            assert torch.allclose(fast[0][:, :, 7], value.expand(2, 4, 24))  # a row that sees no key is all null value


@pytest.mark.parametrize("settings", SETTINGS, ids=words)
@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_tiny_and_huge_scores(settings, size):
    operation = operations.make(settings)
    plain, fast = (run(operation, tensors(size=size), {}, way) for way in ("plain", "blocks"))
    require_close(fast, plain, 1e-9)  # scores of up to 1e5 lose 17 bits of their fraction in an exponent
    small = run(operation, tensors(torch.float32, size=size), {}, "blocks")
    assert all(bool(tensor.isfinite().all()) for tensor in small)
    if size < 1:
        require_close([tensor.double() for tensor in small], plain, 1e-5)


def test_low_scores_do_not_underflow_where_rows_are_normalised():
    queries, keys, values = tensors(torch.float32)
    low = [-100 * queries.abs(), keys.abs(), values]
    for settings in ({"name": "sigmoid", "normalize": True}, {"name": "elu", "normalize": True}):
        operation = operations.make(settings)
        fast = run(operation, low, {}, "blocks")
        exact = run(operation, [tensor.double() for tensor in low], {}, "plain")
        # Scores near -500 are known to 2**-24 of that, and so are the logarithms of the weights.
        require_close([fast[0].double()], exact[:1], 1e-3)


def test_rows_that_see_nothing_are_zero():
    visible = masks()["random"]
    for settings in SETTINGS:
        outputs, *gradients = run(operations.make(settings), tensors(), {}, "blocks", visible, False)
        assert torch.equal(outputs[:, :, 7], torch.zeros(2, 4, 24, dtype=torch.float64))
        assert torch.equal(gradients[0][:, :, 7], torch.zeros(2, 4, 16, dtype=torch.float64))
        for gradient in gradients[1:]:
            assert torch.equal(gradient[:, :, :20], torch.zeros_like(gradient[:, :, :20]))  # keys that nobody sees


def test_a_later_token_does_not_change_an_earlier_output():
    for settings in SETTINGS:
        operation = operations.make(settings)
        given = tensors(torch.float32)
        changed = [tensor.clone() for tensor in given]
        for tensor in changed:
            tensor[:, :, 37:] = tensor[:, :, 37:] * -3.0 + 1.0
        before, after = (run(operation, three, {}, "blocks")[0] for three in (given, changed))
        assert torch.equal(before[:, :, :37], after[:, :, :37])


# --- kernels and autograd ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Doubled(Sigmoid):
    """Weights of its own, and the inherited kernel, which does not know them."""

    name = "doubled"

    def weights(self, scores, visible, null_scores=None):
        return 2.0 * super().weights(scores, visible)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SigmoidWithNullValue(Sigmoid):
    """A null mass of its own, and a value for it to carry."""

    name = "sigmoid_with_null_value"

    def null_mass(self, scores, visible, null_scores=None):
        return torch.exp(-self.weights(scores, visible).sum(-1))

    def null_value(self, state):
        return state["value"]


def test_an_inherited_kernel_serves_only_the_weights_it_was_written_for():
    for inherited in (Sigmoid(), Softmax(), operations["sink_logit"](), operations["gated"](), Nothing()):
        assert row_blocks.kernel_key(inherited) is not None
    value = {"value": torch.randn(4, 24, dtype=torch.float64)}
    for operation, state in ((Doubled(), {}), (SigmoidWithNullValue(), value)):
        assert row_blocks.kernel_key(operation) is None
        for visible in (None, masks()["by head"], masks()["keys only"]):
            plain, fast = (run(operation, tensors(), state, way, visible, visible is None) for way in ("plain", "blocks"))
            require_close(fast, plain, 1e-12)


def test_a_second_derivative_is_refused():
    queries, keys, values = (tensor.requires_grad_() for tensor in tensors())
    outputs = path_blocks.head_outputs(Softmax(), Inputs(queries, keys, values, None, True, 0.25))
    (gradient,) = torch.autograd.grad(outputs.sum(), queries, create_graph=True)
    with pytest.raises(ConfigurationError, match=r"'blocks' has first derivatives only.*set_attention_path\(model, 'plain'\)"):
        gradient.sum().backward()


def test_gradcheck_of_one_ragged_block():
    given = [tensor[:1, :, :18].clone().requires_grad_() for tensor in tensors()]

    def attend(queries, keys, values):
        return path_blocks.head_outputs(operations["softpick"](), Inputs(queries, keys, values, None, True, 0.25))

    assert torch.autograd.gradcheck(attend, given, fast_mode=True)


def test_one_node_of_a_compiled_graph():
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    def attend(operation, queries, keys, values):
        return path_blocks.head_outputs(operation, Inputs(queries, keys, values, None, True, 0.25))

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=keep)
    for operation in (Sigmoid(), Sigmoid(bias=-1.0)):
        assert torch.equal(compiled(operation, *tensors()), attend(operation, *tensors()))
    calls = [[str(node.target) for node in graph.graph.nodes if "row_attention" in str(node.target)] for graph in graphs]
    assert calls == [["sinklab.row_attention.default"]] * 2


def test_gradients_of_a_compiled_graph():
    torch._dynamo.reset()
    operation = operations["sink_logit"]()
    state = {"sink_logit": torch.tensor([-1.0, 0.0, 1.0, 2.0], dtype=torch.float64)}
    plain = run(operation, tensors(), state, "plain")
    compiled = torch.compile(path_blocks.head_outputs, fullgraph=True, backend="aot_eager")
    leaves = [tensor.clone().requires_grad_() for tensor in (*tensors(), *state.values())]
    outputs = compiled(operation, Inputs(*leaves[:3], None, True, 0.25, dict(zip(state, leaves[3:], strict=True))))
    target = torch.cos(torch.arange(outputs.numel())).to(outputs.dtype).view_as(outputs)
    require_close([outputs.detach(), *torch.autograd.grad((outputs * target).sum(), leaves)], plain, 1e-12)


def test_a_graph_captured_by_another_process_finds_its_operation(monkeypatch):
    key = row_blocks.kernel_key(Sigmoid(bias=-1.0))
    monkeypatch.setattr(row_blocks, "_operations", {})
    outputs, _ = row_blocks.row_attention(*tensors(), None, None, True, 0.25, key)
    assert torch.equal(outputs, run(Sigmoid(bias=-1.0), tensors(), {}, "blocks")[0])


def test_autocast():
    given = tensors(torch.float32)
    exact = run(Softmax(), given, {}, "plain")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(Softmax(), given, {}, "blocks")
    assert [tensor.dtype for tensor in found] == [torch.bfloat16] + 3 * [torch.float32]
    for tensor, reference in zip(found, exact, strict=True):
        assert float((tensor.double() - reference).norm()) <= 2e-2 * float(reference.norm())  # a few roundings of 2**-9


# --- choice ------------------------------------------------------------------------------------------------------------------


def inputs_of(q_len=8, kv_len=8, dtype=torch.float32, heads=4, grad=False, **fields):
    shape = (1, heads, q_len, 16), (1, heads, kv_len, 16), (1, heads, kv_len, 16)
    three = [torch.empty(size, dtype=dtype, requires_grad=grad) for size in shape]
    return Inputs(*three, None, True, 0.25, **fields)


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (inputs_of(dtype=torch.float16), "queries, keys and values are torch.float16; it takes float32, float64 or bfloat16"),
        (
            dataclasses.replace(inputs_of(), values=torch.empty(1, 4, 8, 16).bfloat16()),
            "torch.bfloat16, torch.float32; it takes",
        ),
        (inputs_of(q_len=0), "there is no query or no key"),
        (inputs_of(softcap=30.0), "the model caps its scores"),
        (inputs_of(bias=torch.zeros(1, 1, 8, 8)), "the model adds a bias to its scores"),
        (inputs_of(dropout=0.1), "attention dropout is on"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_it_cannot_serve(inputs, reason):
    with pytest.raises(ConfigurationError, match=f"attention path 'blocks' cannot serve operation 'sigmoid': .*{reason}"):
        compute(Sigmoid(), inputs, "blocks")


def test_an_operation_that_computes_its_outputs_itself():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class OnItsOwn(Sigmoid):
        def head_outputs(self, queries, keys, values, visible, scaling, state=None, **others):
            return queries, queries

    assert path_blocks.obstacle(OnItsOwn(), inputs_of()) == "the operation computes its head outputs in a way of its own"


def test_short_calls_are_left_to_the_plain_path():
    def worthwhile(length, operation=None, **fields):
        return path_blocks.worthwhile(operation or Sigmoid(), inputs_of(length, length, **fields))

    assert not worthwhile(255)
    assert worthwhile(256)
    assert worthwhile(256, dtype=torch.bfloat16)
    assert worthwhile(256, dtype=torch.bfloat16, grad=True)
    assert not worthwhile(512, Doubled(), heads=31)
    assert worthwhile(512, Doubled(), heads=32)
    assert not path_blocks.worthwhile(Sigmoid(), inputs_of(1, 4096))  # decoding


def test_no_tensor_has_the_size_of_the_score_matrix():
    length = 512
    generator = torch.Generator().manual_seed(0)
    three = [torch.randn(1, 2, length, 16, generator=generator, requires_grad=True) for _ in range(3)]
    for operation in (Sigmoid(), Doubled()):
        inputs = Inputs(*three, None, True, 0.25)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            torch.autograd.grad(path_blocks.head_outputs(operation, inputs).sum(), three)
        largest = max(event.self_cpu_memory_usage for event in profile.events())
        # Inputs and their gradients, or 16 (here 4) rows of scores of each of two heads; booleans are a quarter of the scores.
        assert largest <= 4 * max(2 * length * 16, 2 * 16 * length)


def test_counts_are_those_of_the_mask():
    for visible in masks().values():
        whole = visible.expand(2, 4, 50, 50)
        plan = row_blocks.RowPlan(*tensors()[:2], visible[(None,) * (4 - visible.ndim)], False, torch.float64)
        for sample in range(2):
            found = torch.zeros(4, 50, 50, dtype=torch.bool)
            counts = torch.zeros(4, 50, 1, dtype=torch.float64)
            for part, block in plan.parts(sample):
                assert part.kv_heads == slice(part.heads.start // 2, (part.heads.stop + 1) // 2)
                found[part.heads, block.rows, block.keys] = True
                heads = part.heads.stop - part.heads.start
                counts[part.heads, block.rows] = block.counts.unflatten(0, (plan.heads, -1))[:heads]
                if block.edge is not None:
                    edge = slice(block.keys.start + block.edge.start, block.keys.start + block.edge.stop)
                    found[part.heads, block.rows, edge] = ~block.hidden
            assert torch.equal(found, whole[sample])
            assert torch.equal(counts, whole[sample].sum(-1, keepdim=True).double())
