"""Who sees whom: windows, prefixes, padding and tokens in front, together, with and without a cache."""

import pytest
import torch
from tests.models.small_models import EXACT, SIGMOID, TOKENS, decoded, logits_of, make, visible
from torch import Tensor
from transformers import StaticCache

from sinklab.errors import ConfigurationError
from sinklab.models import masking
from sinklab.models.language_model import SinkLM


def test_window():
    assert visible(make(window=2), TOKENS[:1, :4]) == ["x...", "xx..", ".xx.", "..xx"]
    assert visible(make(window=4), TOKENS[:1, :4]) == ["x...", "xx..", "xxx.", "xxxx"]


def test_prefix():
    assert visible(make(prefix=3), TOKENS[:1, :5]) == ["xxx..", "xxx..", "xxx..", "xxxx.", "xxxxx"]


def test_prefix_behind_padding():
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    assert visible(make(prefix=2), TOKENS[:1, :5], attention_mask=mask)[2:] == ["..xx.", "..xx.", "..xxx"]


def test_several_documents_in_a_row_are_refused():
    with pytest.raises(ConfigurationError, match="begin again inside a row: give each document a row of its own"):
        make()(TOKENS[:1, :5], position_ids=torch.tensor([[0, 1, 2, 0, 1]]))


def test_positions_that_go_on_are_no_documents():
    shifted = torch.arange(5)[None] + 20
    assert visible(make(), TOKENS[:1, :5], position_ids=shifted)[-1] == "xxxxx"


def test_a_four_dimensional_mask_says_it_all():
    shown = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril() & ~torch.eye(4, dtype=torch.bool).roll(1, 0)
    shown[..., 0, :] = torch.tensor([True, False, False, False])
    expected = ["x...", ".x..", "x.x.", "xx.x"]
    model = make(window=1)
    for implementation in ("sinklab_softmax", "eager"):
        model.set_attn_implementation(implementation)
        assert visible(model, TOKENS[:1, :4], attention_mask=shown) == expected


def test_no_mask_is_built_where_causality_is_all(monkeypatch):
    def refuse(**_):
        raise AssertionError("a mask was built")

    monkeypatch.setattr(masking, "create_causal_mask", refuse)
    for model in (make(), make(window=12), make(operation=SIGMOID)):
        logits_of(model)
    sdpa = make()
    sdpa.set_attn_implementation("sdpa")
    logits_of(sdpa)
    for model, arguments in (
        (make(), {"attention_mask": torch.ones_like(TOKENS)}),
        (make(window=11), {}),
        (make(prefix=2), {}),
    ):
        with pytest.raises(AssertionError, match="a mask was built"):
            logits_of(model, **arguments)


@pytest.mark.parametrize("fields", [{"window": 5}, {"prefix": 4}], ids=["window", "prefix"])
@pytest.mark.parametrize("implementation", ["sinklab_softmax", "eager", "sdpa"])
def test_masks_in_a_cache(fields, implementation):
    model = make(**fields)
    model.set_attn_implementation(implementation)
    logits = logits_of(model)
    torch.testing.assert_close(decoded(model, TOKENS, [6, 1, 4, 1]), logits, **EXACT)
    static = StaticCache(config=model.config, max_cache_len=20)
    torch.testing.assert_close(decoded(model, TOKENS, [6, 1, 4, 1], cache=static), logits, **EXACT)


@pytest.mark.parametrize("pieces", [[3, 9], [12]])
def test_a_cache_that_would_cut_the_prefix_is_refused(pieces):
    model = make(prefix=4)
    mask = torch.ones_like(TOKENS)
    mask[:, :9] = 0
    arguments = {} if len(pieces) > 1 else {"attention_mask": mask}
    with pytest.raises(ConfigurationError, match=r"prefix 4: 0 tokens are cached and \d+ are given, which cuts the prefix"):
        decoded(model, TOKENS, pieces, **arguments)


def test_an_attention_mask_of_another_length_is_refused():
    with pytest.raises(ConfigurationError, match="mask has 3 columns; 0 tokens are cached and 12 are given, so it needs 12"):
        logits_of(make(), attention_mask=torch.ones(2, 3))


# --- tokens in front ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def with_front(model: SinkLM, plain: SinkLM, tokens: Tensor, **arguments) -> Tensor:
    """What ``plain`` makes of the learned tokens followed by the given ones."""
    front = model.front_tokens.weight.expand(len(tokens), -1, -1)
    return plain(inputs_embeds=torch.cat((front, plain.embed_tokens(tokens)), dim=1), **arguments).logits[:, 2:]


@pytest.mark.parametrize("position", ["rotary", "learned", "alibi"])
def test_tokens_in_front_are_a_prompt(fronted, position):
    model, plain = fronted(position={"name": position})
    expected = with_front(model, plain, TOKENS)
    torch.testing.assert_close(logits_of(model), expected, **EXACT)
    torch.testing.assert_close(decoded(model, TOKENS, [5, 1, 6]), expected, **EXACT)
    torch.testing.assert_close(logits_of(model, position_ids=torch.arange(12)[None]), expected, **EXACT)
    torch.testing.assert_close(logits_of(model, logits_to_keep=3), expected[:, -3:], **EXACT)
    padding = torch.zeros(2, 3, dtype=torch.int64)
    mask = torch.cat((padding, torch.ones_like(TOKENS)), dim=1)
    padded = logits_of(model, torch.cat((padding, TOKENS), dim=1), attention_mask=mask)
    torch.testing.assert_close(padded[:, 3:], expected, **EXACT)


def test_who_sees_the_tokens_in_front(fronted):
    front, given = ["x.", "xx"], torch.ones(6, 6, dtype=torch.bool).tril()
    given[2:, 2:] = torch.eye(4, dtype=torch.bool)
    expected = {
        "plain": ({}, {}, ["x...", "xx..", "xxx.", "xxxx"]),
        "window": ({"window": 2}, {}, ["x...", "xx..", ".xx.", "..xx"]),
        "prefix": ({"prefix": 3}, {}, ["xxx.", "xxx.", "xxx.", "xxxx"]),
        "padded": ({}, {"attention_mask": torch.tensor([[0, 1, 1, 1]])}, [None, ".x..", ".xx.", ".xxx"]),
        "given": ({}, {"attention_mask": given[None, None]}, ["x...", ".x..", "..x.", "...x"]),
    }
    for case, (fields, arguments, rows) in expected.items():
        found = visible(fronted(**fields)[0], TOKENS[:1, :4], **arguments)
        assert found[:2] == [row + "...." for row in front], case
        for row, seen in zip(found[2:], rows, strict=True):
            assert seen is None or row == "xx" + seen, case


def test_tokens_in_front_learn_and_generate(fronted, tmp_path):
    model, _ = fronted()
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert model.front_tokens.weight.grad.any(dim=1).all()
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 1}
    expected = model.generate(TOKENS, use_cache=False, **settings)
    assert torch.equal(model.generate(TOKENS, **settings), expected)
    assert torch.equal(model.generate(TOKENS, cache_implementation="static", **settings), expected)
    model.save_pretrained(tmp_path)
    again = SinkLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert torch.equal(logits_of(again), logits_of(model))
