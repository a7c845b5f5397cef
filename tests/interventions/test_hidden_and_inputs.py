"""Interventions on hidden states and on inputs: each equals the edit made by hand, and says so when it cannot be made."""

from __future__ import annotations

import pytest
import torch
import transformers

from sinklab import attend
from sinklab.attention.probe import Watcher
from sinklab.errors import ConfigurationError, SessionError, UnsupportedModelError
from sinklab.interventions.clamp_activation import ClampActivation
from sinklab.interventions.delete_bos import DeleteBos
from sinklab.interventions.insert_bos import InsertBos
from sinklab.interventions.random_prefix import RandomPrefix
from sinklab.interventions.replace_token import ReplaceToken
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


# --- inputs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("intervention", "rows", "kept"),
    [
        (InsertBos(token=1), [[1, 11, 12, 13, 14, 15], [1, 21, 22, 23, 24, 25]], [1, 2, 3, 4, 5]),
        (InsertBos(token=1, count=2), [[1, 1, 11, 12, 13, 14, 15], [1, 1, 21, 22, 23, 24, 25]], [2, 3, 4, 5, 6]),
        (DeleteBos(), [[12, 13, 14, 15], [22, 23, 24, 25]], [-1, 0, 1, 2, 3]),
        (ReplaceToken(place=(0, 4), token=9), [[9, 12, 13, 14, 9], [9, 22, 23, 24, 9]], [0, 1, 2, 3, 4]),
        (ReplaceToken(place=torch.tensor([[1], [2]]), token=9), [[11, 9, 13, 14, 15], [21, 22, 9, 24, 25]], [0, 1, 2, 3, 4]),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else "",
)
def test_tokens(intervention, rows, kept):
    assert intervention.edit_inputs({"input_ids": IDS})["input_ids"].tolist() == rows
    assert intervention.kept(5).tolist() == kept
    for row, old in zip(rows, IDS.tolist(), strict=True):
        if not isinstance(intervention, ReplaceToken):
            assert all(new == -1 or row[new] == token for new, token in zip(kept, old, strict=True))


def test_a_random_prefix_is_the_same_for_all_rows_and_for_one_seed():
    prefix = RandomPrefix(vocab_size=1000, count=3, behind=1, seed=4)
    found = prefix.edit_inputs({"input_ids": IDS})["input_ids"]
    again = prefix.edit_inputs({"input_ids": IDS[1:]})["input_ids"]
    assert found[:, 0].tolist() == [11, 21]
    assert found[:, 4:].tolist() == [[12, 13, 14, 15], [22, 23, 24, 25]]
    assert torch.equal(found[0, 1:4], found[1, 1:4])
    assert torch.equal(found[1:], again)
    other = RandomPrefix(vocab_size=1000, count=3, behind=1, seed=5).edit_inputs({"input_ids": IDS})["input_ids"]
    assert not torch.equal(found, other)
    assert prefix.kept(4).tolist() == [0, 4, 5, 6]


@pytest.mark.parametrize(
    ("intervention", "first", "mask", "positions"),
    [
        (InsertBos(token=1), [11, 12, 1, 13, 14, 15], [0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 2, 3]),
        (DeleteBos(count=2), [11, 12, 15], [0, 0, 1], [0, 0, 0]),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else "",
)
def test_left_padding_stays_in_front(intervention, first, mask, positions):
    given = {"input_ids": IDS, "attention_mask": MASK, "position_ids": (MASK.cumsum(1) - 1).clamp(min=0)}
    edited = intervention.edit_inputs(dict(given))
    assert edited["input_ids"][0].tolist() == first
    assert edited["attention_mask"][0].tolist() == mask
    assert edited["position_ids"][0].tolist() == positions
    assert given["input_ids"] is IDS  # nothing is written into what the caller gave
    assert IDS[0].tolist() == [11, 12, 13, 14, 15]


def test_types_of_tokens_follow():
    types = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
    edited = InsertBos(token=1).edit_inputs({"input_ids": IDS, "token_type_ids": types})
    assert edited["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]]


@pytest.mark.parametrize("intervention", [InsertBos(token=1), DeleteBos(), RandomPrefix(vocab_size=9)])
def test_what_a_new_number_of_tokens_cannot_go_with(llama, intervention):
    with pytest.raises(ConfigurationError, match=r"'labels' is given for each of the 5; leave it out"):
        run(llama, intervention, input_ids=IDS, labels=IDS)
    with pytest.raises(ConfigurationError, match=r"a cache and what is decoded.*generate\(use_cache=False\)"):
        run(llama, intervention, input_ids=IDS, past_key_values=transformers.DynamicCache())
    with pytest.raises(ConfigurationError, match="position_ids that do not count the tokens of a row"):
        run(llama, intervention, input_ids=IDS, position_ids=torch.tensor([[0, 1, 0, 1, 2]]).expand(2, 5))
    with pytest.raises(ConfigurationError, match=r"a mask of shape \(2, 1, 5, 5\)"):
        run(llama, intervention, input_ids=IDS, attention_mask=torch.ones(2, 1, 5, 5).bool())


def test_generate(llama):
    settings = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with attend(llama, interventions=[ReplaceToken(place=0, token=9)]):
        edited = llama.generate(IDS, **settings)
    by_hand = torch.cat([torch.full((2, 1), 9), IDS[:, 1:]], dim=1)
    assert torch.equal(edited[:, 5:], llama.generate(by_hand, **settings)[:, 5:])
    with (
        pytest.raises(ConfigurationError, match=r"run without past_key_values \(generate\(use_cache=False\)\)"),
        attend(llama, interventions=[InsertBos(token=1)]),
    ):
        llama.generate(IDS, **settings)
    with attend(llama, interventions=[InsertBos(token=1)]):
        inserted = llama.generate(IDS, use_cache=False, **settings)
    by_hand = torch.cat([torch.ones(2, 1, dtype=torch.int64), IDS], dim=1)
    assert torch.equal(inserted[:, 5:], llama.generate(by_hand, **settings)[:, 6:])


@pytest.mark.parametrize("call", [lambda model: model.forward, lambda model: model.model, lambda model: model.model.forward])
def test_a_call_past_the_model_itself_is_refused(llama, call):
    """Before, it ran on what it was given, as if nothing was to be edited."""
    says = "'replace_token' has not edited: .* LlamaForCausalLM is called with"
    with attend(llama, interventions=[ReplaceToken(token=5)]), torch.no_grad():
        with pytest.raises(SessionError, match=says):
            call(llama)(input_ids=IDS)
        edited = llama(input_ids=IDS).logits
        with pytest.raises(SessionError, match=says):
            call(llama)(input_ids=IDS)
        assert torch.equal(llama(input_ids=IDS).logits, edited)
    with attend(llama, interventions=[ReplaceToken(token=5, place=())]), torch.no_grad():
        call(llama)(input_ids=IDS)


def test_generation_edits_the_tokens_of_a_decoder_beside_an_encoder_that_has_run():
    config = transformers.T5Config(
        vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    settings = {"max_new_tokens": 3, "do_sample": False, "decoder_input_ids": torch.tensor([[7, 8, 9]]).expand(len(IDS), 3)}
    with attend(model, interventions=[ReplaceToken(token=5, tokens="decoder_input_ids")]) as session:
        model.generate(IDS, **settings)
    assert {site.part for site in session.sites} == {"encoder", "decoder", "cross-attention"}
    with (
        pytest.raises(SessionError, match=r"encoder\.block.* runs on inputs that intervention 'replace_token' has not edited"),
        attend(model, interventions=[ReplaceToken(token=5)]),
    ):
        model.generate(IDS, **settings)


def test_encoder_and_decoder_have_tokens_of_their_own():
    torch.manual_seed(0)
    model = transformers.T5Model(transformers.T5Config(vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4))
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :4]}

    def states(*interventions, **given):
        with torch.no_grad(), attend(model.eval(), interventions=interventions):
            return model(**given)

    found = states(InsertBos(token=1), **inputs)
    assert found.encoder_last_hidden_state.shape[1] == 6
    assert found.last_hidden_state.shape[1] == 4
    found = states(InsertBos(token=1, tokens="decoder_input_ids"), **inputs)
    assert found.encoder_last_hidden_state.shape[1] == 5
    assert found.last_hidden_state.shape[1] == 5
    with pytest.raises(UnsupportedModelError, match="T5Model was called without input_ids"):
        states(InsertBos(token=1), encoder_outputs=(torch.zeros(2, 5, 32),), decoder_input_ids=IDS)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InsertBos(token=1, count=-1), "count must be 0 or more, got -1"),
        (lambda: DeleteBos(count=-1), "count must be 0 or more, got -1"),
        (lambda: RandomPrefix(vocab_size=0), "vocab_size must be positive"),
        (lambda: ReplaceToken(place="null", token=1), "'null' is no token; give positions"),
        (lambda: SetActivation(channels=(1,), mode="none"), "mode must be zero, mean or value, got 'none'"),
        (lambda: SetActivation(channels=(1, 2), value=(1.0, 2.0, 3.0)), r"2 channels need one value.*shape \(3,\)"),
        (lambda: SetActivation(channels=(1,), value=5.0), "value 5.0 is given, and mode zero takes none; give mode='value'"),
        (lambda: SetActivation(channels=(1,), mode="mean", value=torch.tensor([1.0])), "mode mean takes none"),
        (lambda: SetActivation(channels=3), "set_activation: channels must be a list, also of one, got 3"),
        (lambda: ClampActivation(limit=1.0, channels=3), "clamp_activation: channels must be a list, also of one, got 3"),
        (lambda: ClampActivation(limit=-1.0), "limit must be 0 or more, got -1.0"),
    ],
)
def test_settings_that_cannot_be(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_rows_that_are_too_short(llama):
    with pytest.raises(ConfigurationError, match="a row of 3 tokens would be empty without its first 3"):
        run(llama, DeleteBos(count=3), input_ids=IDS, attention_mask=MASK)
    with pytest.raises(ConfigurationError, match="token 21 stands where 11 was expected"):
        run(llama, DeleteBos(token=11), input_ids=IDS)
    with pytest.raises(ConfigurationError, match="fewer than the 4 tokens behind which 1 are to be put"):
        run(llama, RandomPrefix(vocab_size=9, behind=4), input_ids=IDS, attention_mask=MASK)


# --- hidden states ---------------------------------------------------------------------------------------------------------


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


def test_value_and_mean(llama):
    clean = states_of(llama, input_ids=IDS)[1]
    given = SetActivation(channels=(3, 5), layers=(0,), mode="value", value=(1.5, -2.0))
    assert states_of(llama, given, input_ids=IDS)[1][:, 0, [3, 5]].tolist() == [[1.5, -2.0]] * 2
    mean = states_of(llama, SetActivation(channels=(3, 5), layers=(0,), mode="mean"), input_ids=IDS)[1]
    assert (mean[:, 0, [3, 5]] - clean[:, 0, [3, 5]].mean(0)).abs().max() < 1e-12
    assert torch.equal(mean[:, 1:], clean[:, 1:])


def test_the_mean_of_left_padded_texts_is_over_positions_of_the_text(llama):
    positions = (MASK.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": IDS, "attention_mask": MASK, "position_ids": positions}
    clean = states_of(llama, **inputs)[1]
    mean = states_of(llama, SetActivation(channels=(3,), layers=(0,), mode="mean"), **inputs)[1]
    expected = (clean[0, 2, 3] + clean[1, 0, 3]) / 2
    assert (mean[0, 2, 3] - expected).abs() < 1e-12
    assert (mean[1, 0, 3] - expected).abs() < 1e-12
    assert torch.equal(mean[0, :2], clean[0, :2])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_enters_the_first_layer_under_left_padding(name):
    """No attention call has said yet where the tokens are; the padding mask has."""
    model = tiny_models()[name]
    inputs = {"input_ids": IDS, "attention_mask": MASK, "position_ids": (MASK.cumsum(1) - 1).clamp(min=0)}
    clean = states_of(model, **inputs)[0]
    at_first = SetActivation(place=0, channels=tuple(range(32)), layers=(-1,), mode="value", value=0.5)
    padded = run(model, at_first, **inputs)
    alone = run(model, at_first, input_ids=IDS[:1, 2:])
    assert (padded[0, 2:] - alone[0]).abs().max() < 1e-9
    assert clean.shape == (2, 5, 32)


def test_what_enters_the_first_layer_when_decoding(llama):
    """Position 3 comes in the second piece, with and without a mask."""
    at_third = SetActivation(place=3, channels=(0, 1, 2), layers=(-1,), mode="value", value=2.0)
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
    one = states_of(llama, ClampActivation(limit=0.3, layers=(0,), place=1, channels=(2,)), input_ids=IDS)[1]
    assert int((one != clean).sum()) <= 2
    assert torch.equal(one[:, 1, 2], clean[:, 1, 2].clamp(-0.3, 0.3))


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


@pytest.mark.parametrize("name", ["CLIP", "Siglip"])
def test_tokens_of_models_of_two_towers_are_edited(name):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    eyes, words = {**sizes, "image_size": 16, "patch_size": 8}, {**sizes, "vocab_size": 40, "max_position_embeddings": 8}
    configs = {"text_config": {**words, "eos_token_id": 2}, "vision_config": eyes}
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**configs)).eval()
    inputs = {"input_ids": torch.tensor([[1, 5, 6, 7, 2]]), "pixel_values": torch.randn(1, 3, 16, 16)}
    with torch.no_grad():
        before = model(**inputs).text_embeds
        with attend(model, interventions=[ReplaceToken(place=2, token=39)]):
            after = model(**inputs).text_embeds
        assert torch.equal(after, model(**{**inputs, "input_ids": torch.tensor([[1, 5, 39, 7, 2]])}).text_embeds)
        assert not torch.equal(after, before)


def test_errors_of_hidden_interventions(llama):
    with pytest.raises(ConfigurationError, match="has no channel 32; expected 0 to 31"):
        run(llama, SetActivation(channels=(32,)), input_ids=IDS)
    with pytest.raises(ConfigurationError, match="'set_activation': layers must be a list, also of one, got 1"):
        run(llama, SetActivation(channels=(3,), layers=1), input_ids=IDS)
    with pytest.raises(ConfigurationError, match=r"the model has no layer 2; expected -1 \(embeddings\) to 1"):
        run(llama, SetActivation(channels=(3,), layers=(2,)), input_ids=IDS)
    with pytest.raises(ConfigurationError, match="'null' is no place in the hidden states"):
        run(llama, SetActivation(place="null", channels=(3,)), input_ids=IDS)
    with (
        pytest.raises(SessionError, match=r"has no gradient; run the model under torch\.no_grad"),
        attend(llama, interventions=[SetActivation(channels=(3,))]),
    ):
        llama(input_ids=IDS)
