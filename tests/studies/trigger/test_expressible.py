"""What cannot be learned: which operations are found out, by how much, and that training agrees."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sinklab.operations.gated import Gated
from sinklab.operations.relu import Relu
from sinklab.operations.sigmoid import Sigmoid
from sinklab.operations.sink_token import SinkToken
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations
from sinklab.studies.trigger.expressible import divisor_quotient, full_rows, obstacle
from sinklab.studies.trigger.lab import as_released
from sinklab.studies.trigger.problem import TriggerProblem, train


def errors(setting: TriggerProblem) -> dict[str, float]:
    found = {name: obstacle(as_released(name), setting) for name in operations}
    return {name: what[1] for name, what in found.items() if what is not None}


def test_with_bos():
    expected = dict.fromkeys(("elu", "identity", "mlp_kernel", "sigmoid"), 1 / 9)
    assert errors(TriggerProblem()) == pytest.approx(expected)
    assert errors(TriggerProblem(heads=3)) == pytest.approx(expected)
    assert errors(TriggerProblem(layers=2)) == {}


def test_without_bos_rows_that_sum_to_one_have_no_way_out():
    found = errors(TriggerProblem(bos=False))
    assert {name for name, error in found.items() if error == 0.25} == {
        "qk_norm",
        "sigma_reparam",
        "softcap",
        "softmax",
        "tempered_softmax",
        "value_bias",
    }
    assert obstacle(Softmax(), TriggerProblem(bos=False, target="preceding"))[1] == 0.5
    # A tolerance that the least error meets leaves the task to be done, as with divisors.
    assert obstacle(Softmax(), TriggerProblem(bos=False, tolerance=0.24)) is not None
    assert obstacle(Softmax(), TriggerProblem(bos=False, tolerance=0.26)) is None
    assert obstacle(Sigmoid(), TriggerProblem(tolerance=0.12)) is None
    assert obstacle(Gated(), TriggerProblem(bos=False)) is None  # the gate can be closed
    assert obstacle(SinkToken(), TriggerProblem(bos=False)) is None
    assert obstacle(Softmax(), TriggerProblem(bos=False, heads=2)) is None  # two heads can cancel


def test_divisors_by_hand():
    # d = 1, i and i - 1 at three and four keys; powers in between.
    assert divisor_quotient(Sigmoid(), 3) == pytest.approx(1)
    assert divisor_quotient(Relu(), 3) == pytest.approx(4 / 3)
    assert divisor_quotient(Relu(uncounted=1), 3) == pytest.approx(3 / 2)
    assert divisor_quotient(Relu(power=0.5), 3) == pytest.approx((4 / 3) ** 0.5)
    assert divisor_quotient(Softmax(), 3) is None
    assert divisor_quotient(Relu(normalize=True), 3) is None
    assert divisor_quotient(Sigmoid(length_bias=True), 3) is None
    assert full_rows(Softmax())
    assert not full_rows(Relu(normalize=True))  # rows of 0


@pytest.mark.parametrize(
    ("operation", "target", "bos", "error"),
    [
        (Relu(), "including", True, 1 / 30),
        (Relu(uncounted=1), "including", True, None),
        (Relu(uncounted=1), "preceding", True, 1 / 7),
        (Relu(uncounted=2), "preceding", True, None),
        # Without BOS a query sees one key less, and dividing by all of them is right.
        (Relu(), "including", False, None),
    ],
)
def test_the_divisor_must_be_the_number_of_tokens_in_the_mean(operation, target, bos, error):
    found = obstacle(operation, TriggerProblem(target=target, bos=bos))
    assert found is None if error is None else found[1] == pytest.approx(error)


def test_what_the_proofs_need_of_the_setting():
    assert errors(TriggerProblem(triggers=13)) == errors(TriggerProblem())
    # With positions a score may depend on the place; what a first token sees does not.
    assert errors(TriggerProblem(positions="alibi")) == {}
    assert errors(TriggerProblem(positions="learned", bos=False))["softmax"] == 0.25


def test_independent_weights_obey_the_identity_behind_the_proof():
    """d(4) times the difference of outputs behind two equal tokens is twice d(3) times that behind one, for any maps."""
    torch.manual_seed(0)
    setting = TriggerProblem(heads=2)
    for operation, third, fourth in ((Relu(), 3, 4), (Sigmoid(), 1, 1), (Relu(uncounted=1), 2, 3)):
        model = train(operation, dataclasses.replace(setting, cap=1), 0).model.double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
            bos, trigger, one, two = torch.randn(4, 16, dtype=torch.float64)
            at = {
                (name, count): model(torch.stack((bos, *[token] * count, trigger))[None])[0, -1] - trigger
                for name, token in (("one", one), ("two", two))
                for count in (1, 2)
            }
        behind_one = third * (at["one", 1] - at["two", 1])
        torch.testing.assert_close(fourth * (at["one", 2] - at["two", 2]), 2 * behind_one, rtol=1e-9, atol=1e-9)
