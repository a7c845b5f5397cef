"""The rows of the comparison: settings of the papers, names, and the same wording as claims have."""

from __future__ import annotations

import itertools
import re

import pytest

from sinklab.errors import ConfigurationError
from sinklab.registry import operations
from sinklab_claims.contract.claim import BASELINE, Variant
from sinklab_claims.contract.scales import base_config
from sinklab_claims.pathways import runs
from sinklab_claims.pathways.compare import own_base
from sinklab_claims.pathways.operations import pathways_of
from sinklab_claims.reproduce.cells import make_cells


def test_the_twelve():
    assert [pathway.label for pathway in pathways_of()] == [
        "softmax", "softmax_plus_one", "sink_logit", "key_bias", "clipped_softmax", "gated", "gated_heads", "sigmoid",
        "sigmoid(normalize=True)", "relu", "softpick", "sigma_reparam",
    ]  # fmt: skip
    assert [pathway.label for pathway in pathways_of([{"name": "softpick"}, {"name": "softmax"}])] == ["softmax", "softpick"]


def test_a_name_alone_has_the_settings_of_its_paper():
    clipped, gated, relu = pathways_of([{"name": "clipped_softmax"}, {"name": "gated_heads"}, {"name": "relu"}])[1:]
    assert clipped.operation(128) == {"name": "clipped_softmax", "gamma": -0.025}  # published for BERT-base at this length
    assert gated.operation(64) == {"name": "gated_heads", "opening": 0.25}
    assert relu.operation(64) == {"name": "relu", "uncounted": 1}
    own = pathways_of([{"name": "clipped_softmax", "zeta": 1.5}])[1]  # settings that are given stand alone
    assert (own.label, own.published) == ("clipped_softmax(zeta=1.5)", None)
    assert own.operation(128) == {"name": "clipped_softmax", "zeta": 1.5}
    for pathway, context in itertools.product(pathways_of(), (16, 64, 2048)):
        settings = pathway.operation(context)
        assert operations.make(settings).to_dict().items() >= settings.items()


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"name": "sigmoid"}, {"name": "sigmoid", "normalize": False}, "sigmoid(normalize=False), which is sigmoid, twice"),
        (
            {"name": "clipped_softmax", "gamma": -0.1, "zeta": 1.1},
            {"name": "clipped_softmax", "zeta": 1.1, "gamma": -0.1},
            "clipped_softmax(zeta=1.1, gamma=-0.1), which is clipped_softmax(gamma=-0.1, zeta=1.1), twice",
        ),
    ],
)
def test_an_operation_in_other_words_is_refused_too(one, other, words):
    with pytest.raises(ConfigurationError, match=re.escape(f"the comparison has {words}; name it once")):
        pathways_of([one, other])


def test_a_setting_that_the_published_use_has_at_one_context_alone_is_another_operation():
    published, own = pathways_of([{"name": "clipped_softmax"}, {"name": "clipped_softmax", "gamma": -3.2 / 64}])[1:]
    assert published.operation(64) == own.operation(64)
    assert published.operation(128) != own.operation(128)


def asked(scale, base):
    """All operations, as wide as the scale has it."""
    width = base_config(scale, base).model.intermediate_size
    return runs.Design(pathways_of(), {pathway.label: width for pathway in pathways_of()}, scale, base, [0])


@pytest.mark.parametrize("base", ["bos", "no-bos"])
def test_the_same_configuration_is_the_same_cell_as_in_a_claim(base):
    cells = runs.evaluation_cells(asked("tiny", base), {})["scale"]
    claimed = make_cells([Variant(BASELINE), Variant("s", {"model.operation": {"name": "sigmoid"}})], "tiny", [0], base)
    assert cells["softmax", 0].name == claimed[BASELINE, 0].name
    assert cells["sigmoid", 0].name == claimed["s", 0].name


@pytest.mark.parametrize("scale", ["tiny", "small", "medium", "60m", "1b"])
def test_all_trainings_can_be_configured_at_all_scales(scale):
    found = runs.evaluation_cells(asked(scale, own_base(scale)), {"softpick": 4.0})
    plain, fast, longer = (found[source]["softpick", 0].config for source in ("scale", "chosen", "longer"))
    assert fast.optimizer.learning_rate == pytest.approx(4 * plain.optimizer.learning_rate)
    assert fast.optimizer.learning_rate == longer.optimizer.learning_rate
    assert longer.model.position == {"name": "alibi"}
    assert plain.model.operation == fast.model.operation == longer.model.operation == {"name": "softpick"}
