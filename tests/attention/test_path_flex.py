"""The flex path against the plain reference: its mathematics, which FlexAttention's dense implementation shows on a CPU."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from tests.attention.path_calls import Nothing, holes, in_float64, plain, results
from tests.attention.path_calls import call as a_call
from torch.nn.attention.flex_attention import create_block_mask

from sinklab.attention.operation import Operation
from sinklab.attention.paths import flex as path_flex
from sinklab.attention.paths.table import choose, compute
from sinklab.errors import ConfigurationError
from sinklab.operations.identity import Identity
from sinklab.operations.softmax import Softmax

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@dataclass(frozen=True, kw_only=True)
class Similarity(Operation):
    """``weights = φ(scores)``, divided by their row sum if ``normalize``."""

    name: ClassVar[str] = "similarity"
    normalize: bool = False

    @property
    def normalized(self):
        return self.normalize

    def similarity(self, scores, counts):
        raise NotImplementedError

    def weights(self, scores, visible, null_scores=None):
        visible = torch.ones_like(scores, dtype=torch.bool) if visible is None else visible.expand_as(scores)
        counts = visible.sum(-1, keepdim=True).clamp(min=1).to(scores.dtype)
        weights = self.similarity(scores, counts).masked_fill(~visible, 0.0)
        total = weights.sum(-1, keepdim=True)
        return weights / total.masked_fill(total == 0, 1.0) if self.normalize else weights


@dataclass(frozen=True, kw_only=True)
class Logistic(Similarity):
    bias: float = 0.0

    def similarity(self, scores, counts):
        return torch.sigmoid(scores + self.bias - counts.log())

    def log_similarity(self, scores, counts):
        return F.logsigmoid(scores + self.bias - counts.log())


class Rectified(Similarity):
    """Some rows have no positive score: a softmax of minus infinities."""

    def similarity(self, scores, counts):
        return torch.relu(scores) / counts

    def log_similarity(self, scores, counts):
        tiny = torch.finfo(scores.dtype).tiny
        return torch.where(scores > 0, torch.log(scores.clamp(min=tiny) / counts), float("-inf"))


def call(*, q_len=12, kv_len=12, device="cpu", **settings):
    return a_call(q_len=q_len, kv_len=kv_len, value_dim=5 if device == "cpu" else None, device=device, **settings)


HOLES = holes(12, 5)
STATE = {"key": (4, 8), "value": (4, 5), "bias": (1, 5), "gain": (2, 4, 12, 1)}
OPERATIONS = {
    "softmax": (Softmax(), {}),
    "null term": (Nothing(), STATE),
    "logistic": (Logistic(bias=-1.0), {}),
    "logistic, normalized": (Logistic(normalize=True), {}),
    "rectified": (Rectified(), {}),
    "rectified, normalized": (Rectified(normalize=True), {}),
}


@pytest.mark.parametrize(("operation", "state"), OPERATIONS.values(), ids=list(OPERATIONS))
@pytest.mark.parametrize("visible", [None, HOLES], ids=["causal", "holes"])
def test_outputs_and_gradients_in_float64(operation, state, visible, monkeypatch):
    # On a CPU the public function refuses gradients; what lies behind it has a dense backward.
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *tensors: None)
    inputs = call(visible=visible, **state)
    found, expected = (results(operation, inputs, way) for way in (path_flex.head_outputs, plain))
    for one, two in zip(found, expected, strict=True):
        # Logarithms of similarities and their exponentials, sums of 12 numbers below 10; rows of a few small positive scores
        # are divided by their sum, which may be small: 1e-11 is a hundred thousand roundings of 1.
        torch.testing.assert_close(one, two, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": torch.float32},
        {"dtype": torch.bfloat16},
        {"causal": False},
        {"q_len": 5},
        {"kv_len": 5},
        {"q_len": 1, "kv_len": 9, "causal": False},
        {"visible": HOLES[1, 0]},
        {"visible": HOLES[:, :, 4:5]},
    ],
    ids=str,
)
@torch.no_grad()
def test_shapes_and_dtypes_without_gradients(settings):
    inputs = call(**settings)
    found, _ = compute(Logistic(), inputs, "flex")
    exact = dataclasses.replace(
        inputs, queries=inputs.queries.double(), keys=inputs.keys.double(), values=inputs.values.double()
    )
    assert found.dtype == inputs.queries.dtype
    # Outputs are rounded when the kernel divides and when they are multiplied again; weights sum to at most one here.
    tolerance = 4 * torch.finfo(found.dtype).eps * float(inputs.values.abs().max())
    torch.testing.assert_close(found.double(), plain(Logistic(), exact), atol=max(tolerance, 2e-7), rtol=0)


@torch.no_grad()
def test_settings_may_change():
    inputs = call()
    for bias in (0.0, -1.0, 2.0, 0.0):
        operation = Logistic(bias=bias)
        torch.testing.assert_close(path_flex.head_outputs(operation, inputs), plain(operation, inputs), atol=1e-11, rtol=0)


@pytest.mark.parametrize("visible", [None, HOLES], ids=["causal", "holes"])
@torch.no_grad()
def test_one_graph_under_compile(visible):
    inputs = call(visible=visible)

    def outputs(queries):
        return path_flex.head_outputs(Logistic(), dataclasses.replace(inputs, queries=queries))

    torch._dynamo.reset()
    found = torch.compile(outputs, fullgraph=True, backend="aot_eager")(inputs.queries)
    torch.testing.assert_close(found, plain(Logistic(), inputs), atol=1e-11, rtol=0)


@pytest.mark.parametrize(
    ("q_len", "kv_len"),
    [(300, 300), (128, 128), (300, 200), (200, 300), (70, 300), (1, 300), (512, 512), (513, 385), (130, 1), (640, 256)],
)
def test_the_causal_blocks_are_those_of_torch(q_len, kv_len):
    """Which looks at every pair of query and key for that."""
    found = path_flex._causal_mask(q_len, kv_len, torch.device("cpu"))
    expected = create_block_mask(lambda sample, head, query, key: query >= key, None, None, q_len, kv_len, device="cpu")
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        one, other = getattr(found, name), getattr(expected, name)
        assert torch.equal(one, other), name
        which, indices = name.replace("num_blocks", "indices"), torch.arange(getattr(found, name).shape[-1])
        for row in indices:
            count = int(one[0, 0, row])
            listed = (getattr(mask, which)[0, 0, row, :count].tolist() for mask in (found, expected))
            assert len({tuple(sorted(blocks)) for blocks in listed}) == 1
    assert found.seq_lengths == expected.seq_lengths
    assert found.BLOCK_SIZE == expected.BLOCK_SIZE


def test_training_on_a_cpu_is_refused_with_the_reason():
    inputs = call()
    message = "path 'flex' cannot serve operation 'softmax': FlexAttention has no backward on a CPU; use 'auto' or 'plain'"
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        compute(Softmax(), inputs, "flex")
    frozen = dataclasses.replace(
        inputs, queries=inputs.queries.detach(), keys=inputs.keys.detach(), values=inputs.values.detach()
    )
    assert path_flex.obstacle(Softmax(), frozen) is None
    learned = dataclasses.replace(frozen, state={"key": torch.zeros(4, 8, requires_grad=True)})
    assert path_flex.obstacle(Softmax(), learned) == "FlexAttention has no backward on a CPU"
    with torch.no_grad():
        assert path_flex.obstacle(Softmax(), learned) is None


@torch.no_grad()
def test_obstacles():
    inputs = call()

    def reason(operation, **changes):
        return path_flex.obstacle(operation, dataclasses.replace(inputs, **changes))

    assert reason(Identity()) == "it does not give the logarithm of its similarity (log_similarity)"
    assert reason(Softmax(), bias=torch.zeros(1)) == "the model adds a bias to its scores"
    assert reason(Softmax(), queries=inputs.queries.to("meta")) == "it has not been tried on device 'meta'"


@torch.no_grad()
def test_auto_leaves_it_to_cuda():
    assert not path_flex.worthwhile(Logistic(), call(q_len=200, kv_len=200))
    assert choose(Logistic(), call()) == "plain"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no CUDA device")
@pytest.mark.parametrize(("operation", "state"), OPERATIONS.values(), ids=list(OPERATIONS))
@pytest.mark.parametrize("masked", [False, True])
def test_cuda(operation, state, masked):
    torch._dynamo.reset()  # every operation is another rule, and torch recompiles a function a few times only
    state = {name: (*shape[:-1], 32) if name in ("key", "value", "bias") else (2, 4, 300, 1) for name, shape in state.items()}
    visible = torch.rand(2, 1, 300, 300, generator=torch.Generator().manual_seed(2)).cuda() > 0.5 if masked else None
    inputs = call(dtype=torch.float32, q_len=300, kv_len=300, dim=32, visible=visible, device="cuda", **state)
    assert path_flex.obstacle(operation, inputs) is None
    found = results(operation, inputs, path_flex.head_outputs)
    expected = results(operation, in_float64(inputs), plain)
    for one, two in zip(found, expected, strict=True):
        # Products on tensor cores are rounded to TF32, 2**-11, where torch allows it. A row of few small positive scores is
        # divided by their sum, and its roundings count for more; they are float32's, 2**-24, unless products are TF32's.
        assert float((one.double() - two).norm() / two.norm()) <= 2.0**-9
