"""Every plug-in that the registry knows keeps the contract of its kind, and the contract checks notice plug-ins that do not."""

from __future__ import annotations

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

    def row(self, key):
        module, layer, head = key
        value, count = self.sums[key] / self.counts[key], self.counts[key]
        return {"metric": self.metrics[0], "value": value, "count": count, "module": module, "layer": layer, "head": head}

    def rows(self):
        return iter([self.row(key) for key in self.sums])


def test_a_correct_probe_of_an_outsider():
    check_probe(Mass)


def with_row(**changes) -> dict:
    """Each row with something wrong in it."""
    return {"row": lambda self, key: Mass.row(self, key) | changes}


def changes_the_model(self, call, statistics):
    Mass.update(self, call, statistics)
    call.head_outputs.mul_(1.0001)


def counts_batches(self, call, statistics):
    """The bug of a public script: sums of means of batches, divided by the number of batches."""
    for head in range(call.num_heads):
        key = (call.site.module, call.site.layer, head)
        self.sums[key] = self.sums.get(key, 0.0) + float(statistics.row_mass[:, head].mean())
        self.counts[key] = self.counts.get(key, 0) + 1


def counts_padding(self, call, statistics):
    Mass.update(self, call, statistics)
    for key in self.counts:
        self.counts[key] += int((~call.counted).sum())


def passes_shorter_ones_over(self, call, statistics):
    self.longest = max(getattr(self, "longest", 0), call.kv_len)
    if call.kv_len == self.longest:
        Mass.update(self, call, statistics)


def forgets_after_telling(self):
    rows = list(Mass.rows(self))
    self.sums[next(iter(self.sums))] += 1e-9
    return iter(rows)


MASS = Mass.metrics[0]
PROBES = {
    "no version": ({"metrics": (MASS._with(version=0),)}, "check 'declaration': expected a version of mass from 1, got 0"),
    "unknown need": (
        {"needs": frozenset({"mass", "everything"})},
        "check 'declaration': expected needs among columns, .*, got ['everything']",
    ),
    "no metrics": ({"metrics": ()}, "check 'declaration': expected a tuple of Metric, got ()"),
    "two metrics of one name": (
        {"metrics": (MASS, MASS.of("weight"))},
        "check 'declaration': expected one metric under each name, got mass, mass",
    ),
    "changes the model": (
        {"needs": frozenset({"mass", "head_outputs"}), "update": changes_the_model},
        "check 'logits unchanged': expected bit-identical logits of llama, got ",
    ),
    "says nothing": ({"rows": lambda self: iter(())}, "check 'rows': expected at least one row, got none"),
    "forgets": ({"rows": forgets_after_telling}, "check 'rows': expected the same rows when asked twice, got others"),
    "undeclared": (
        with_row(metric=MASS.named("weight")),
        "check 'rows': expected a Metric among mass, got Metric(name='weight', ",
    ),
    "a name": (with_row(metric="mass", unit="fraction"), "check 'rows': expected a Metric among mass, got mass"),
    "a unit": (with_row(unit="percent"), "check 'rows': a row of mass states its own unit, which its Metric declares"),
    "out of range": (with_row(value=1.5), "check 'rows': expected a number in [0.0, 1.0] for mass, got 1.5"),
    "no number": (with_row(value=float("nan")), "check 'rows': expected a number in [0.0, 1.0] for mass, got nan"),
    "no count": (with_row(count=0), "check 'rows': expected a count of at least 1 for mass, got 0"),
    "a column": (with_row(channel=3), "check 'rows': rows have columns that the schema does not have: channel"),
    "half a position": (
        with_row(query_position=1.0),
        "check 'rows': expected a whole number, or nothing, as query_position of mass, got 1.0",
    ),
    "one place twice": (with_row(head=0), "check 'rows': expected one row for each place, got two for metric mass, "),
    "counts batches": ({"update": counts_batches}, "check 'batch size (llama)': expected "),
    "passes shorter ones over": ({"update": passes_shorter_ones_over}, "check 'order (llama)': expected "),
    "counts padding": ({"update": counts_padding}, "check 'left padding (llama)': expected "),
}


@pytest.mark.parametrize("case", PROBES)
def test_a_probe_that_breaks_its_contract(case):
    members, message = PROBES[case]
    with pytest.raises(ContractError, match=re.escape("probe 'mass' breaks its contract, " + message).replace(r"\.\*", ".*")):
        check_probe(type("Changed", (Mass,), members))


# --- operations that break the contract ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Broken(Operation):
    """Softmax with something wrong in it; registered for one test at a time."""

    normalized: ClassVar[bool] = True

    def weights(self, scores, visible, null_scores=None):
        return Softmax().weights(scores, visible)


def weights(change, **members) -> dict:
    """Weights of softmax changed, given the scores and what is visible."""
    made = lambda self, scores, visible, null_scores=None: change(Softmax().weights(scores, visible), scores, visible)  # noqa: E731
    return {"weights": made, **members}


def sinking(**members) -> dict:
    """A learned sink logit, and something wrong with it."""
    right = {
        "is_softmax": True,
        "parameters": lambda self, shape: {"logit": torch.zeros(shape.num_heads)},
        "null_scores": lambda self, queries, scaling, state: state["logit"][None, :, None],
        "weights": lambda self, scores, visible, null_scores=None: Softmax().weights(scores, visible, null_scores),
    }
    return right | members


def exponentials(_, scores, visible):
    scores = scores if scores.dtype == torch.float64 else scores.float()
    found = torch.exp(scores) if visible is None else torch.exp(scores).masked_fill(~visible, 0.0)
    return found / found.sum(-1, keepdim=True).clamp(min=1e-30)


def counts_nothing_twice(self, scores, visible, null_scores=None):
    mass = Operation.null_mass(self, scores, visible, null_scores)
    return None if mass is None else 2.0 * mass


def overflows_with_a_large_logit(self, scores, visible, null_scores=None):
    found = Softmax().weights(scores, visible, null_scores)
    return found if null_scores is None else found / (null_scores.amax() < 10.0)


def outputs(change) -> dict:
    """Head outputs of softmax from queries, keys and values that were changed."""

    def made(self, queries, keys, values, visible, scaling, state=None, **host):
        return Operation.head_outputs(self, *change(queries, keys, values), visible, scaling)

    return {"head_outputs": made}


def looks_ahead(self, queries, keys, values, visible, scaling, state=None, **host):
    found, shown = Operation.head_outputs(self, queries, keys, values, visible, scaling)
    return found + 1e-6 * values.mean((1, 2), keepdim=True), shown


def mixes_up_groups(queries, keys, values):
    groups = queries.shape[1] // keys.shape[1]
    return queries, keys.repeat(1, groups, 1, 1), values.repeat(1, groups, 1, 1)


def coarse_in_half_precision(queries, keys, values):
    coarse = queries.dtype == torch.bfloat16
    return queries, keys, values.to(torch.float8_e5m2).to(torch.bfloat16) if coarse else values


def cannot_be_captured(queries, keys, values):
    if float(queries.sum()) > 1e9:
        raise ValueError
    return queries, keys, values


NOT = {"normalized": False}
SIGMOID = Sigmoid()
HIDDEN = "check 'hidden keys': expected weights of exactly 0 on hidden keys, got a weight of "
SUMS = "check 'row sums': expected weights and null mass that sum to one, got a row that is off by "
OPERATIONS = {
    "one row for all heads": (
        weights(lambda w, s, v: w.mean(1, keepdim=True)),
        "check 'shapes': expected weights (2, 4, 8, 8), got (2, 1, 8, 8)",
    ),
    "a gain by query": (
        {"gain": lambda self, state: torch.ones(8)},
        "check 'shapes': expected a gain that broadcasts to (2, 4, 8, 16), got (8,)",
    ),
    "leaks to hidden keys": (weights(lambda w, s, v: w + 1e-9), HIDDEN + "1.0e-09"),
    "undefined on hidden rows": (weights(lambda w, s, v: torch.softmax(s.masked_fill(~v, -torch.inf), -1)), HIDDEN + "nan"),
    "half precision": (
        weights(lambda w, s, v: w.bfloat16()),
        "check 'hidden keys': expected float32 or wider, got torch.bfloat16",
    ),
    "says it normalizes": (weights(lambda w, s, v: SIGMOID.weights(s, v)), SUMS),
    "says it does not": (NOT, "check 'row sums': expected normalized = True, since all rows sum to one"),
    "depends on the block": (
        weights(lambda w, s, v: w / s.shape[2], **NOT),
        "check 'blocks': expected weights of a block of rows within 1.0e-12",
    ),
    "overflows": (weights(exponentials), "check 'extreme scores': expected finite weights"),
    "a wrong gradient": (
        weights(lambda w, s, v: Softmax().weights(s.detach(), v) + 0.0 * s),
        "check 'gradient': Jacobian mismatch",
    ),
    "no gradient of its logit": (
        sinking(
            null_scores=lambda self, queries, scaling, state: (state["logit"].detach() + 0.0 * state["logit"])[None, :, None]
        ),
        "check 'gradient': Jacobian mismatch",
    ),
    "counts nothing twice": (sinking(null_mass=counts_nothing_twice), SUMS),
    "overflows with a large logit": (sinking(weights=overflows_with_a_large_logit), HIDDEN + "nan"),
    "a parameter in half precision": (
        sinking(parameters=lambda self, shape: {"logit": torch.zeros(shape.num_heads, dtype=torch.bfloat16)}),
        "check 'parameters': expected finite float32 numbers for 'logit', got torch.bfloat16",
    ),
    "looks ahead": ({"head_outputs": looks_ahead}, "check 'causality': expected outputs before a changed token bit-equal"),
    "mixes up groups": (outputs(mixes_up_groups), "check 'grouped queries': expected outputs with repeated keys and values"),
    "coarse in half precision": (outputs(coarse_in_half_precision), "check 'bfloat16': expected outputs within "),
    "cannot be captured": (outputs(cannot_be_captured), "check 'compile': "),
    # The bias -log n with n read off the tensor: right in a forward pass, wrong while decoding.
    "counts the cache": (
        weights(lambda w, s, v: SIGMOID.weights(s - torch.log(torch.tensor(float(s.shape[-1]))), v), **NOT),
        "check 'cached decoding': expected logits of decoding in pieces within 1.0e-09",
    ),
}


@pytest.mark.parametrize("case", OPERATIONS)
def test_an_operation_that_breaks_its_contract(case, monkeypatch):
    members, message = OPERATIONS[case]
    operation_class = type("Changed", (Broken,), {"name": "broken", "__module__": __name__, **members})
    monkeypatch.setitem(operations._objects, "broken", operation_class)
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
