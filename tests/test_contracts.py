"""Every plug-in that the registry knows keeps the contract of its kind, and the contract checks notice plug-ins that do not."""

import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from sinklab.attention.operation import Operation
from sinklab.attention.probe import Probe
from sinklab.errors import ContractError
from sinklab.operations.sigmoid import Sigmoid
from sinklab.operations.softmax import Softmax
from sinklab.registry import operations, probes
from sinklab.results.metric import Metric
from sinklab.testing import check_operation, check_probe


@pytest.mark.parametrize("name", list(probes))
def test_probe(name):
    check_probe(probes[name])


@pytest.mark.parametrize("name", list(operations))
def test_operation(name):
    check_operation(operations[name]())


def test_operation_with_parameters():
    check_operation(Sigmoid(bias=-2.0))


# --- probes that break the contract ----------------------------------------------------------------------------------------


class Mass(Probe):
    """A probe as an outsider would write it, and a correct one: mean mass of a row, by head."""

    name = "mass"
    needs = frozenset({"mass"})
    metrics: ClassVar = (Metric("mass", "fraction", "mean row mass", range=(0.0, 1.0)),)

    def __init__(self):
        self.sums, self.counts = {}, {}

    def update(self, call, statistics):
        mass = statistics.row_mass.masked_fill(~call.counted[:, None], 0.0).double()
        for head, total in enumerate(mass.sum((0, 2)).tolist()):
            key = (call.site.module, call.site.layer, head)
            self.sums[key] = self.sums.get(key, 0.0) + total
            self.counts[key] = self.counts.get(key, 0) + int(call.counted.sum())

    def merge(self, other):
        for key in other.sums:
            self.sums[key] = self.sums.get(key, 0.0) + other.sums[key]
            self.counts[key] = self.counts.get(key, 0) + other.counts[key]

    def row(self, key):
        module, layer, head = key
        value, count = self.sums[key] / self.counts[key], self.counts[key]
        return {
            "metric": self.metrics[0],
            "value": value,
            "count": count,
            "module": module,
            "layer": layer,
            "head": head,
        }

    def rows(self):
        return iter([self.row(key) for key in self.sums])


def test_a_correct_probe_of_an_outsider():
    check_probe(Mass)


def altered(**attributes):
    return type("Altered", (Mass,), attributes)


def with_row(**change):
    """Each row with something wrong in it."""
    return altered(row=lambda self, key: Mass.row(self, key) | change)


class ChangesTheModel(Mass):
    needs = frozenset({"mass", "head_outputs"})

    def update(self, call, statistics):
        super().update(call, statistics)
        call.head_outputs.mul_(1.0001)


class ForgetsAfterTelling(Mass):
    def rows(self):
        rows = list(super().rows())
        key = next(iter(self.sums))
        self.sums[key] += 1e-9
        return iter(rows)


class CountsBatches(Mass):
    """The bug of a public script: sums of means of batches, divided by the number of batches."""

    def update(self, call, statistics):
        for head in range(call.num_heads):
            key = (call.site.module, call.site.layer, head)
            self.sums[key] = self.sums.get(key, 0.0) + float(statistics.row_mass[:, head].mean())
            self.counts[key] = self.counts.get(key, 0) + 1


class KeepsItsOwn(Mass):
    def merge(self, other):
        pass


class CountsPadding(Mass):
    def update(self, call, statistics):
        super().update(call, statistics)
        for key in self.counts:
            self.counts[key] += int((~call.counted).sum())


@pytest.mark.parametrize(
    ("probe_class", "message"),
    [
        (altered(metrics=(Mass.metrics[0]._with(version=0),)), "check 'declaration': expected a version of mass from 1, got 0"),
        (
            altered(needs=frozenset({"mass", "everything"})),
            "check 'declaration': expected needs among columns, .*, got ['everything']",
        ),
        (altered(metrics=()), "check 'declaration': expected a tuple of Metric, got ()"),
        (
            altered(metrics=(*Mass.metrics, Mass.metrics[0].of("weight"))),
            "check 'declaration': expected one metric under each name, got mass, mass",
        ),
        (ChangesTheModel, "check 'logits unchanged': expected bit-identical logits of llama, got "),
        (altered(rows=lambda self: iter(())), "check 'rows': expected at least one row, got none"),
        (ForgetsAfterTelling, "check 'rows': expected the same rows when asked twice, got others"),
        (
            with_row(metric=Mass.metrics[0].named("weight")),
            "check 'rows': expected a Metric among mass, got Metric(name='weight', ",
        ),
        (with_row(metric="mass", unit="fraction"), "check 'rows': expected a Metric among mass, got mass"),
        (with_row(unit="percent"), "check 'rows': a row of mass states its own unit, which its Metric declares"),
        (with_row(value=1.5), "check 'rows': expected a number in [0.0, 1.0] for mass, got 1.5"),
        (with_row(value=float("nan")), "check 'rows': expected a number in [0.0, 1.0] for mass, got nan"),
        (with_row(count=0), "check 'rows': expected a count of at least 1 for mass, got 0"),
        (with_row(channel=3), "check 'rows': rows have columns that the schema does not have: channel"),
        (with_row(query_position=1.0), "check 'rows': expected a whole number, or nothing, as query_position of mass, got 1.0"),
        (with_row(head=0), "check 'rows': expected one row for each place, got two for metric mass, "),
        (CountsBatches, "check 'batch size (llama)': expected "),
        (KeepsItsOwn, "check 'split and merge (llama)': expected "),
        (CountsPadding, "check 'left padding (llama)': expected "),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_probe_that_breaks_its_contract(probe_class, message):
    with pytest.raises(ContractError, match=re.escape("probe 'mass' breaks its contract, " + message).replace(r"\.\*", ".*")):
        check_probe(probe_class)


# --- operations that break the contract ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Broken(Operation):
    """Softmax with something wrong in it; registered for one test at a time."""

    normalized: ClassVar[bool] = True

    def weights(self, scores, visible, null_scores=None):
        return Softmax().weights(scores, visible)


class OneRowForAllHeads(Broken):
    def weights(self, scores, visible, null_scores=None):
        return super().weights(scores, visible).mean(1, keepdim=True)


class GainByQuery(Broken):
    def gain(self, state):
        return torch.ones(8)


class LeaksToHiddenKeys(Broken):
    def weights(self, scores, visible, null_scores=None):
        return super().weights(scores, visible) + 1e-9


class UndefinedOnHiddenRows(Broken):
    def weights(self, scores, visible, null_scores=None):
        return torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)


class HalfPrecisionWeights(Broken):
    def weights(self, scores, visible, null_scores=None):
        return super().weights(scores, visible).bfloat16()


class SaysItNormalizes(Broken):
    def weights(self, scores, visible, null_scores=None):
        return Sigmoid().weights(scores, visible)


class SaysItDoesNot(Broken):
    normalized: ClassVar[bool] = False


class DependsOnTheBlock(Broken):
    normalized: ClassVar[bool] = False

    def weights(self, scores, visible, null_scores=None):
        return super().weights(scores, visible) / scores.shape[2]


class Overflows(Broken):
    def weights(self, scores, visible, null_scores=None):
        scores = scores if scores.dtype == torch.float64 else scores.float()
        exponentials = torch.exp(scores) if visible is None else torch.exp(scores).masked_fill(~visible, 0.0)
        return exponentials / exponentials.sum(-1, keepdim=True).clamp(min=1e-30)


class WrongGradient(Broken):
    def weights(self, scores, visible, null_scores=None):
        return super().weights(scores.detach(), visible) + 0.0 * scores


class Sinking(Broken):
    """A learned sink logit, and something wrong with it."""

    is_softmax: ClassVar[bool] = True

    def parameters(self, shape):
        return {"logit": torch.zeros(shape.num_heads)}

    def null_scores(self, queries, scaling, state):
        return state["logit"][None, :, None]

    def weights(self, scores, visible, null_scores=None):
        return Softmax().weights(scores, visible, null_scores)


class ForgetsTheGradientOfItsLogit(Sinking):
    def null_scores(self, queries, scaling, state):
        return state["logit"].detach()[None, :, None] + 0.0 * state["logit"][None, :, None]


class CountsNothingTwice(Sinking):
    def null_mass(self, scores, visible, null_scores=None):
        mass = super().null_mass(scores, visible, null_scores)
        return None if mass is None else 2.0 * mass


class OverflowsWithALargeLogit(Sinking):
    def weights(self, scores, visible, null_scores=None):
        weights = Softmax().weights(scores, visible, null_scores)
        return weights if null_scores is None else weights / (null_scores.amax() < 10.0)


class HalfPrecisionParameter(Sinking):
    def parameters(self, shape):
        return {"logit": torch.zeros(shape.num_heads, dtype=torch.bfloat16)}


class LooksAhead(Broken):
    def head_outputs(self, queries, keys, values, visible, scaling, state=None, **host):
        outputs, weights = super().head_outputs(queries, keys, values, visible, scaling)
        return outputs + 1e-6 * values.mean((1, 2), keepdim=True), weights


class MixesUpGroups(Broken):
    def head_outputs(self, queries, keys, values, visible, scaling, state=None, **host):
        groups = queries.shape[1] // keys.shape[1]
        return super().head_outputs(queries, keys.repeat(1, groups, 1, 1), values.repeat(1, groups, 1, 1), visible, scaling)


class CoarseInHalfPrecision(Broken):
    def head_outputs(self, queries, keys, values, visible, scaling, state=None, **host):
        if queries.dtype == torch.bfloat16:
            values = values.to(torch.float8_e5m2).to(torch.bfloat16)
        return super().head_outputs(queries, keys, values, visible, scaling)


class CannotBeCaptured(Broken):
    def head_outputs(self, queries, keys, values, visible, scaling, state=None, **host):
        if float(queries.sum()) > 1e9:
            raise ValueError
        return super().head_outputs(queries, keys, values, visible, scaling)


class CountsTheCache(Broken):
    """The bias -log n with n read off the tensor: right in a forward pass, wrong while decoding."""

    normalized: ClassVar[bool] = False

    def weights(self, scores, visible, null_scores=None):
        return Sigmoid().weights(scores - torch.log(torch.tensor(float(scores.shape[-1]))), visible)


@pytest.mark.parametrize(
    ("operation_class", "message"),
    [
        (OneRowForAllHeads, "check 'shapes': expected weights (2, 4, 8, 8), got (2, 1, 8, 8)"),
        (GainByQuery, "check 'shapes': expected a gain that broadcasts to (2, 4, 8, 16), got (8,)"),
        (LeaksToHiddenKeys, "check 'hidden keys': expected weights of exactly 0 on hidden keys, got a weight of 1.0e-09"),
        (UndefinedOnHiddenRows, "check 'hidden keys': expected weights of exactly 0 on hidden keys, got a weight of nan"),
        (HalfPrecisionWeights, "check 'hidden keys': expected float32 or wider, got torch.bfloat16"),
        (SaysItNormalizes, "check 'row sums': expected weights and null mass that sum to one, got a row that is off by "),
        (SaysItDoesNot, "check 'row sums': expected normalized = True, since all rows sum to one"),
        (DependsOnTheBlock, "check 'blocks': expected weights of a block of rows within 1.0e-12"),
        (Overflows, "check 'extreme scores': expected finite weights"),
        (WrongGradient, "check 'gradient': Jacobian mismatch"),
        (ForgetsTheGradientOfItsLogit, "check 'gradient': Jacobian mismatch"),
        (CountsNothingTwice, "check 'row sums': expected weights and null mass that sum to one, got a row that is off by "),
        (
            OverflowsWithALargeLogit,
            "check 'hidden keys': expected weights of exactly 0 on hidden keys, got a weight of nan",
        ),
        (HalfPrecisionParameter, "check 'parameters': expected finite float32 numbers for 'logit', got torch.bfloat16"),
        (LooksAhead, "check 'causality': expected outputs before a changed token bit-equal"),
        (MixesUpGroups, "check 'grouped queries': expected outputs with repeated keys and values"),
        (CoarseInHalfPrecision, "check 'bfloat16': expected outputs within "),
        (CannotBeCaptured, "check 'compile': "),
        (CountsTheCache, "check 'cached decoding': expected logits of decoding in pieces within 1.0e-09"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_an_operation_that_breaks_its_contract(operation_class, message, monkeypatch):
    monkeypatch.setitem(operations._objects, "broken", operation_class)
    monkeypatch.setattr(operation_class, "name", "broken", raising=False)
    with pytest.raises(ContractError, match=re.escape("operation 'broken' breaks its contract, " + message)):
        check_operation(operation_class())


def test_an_operation_that_is_not_registered():
    class Nameless(Broken):
        name = "nameless"

    with pytest.raises(ContractError, match="check 'settings': no operation is called 'nameless'"):
        check_operation(Nameless())


def test_an_operation_that_loses_its_parameter(monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Forgets(Broken):
        name: ClassVar[str] = "forgets"
        sharpness: float = 1.0

        def to_dict(self):
            return {"name": "forgets"}

    monkeypatch.setitem(operations._objects, "forgets", Forgets)
    with pytest.raises(ContractError, match=r"check 'settings': expected a frozen dataclass equal to .*sharpness=2\.0"):
        check_operation(Forgets(sharpness=2.0))


def test_an_operation_that_a_checkpoint_does_not_keep(monkeypatch):
    """The config keeps the operation of a SinkLM; a module that ignores it comes back with another one."""

    @dataclass(frozen=True, kw_only=True)
    class Fickle(Broken):
        name: ClassVar[str] = "fickle"
        sharpness: float = 1.0

        def weights(self, scores, visible, null_scores=None):
            return Softmax().weights(scores * self.sharpness, visible)

    monkeypatch.setitem(operations._objects, "fickle", Fickle)
    operation = Fickle(sharpness=2.0)
    calls = []
    original = operations.make

    def forgetful(fields):
        calls.append(fields)
        return original(fields) if len(calls) <= 4 else Fickle()

    monkeypatch.setattr(operations, "make", forgetful)
    with pytest.raises(ContractError, match=r"check 'save and load': expected .*sharpness=2\.0.* got .*sharpness=1\.0"):
        check_operation(operation)
