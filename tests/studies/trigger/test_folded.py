"""Folded heads: outputs and gradients are those of queries, keys and values, and what they must not serve they do not."""

from __future__ import annotations

import pytest
import torch

from sinklab.errors import ConfigurationError
from sinklab.operations.clipped_softmax import ClippedSoftmax
from sinklab.operations.elu import Elu
from sinklab.operations.relu import Relu
from sinklab.operations.sigmoid import Sigmoid
from sinklab.operations.sink_token import SinkToken
from sinklab.operations.softmax import Softmax
from sinklab.operations.softpick import Softpick
from sinklab.registry import operations
from sinklab.studies.trigger.folded import kernel_of
from sinklab.studies.trigger.lab import as_released
from sinklab.studies.trigger.model import TriggerModel
from sinklab.studies.trigger.problem import TriggerProblem

SERVED = {"clipped_softmax", "elu", "relu", "sigmoid", "sink_token", "softmax", "softpick"}
VARIANTS = [
    Softmax(),
    Relu(uncounted=1),
    Relu(normalize=True),
    Sigmoid(),
    Sigmoid(normalize=True),
    Softpick(),
    SinkToken(count=2),
    ClippedSoftmax(),
    Elu(),
    Elu(normalize=True),
]


@pytest.mark.parametrize("operation", VARIANTS, ids=str)
@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (1, 3), (2, 2)])
def test_outputs_and_gradients_are_those_of_the_plain_path(operation, layers, heads):
    torch.manual_seed(0)
    model = TriggerModel(operation, layers, heads, width=6).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.7 * torch.randn_like(parameter))
    inputs = TriggerProblem(length=7, width=6).draw(5, torch.Generator().manual_seed(0)).inputs.double()
    upstream = torch.randn(inputs.shape, dtype=torch.float64)
    inputs.requires_grad_()
    wanted = (inputs, *(parameter for parameter in model.parameters() if parameter.numel()))
    fast, slow = model(inputs), model.with_weights(inputs)[0]
    # float64 sums of up to 42 terms of order 1, in another order; gradients run through two layers of them.
    torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)
    for ours, reference in zip(
        torch.autograd.grad(fast, wanted, upstream), torch.autograd.grad(slow, wanted, upstream), strict=True
    ):
        torch.testing.assert_close(ours, reference, rtol=1e-9, atol=1e-9)


def test_only_what_is_a_matter_of_weights_is_served():
    assert {name for name in operations if kernel_of(as_released(name)) is not None} == SERVED


def test_a_subclass_with_weights_of_its_own_has_not_got_the_kernel_that_it_inherits():
    class Halved(Softmax):
        def weights(self, scores, visible, null_scores=None):
            return super().weights(scores, visible, null_scores) / 2

    assert kernel_of(Halved()) is None


def test_a_second_backward_is_refused():
    outputs = TriggerModel(Softmax())(TriggerProblem().draw(2, torch.Generator().manual_seed(0)).inputs).sum()
    outputs.backward(retain_graph=True)
    with pytest.raises(ConfigurationError, match="a second backward through one forward"):
        outputs.backward()
