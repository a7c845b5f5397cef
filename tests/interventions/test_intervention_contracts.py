"""Every intervention that the registry knows keeps the contract of its kind, and the contract notices those that do not."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, ClassVar

import pytest
import torch

from sinklab.attention.intervention import HeadIntervention, HiddenIntervention, Intervention
from sinklab.errors import ContractError, UnsupportedModelError
from sinklab.interventions.hide_key import HideKey
from sinklab.interventions.set_activation import SetActivation
from sinklab.registry import interventions
from sinklab.testing import check_intervention


@pytest.mark.parametrize("name", list(interventions))
def test_intervention(name):
    check_intervention(interventions[name])


@pytest.mark.parametrize(
    ("intervention", "settings"),
    [
        (HideKey, {"place": (0, 3), "spare": 2}),
        (interventions["zero_value"], {"place": (0, 3)}),
        (HideKey, {"place": "null"}),
        (interventions["redirect"], {"place": "null"}),
        (interventions["redirect"], {"place": torch.tensor([[0], [1], [2]])}),
        (SetActivation, {"channels": (3,), "layers": (-1,), "place": None}),
    ],
    ids=lambda value: value.name if isinstance(value, type) else "",
)
def test_with_other_settings(intervention, settings):
    check_intervention(intervention, **settings)


# --- interventions that break the contract ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Halve(HeadIntervention):
    """One as an outsider would write it, and a correct one; those below have something wrong."""

    neutral: ClassVar[dict[str, Any]] = {"heads": {}}

    def edit_outputs(self, call, outputs):
        return outputs / 2


class NoVersion(Halve):
    version = 0


class NeverNeutral(Halve):
    neutral: ClassVar = {}


class NoSuchSetting(Halve):
    example: ClassVar = {"place": 0}


class NoEffect(Halve):
    def edit_outputs(self, call, outputs):
        return outputs


class MixesHeads(Halve):
    def edit_outputs(self, call, outputs):
        return outputs.flip(1)


class OneForAllHeads(Halve):
    def edit_outputs(self, call, outputs):
        return outputs.mean(1, keepdim=True)


class DependsOnTheBlock(Halve):
    def edit_weights(self, call, weights, null_mass, start, stop):
        return weights / (1 + (torch.arange(stop - start) > 0))[:, None], null_mass


class MixesSamples(Halve):
    def edit_outputs(self, call, outputs):
        return outputs.mean(0, keepdim=True).expand_as(outputs)


class CountsPadding(Halve):
    def edit_outputs(self, call, outputs):
        return outputs * torch.arange(outputs.shape[2])[:, None]


class LooksAhead(Halve):
    def edit_outputs(self, call, outputs):
        return outputs * (call.query_positions.max(1, keepdim=True).values - call.query_positions)[:, None, :, None]


class WrongGroups(Halve):
    def edit_call(self, call):
        values = call.values.clone()
        values[:, 0] = 0.0
        return dataclasses.replace(call, values=values)

    def edit_outputs(self, call, outputs):
        return outputs


class ServesNobody(Halve):
    def edit_call(self, call):
        raise UnsupportedModelError("not this one")


class FailsElsewhere(Halve):
    def edit_outputs(self, call, outputs):
        if call.site.module.startswith("encoder"):
            raise UnsupportedModelError("no encoders") if call.q_len == 99 else ContractError("an encoder")
        return outputs / 2


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class IndexOfPadding(HiddenIntervention):
    """Takes the first row of the tensor for the first token."""

    neutral: ClassVar = {"layers": ()}

    def edit_hidden(self, output):
        hidden = output.hidden_states.clone()
        hidden[:, 0] = 0.0
        return hidden


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (NoVersion, "check 'declaration': expected a version from 1, got 0"),
        (NeverNeutral, "check 'declaration': expected changes_nothing under the neutral settings, got {}"),
        (NoSuchSetting, "check 'declaration': Halve.__init__() got an unexpected keyword argument 'place'"),
        (NoEffect, "check 'effect (llama)': expected other outputs under the settings, got the same bits"),
        (OneForAllHeads, "check 'shapes (llama)': expected outputs (3, 4, 8, 8) from edit_outputs, got (3, 1, 8, 8)"),
        (MixesHeads, "check 'one by one (llama)': expected outputs within 1.0e-09"),
        (DependsOnTheBlock, "check 'blocks (llama)': expected outputs within 1.0e-09"),
        (MixesSamples, "check 'batch split (llama)': expected outputs of a sample within 1.0e-09"),
        (CountsPadding, "check 'left padding (llama)': expected outputs of a sample within 1.0e-09"),
        (LooksAhead, "check 'cached decoding (llama)': expected outputs in pieces within 1.0e-09"),
        (WrongGroups, "check 'one by one (llama)': expected outputs within 1.0e-09"),
        (ServesNobody, "check 'effect': expected one of llama, gpt2, sink_logit, sigmoid that can be edited so, got none"),
        (FailsElsewhere, "check 'other architectures (bert)': expected outputs or a refusal, got an encoder"),
        (IndexOfPadding, "check 'left padding (llama)': expected outputs of a sample within 1.0e-09"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_an_intervention_that_breaks_its_contract(broken, message, monkeypatch):
    monkeypatch.setitem(interventions._objects, "broken", broken)
    monkeypatch.setattr(broken, "name", "broken", raising=False)
    with pytest.raises(ContractError, match=re.escape("intervention 'broken' breaks its contract, " + message)):
        check_intervention(broken)


def test_one_that_is_not_registered():
    with pytest.raises(ContractError, match="check 'declaration': expected a registered name, got None"):
        check_intervention(Halve)


def test_a_correct_one_of_an_outsider(monkeypatch):
    monkeypatch.setitem(interventions._objects, "halve", Halve)
    monkeypatch.setattr(Halve, "name", "halve", raising=False)
    check_intervention(Halve)


def test_one_that_mixes_samples_and_says_so(monkeypatch):
    class Honest(MixesSamples):
        per_sample = False

    monkeypatch.setitem(interventions._objects, "honest", Honest)
    monkeypatch.setattr(Honest, "name", "honest", raising=False)
    check_intervention(Honest)


def test_the_kinds():
    assert {cls for name in interventions for cls in interventions[name].__mro__ if cls.__base__ is Intervention} == {
        HeadIntervention,
        HiddenIntervention,
    }
