"""Settings of operations: the contract with settings that are not the default, the way to a record and back, and refusals."""

from __future__ import annotations

import math

import pytest

from sinklab.errors import ConfigurationError
from sinklab.operations.clipped_softmax import ClippedSoftmax
from sinklab.operations.elu import Elu
from sinklab.operations.elu_kernel import EluKernel
from sinklab.operations.gated import Gated
from sinklab.operations.gated_heads import GatedHeads
from sinklab.operations.identity import Identity
from sinklab.operations.key_bias import KeyBias
from sinklab.operations.key_value_bias import KeyValueBias
from sinklab.operations.mlp_kernel import MlpKernel
from sinklab.operations.p_normalized import PNormalized
from sinklab.operations.qk_norm import QkNorm
from sinklab.operations.relu import Relu
from sinklab.operations.sigmoid import Sigmoid
from sinklab.operations.sink_logit import SinkLogit
from sinklab.operations.sink_token import SinkToken
from sinklab.operations.softmax import Softmax
from sinklab.operations.softmax_plus_one import SoftmaxPlusOne
from sinklab.operations.softpick import Softpick
from sinklab.operations.value_bias import ValueBias
from sinklab.registry import operations
from sinklab.testing import check_operation

SETTINGS = [
    ClippedSoftmax(alpha=0.5),
    ClippedSoftmax(gamma=-0.1, zeta=1.2),
    Elu(normalize=True),
    EluKernel(normalize=False),
    Gated(element_wise=False, initial_bias=1.0),
    Gated(shared=True, floor=0.5),
    Gated(input_dependent=False),
    Gated(element_wise=False, shared=True, input_dependent=False),
    Gated(double=True),
    GatedHeads(hidden=4, opening=0.25),
    GatedHeads(all_features=True, double=True),
    Identity(normalize=True),
    KeyBias(shared=True, learnable=4),
    KeyBias(value_norm=5.0),
    KeyBias(value_norm=1.0, value_ones=True),
    KeyValueBias(shared=True),
    MlpKernel(normalize=True),
    PNormalized(p=4.0),
    PNormalized(p=2.0, sigmoid=True),
    PNormalized(p=0.25, sigmoid=True),
    QkNorm(unit_length=True, initial=16.0),
    Relu(normalize=True),
    Relu(uncounted=1),
    Relu(power=0.5),
    Relu(power=0.0),
    Sigmoid(bias=-2.0, scale=0.25),
    Sigmoid(length_bias=True, bias=0.5),
    Sigmoid(normalize=True),
    Sigmoid(bias=1, normalize=True, scale=3.0),
    SinkLogit(initial=-3.0),
    SinkToken(count=2),
    Softpick(),
    ValueBias(shared=True),
]


@pytest.mark.parametrize("operation", SETTINGS, ids=str)
def test_contract(operation):
    check_operation(operation)
    assert operations.make(operation.to_dict()) == operation


def test_records_by_hand():
    assert Softmax().to_dict() == {"name": "softmax"}
    assert operations.make({}) == Softmax()
    assert operations.make({"name": "softmax_plus_one"}) == SoftmaxPlusOne()
    assert operations.make({"name": "sigmoid", "bias": -2.5}).to_dict()["scale"] == 1.0  # as saved before there was a scale
    assert operations.make({"name": "clipped_softmax", "alpha": 2}) == ClippedSoftmax(alpha=2)
    assert SinkToken(count=3).tokens_in_front == 3
    assert Softpick().normalized


REFUSED = [
    ("clipped_softmax", {"gamma": -0.1, "alpha": 2.0}, "give one"),
    ("clipped_softmax", {"gamma": 0.1}, "gamma at most 0"),
    ("clipped_softmax", {"alpha": -1.0}, "alpha at least 0"),
    ("clipped_softmax", {"zeta": 0.9}, "zeta at least 1"),
    ("clipped_softmax", {"gamma": math.nan}, "gamma is nan"),
    ("clipped_softmax", {"alpha": math.inf}, "alpha is inf"),
    *(("gated", {"floor": floor}, f"floor = {floor} must be") for floor in (-0.1, 1.0, math.nan)),
    ("gated", {"initial_bias": math.inf}, "must be a finite number"),
    ("gated", {"double": True, "floor": 0.5}, "double goes with neither floor nor initial_bias"),
    ("gated", {"double": True, "initial_bias": 1.0}, "double goes with neither floor nor initial_bias"),
    ("gated_heads", {"hidden": -1}, "or 0 for a linear gate"),
    ("gated_heads", {"hidden": 4, "all_features": True}, "exclude each other"),
    ("gated_heads", {"opening": 0.0}, "between 0 and 1"),
    ("gated_heads", {"opening": 1.0}, "between 0 and 1"),
    ("key_bias", {"learnable": 0}, "a key of zeros is softmax_plus_one"),
    ("key_bias", {"value_norm": -1.0}, "must be a length"),
    ("key_bias", {"value_norm": math.inf}, "must be a length"),
    ("key_bias", {"value_ones": True}, "set value_norm too"),
    ("p_normalized", {"p": 0.0}, "must be a positive number"),
    ("p_normalized", {"p": math.inf}, "must be a positive number"),
    ("p_normalized", {"p": 1.0}, "operation softmax; use that"),
    ("p_normalized", {"p": 1.0, "sigmoid": True}, "operation sigmoid with its rows normalised"),
    *(("qk_norm", {"initial": initial}, f"initial = {initial} must be a positive gain") for initial in (0.0, -1.0, math.nan)),
    ("relu", {"uncounted": -1}, "expected an integer from 0 and a finite number"),
    ("relu", {"power": math.nan}, "expected an integer from 0 and a finite number"),
    ("relu", {"normalize": True, "uncounted": 1}, "leave them out"),
    ("relu", {"normalize": True, "power": 0.5}, "leave them out"),
    ("relu", {"uncounted": 1, "power": 0.0}, "leave it out"),
    *(("sigmoid", {"scale": number}, "positive number") for number in (0.0, -1.0, math.nan, math.inf)),
    ("sigmoid", {"bias": math.inf}, "expected a finite number"),
    ("sink_logit", {"initial": math.inf}, "must be a finite score"),
    ("sink_logit", {"initial": math.nan}, "must be a finite score"),
    ("sink_token", {"count": 0}, "without one, use softmax"),
]


@pytest.mark.parametrize(("name", "settings", "said"), REFUSED)
def test_settings_that_cannot_take_effect(name, settings, said):
    with pytest.raises(ConfigurationError, match=f"operation '{name}'.*{said}"):
        operations[name](**settings)


def test_unknown_settings():
    for spec, said in (
        ({"name": "elu_kernel", "normalise": True}, "Did you mean 'normalize'"),
        ({"name": "sigmoid", "slope": 1.0}, "it has bias, length_bias, normalize"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            operations.make(spec)
