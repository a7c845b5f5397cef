"""Interventions on hidden states: each equals the edit made by hand, and says so when it cannot be made."""

from __future__ import annotations

import pytest
import torch
import transformers

from sinklab import attend
from sinklab.attention.probe import Watcher
from sinklab.errors import ConfigurationError, SessionError
from sinklab.interventions.clamp_activation import ClampActivation
from sinklab.interventions.set_activation import SetActivation
from sinklab.testing import tiny_models

IDS = torch.tensor([[11, 12, 13, 14, 15], [21, 22, 23, 24, 25]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


@pytest.fixture(scope="module")
def llama():
    return tiny_models()["llama"]


def run(model, *interventions, **inputs):
    with torch.no_grad(), attend(model, interventions=interventions):
        return model(**inputs).logits


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SetActivation(channels=(1, 2), value=(1.0, 2.0, 3.0)), r"2 channels need one value.*shape \(3,\)"),
        (lambda: SetActivation(place="null", channels=(3,)), "'null' is no place in the hidden states"),
        (lambda: SetActivation(channels=3), "set_activation: channels must be a list, also of one, got 3"),
        (lambda: ClampActivation(limit=-1.0), "limit must be 0 or more, got -1.0"),
    ],
)
def test_settings_that_cannot_be(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def states_of(model, *interventions, **inputs):
    with torch.no_grad(), attend(model, interventions=interventions):
        return model(**inputs, output_hidden_states=True).hidden_states


def test_set_activation_sets_these_and_no_others(llama):
    clean = states_of(llama, input_ids=IDS)
    edited = states_of(llama, SetActivation(place=(0, 2), channels=(3, 5), layers=(0,)), input_ids=IDS)
    assert torch.equal(edited[0], clean[0])
    expected = clean[1].clone()
    expected[:, [[0], [2]], [3, 5]] = 0.0
    assert torch.equal(edited[1], expected)
    assert not torch.equal(edited[2], clean[2])


def test_values(llama):
    given = SetActivation(channels=(3, 5), layers=(0,), value=(1.5, -2.0))
    assert states_of(llama, given, input_ids=IDS)[1][:, 0, [3, 5]].tolist() == [[1.5, -2.0]] * 2


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_enters_the_first_layer_under_left_padding(name):
    """No attention call has said yet where the tokens are; the padding mask has."""
    model = tiny_models()[name]
    inputs = {"input_ids": IDS, "attention_mask": MASK, "position_ids": (MASK.cumsum(1) - 1).clamp(min=0)}
    clean = states_of(model, **inputs)[0]
    at_first = SetActivation(place=0, channels=tuple(range(32)), layers=(-1,), value=0.5)
    padded = run(model, at_first, **inputs)
    alone = run(model, at_first, input_ids=IDS[:1, 2:])
    assert (padded[0, 2:] - alone[0]).abs().max() < 1e-9
    assert clean.shape == (2, 5, 32)


def test_what_enters_the_first_layer_when_decoding(llama):
    """Position 3 comes in the second piece, with and without a mask."""
    at_third = SetActivation(place=3, channels=(0, 1, 2), layers=(-1,), value=2.0)
    whole = run(llama, at_third, input_ids=IDS)
    assert (whole[:, 2] - run(llama, input_ids=IDS)[:, 2]).abs().max() == 0
    for masked in (False, True):
        with torch.no_grad(), attend(llama, interventions=[at_third]):
            more = {"attention_mask": torch.ones(2, 3).long()} if masked else {}
            cache = llama(input_ids=IDS[:, :3], use_cache=True, **more).past_key_values
            more = {"attention_mask": torch.ones(2, 5).long()} if masked else {}
            rest = llama(input_ids=IDS[:, 3:], past_key_values=cache, **more).logits
        assert (rest - whole[:, 3:]).abs().max() < 1e-9


def test_clamp_activation(llama):
    clean = states_of(llama, input_ids=IDS)[1]
    clamped = states_of(llama, ClampActivation(limit=0.3, layers=(0,)), input_ids=IDS)[1]
    assert torch.equal(clamped, clean.clamp(-0.3, 0.3))
    padded = {"input_ids": IDS, "attention_mask": MASK}
    clean = states_of(llama, **padded)[1]
    clamped = states_of(llama, ClampActivation(limit=0.3, layers=(0,)), **padded)[1]
    assert torch.equal(clamped, torch.where(MASK[..., None] > 0, clean.clamp(-0.3, 0.3), clean))


class States(Watcher):
    """Keeps what it is shown, by site."""

    name, needs = "states", frozenset({"hidden_states"})

    def __init__(self):
        self.seen = {}

    def update_layer(self, output):
        assert output.site not in self.seen
        self.seen[output.site] = output.hidden_states.clone()


@torch.no_grad()
def test_a_layer_that_runs_several_times_is_shown_and_edited_run_by_run():
    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_attention_heads=4, embedding_size=16,
        num_hidden_layers=4, num_hidden_groups=2, inner_group_num=2,
    )  # fmt: skip
    model, given, gave = transformers.AlbertModel(config).eval(), [], []
    groups = model.encoder.albert_layer_groups
    for layer in (layer for group in groups for layer in group.albert_layers):
        layer.register_forward_pre_hook(lambda module, args: given.append(args[0]))
        layer.register_forward_hook(lambda module, args, output: gave.append(output))

    def shown(*interventions):
        probe = States()
        given.clear()
        gave.clear()
        with attend(model, [probe], interventions):
            model(input_ids=IDS)
        return probe.seen

    clean = shown()
    names = [f"encoder.albert_layer_groups.{group}.albert_layers.{layer}" for group in (0, 1) for layer in (0, 1)]
    first, second, third, fourth = names
    # A group runs twice, then the other one.
    in_order = [first, second, f"{first}#1", f"{second}#1", third, fourth, f"{third}#1", f"{fourth}#1"]
    assert [(site.module, site.layer) for site in clean] == [
        (f"{first}.input", -1), *((name, number) for number, name in enumerate(in_order))
    ]  # fmt: skip
    assert all(torch.equal(one, other) for one, other in zip(clean.values(), [given[0], *gave], strict=True))
    own = list(clean.values())
    for layer in (-1, 2):
        edited = list(shown(SetActivation(channels=(3,), place=1, layers=(layer,))).values())
        expected = own[layer + 1].clone()
        expected[:, 1, 3] = 0
        assert all(torch.equal(one, other) for one, other in zip(edited[: layer + 1], own, strict=False))
        assert torch.equal(edited[layer + 1], expected)
        assert not any((one[:, 1, 3] == 0).any() for one in edited[layer + 2 :])
    with pytest.raises(ConfigurationError, match=r"the model has no layer 8; expected -1 \(embeddings\) to 7"):
        shown(SetActivation(channels=(3,), layers=(8,)))


def test_errors_of_hidden_interventions(llama):
    with pytest.raises(ConfigurationError, match="has no channel 32; expected 0 to 31"):
        run(llama, SetActivation(channels=(32,)), input_ids=IDS)
    with pytest.raises(ConfigurationError, match="'set_activation': layers must be a list, also of one, got 1"):
        run(llama, SetActivation(channels=(3,), layers=1), input_ids=IDS)
    with pytest.raises(ConfigurationError, match=r"the model has no layer 2; expected -1 \(embeddings\) to 1"):
        run(llama, SetActivation(channels=(3,), layers=(2,)), input_ids=IDS)
    with (
        pytest.raises(SessionError, match=r"has no gradient; run the model under torch\.no_grad"),
        attend(llama, interventions=[SetActivation(channels=(3,))]),
    ):
        llama(input_ids=IDS)
