"""Claims that nobody has written before: what they measure, by hand and on models that are planted with what they say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sinklab.claims.threshold_and_length import LENGTHS, OTHERS, THRESHOLDS, USUAL, SameOrder, rates
from sinklab.claims.weak_content import contents
from sinklab.models.language_model import SinkLM, SinkLMConfig

SHAPE = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
IDS = torch.arange(2, 40)


def model_like(**fields) -> SinkLM:
    torch.manual_seed(0)
    return SinkLM(SinkLMConfig(**SHAPE, max_position_embeddings=64, **fields)).eval()


def read_like(model: SinkLM, rows: torch.Tensor, ids: torch.Tensor = IDS) -> SimpleNamespace:
    """What read-outs ask of a trained model."""
    return SimpleNamespace(
        loaded=SimpleNamespace(model=model),
        rows=lambda samples=100, seq_len=None: rows[:samples, :seq_len],
        front=0,
        draw=0,
        text_ids=ids,
    )


def drawn_rows(samples: int = 32) -> torch.Tensor:
    return IDS[torch.randint(len(IDS), (samples, 64), generator=torch.Generator().manual_seed(1))]


def by_position(strength: float, token: int | None = None) -> SinkLM:
    """Learned positions alone, or one token alone, make the score of a key; no other query or key has any.

    The embedding has one coordinate for position 0 (or the token) and one that every token has.
    """
    model = model_like(position={"name": "learned"})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
        model.embed_tokens.weight[:, 1] = 1.0
        if token is None:
            next(p for name, p in model.named_parameters() if "position" in name)[0, 0] = 1.0
        else:
            model.embed_tokens.weight[token, 0] = 1.0
        attention = model.layers[0].self_attn
        attention.q_proj.weight[[0, 8], 1] = 1.0
        attention.k_proj.weight[[0, 8], 0] = strength
    return model


# --- threshold and length -----------------------------------------------------------------------------------------------------


def test_order_of_models_by_hand():
    over = ("a", "b", "c")
    effect = SameOrder("usual", ("other", "third"), over)

    def of(*columns):
        return {label: dict(zip(("usual", "other", "third"), values, strict=True)) for label, *values in columns}

    assert effect(of(("a", 0, 1, 5), ("b", 10, 2, 7), ("c", 30, 3, 9))) == 1.0
    # b and c change places in the third, one of three pairs; a and b in no order by it would be another.
    assert effect(of(("a", 0, 1, 5), ("b", 10, 2, 9), ("c", 30, 3, 7))) == pytest.approx(2 / 3)
    assert effect(of(("a", 0, 1, 5), ("b", 10, 2, 5), ("c", 30, 3, 9))) == pytest.approx(2 / 3)
    # Four points are no order, so nothing is left of a and b.
    assert effect(of(("a", 6, 9, 9), ("b", 10, 1, 1), ("c", 30, 10, 10))) == 1.0
    assert effect(of(("a", 6, 9, 9), ("b", 7, 1, 1), ("c", 8, 0, 0))) is None
    assert (effect.unit, len(effect.needs())) == ("fraction", 9)


def test_rates_are_those_of_a_head_that_attends_evenly():
    """Query t has 1/t on the first key: 0.127, 0.093 and 0.074 over 32, 48 and 64 queries, below every threshold."""
    even = rates(read_like(by_position(0.0), drawn_rows()))
    assert set(even) == {USUAL, *OTHERS, "change_with_length"}
    assert set(even.values()) == {0.0}
    assert len(OTHERS) == len(THRESHOLDS) * len(LENGTHS) - 1


def test_rates_of_a_sink_of_known_weight():
    """A score of s on the first key gives query t a weight of e^s / (e^s + t - 1) there; its mean decides each setting."""
    model = by_position(0.4)
    numbers = rates(read_like(model, drawn_rows()))
    with torch.no_grad():
        model.set_attn_implementation("eager")
        first = model(drawn_rows(), output_attentions=True, use_cache=False).attentions[0][0, 0, :, 0]
    for threshold in THRESHOLDS:
        for length in LENGTHS:
            expected = 100.0 * bool(first[:length].mean() > threshold / 100)
            assert numbers[f"sink_rate_{threshold}_of_{length}"] == expected
    assert 0 < sum(numbers[name] for name in (USUAL, *OTHERS)) < 900  # some settings see it and some do not
    at_usual = [numbers[f"sink_rate_30_of_{length}"] for length in LENGTHS]
    assert numbers["change_with_length"] == max(at_usual) - min(at_usual)


# --- weak content -------------------------------------------------------------------------------------------------------------


def test_a_sink_of_the_place_keeps_its_weight_whatever_stands_there():
    numbers = contents(read_like(by_position(8.0), drawn_rows()))
    kept = [value for name, value in numbers.items() if name.startswith("content_") and name != "content_later"]
    # One score decides all, so weights agree to the rounding of float32.
    assert kept == pytest.approx([numbers["content_natural"]] * 5, rel=1e-5)
    assert numbers["content_natural"] > 0.5
    assert numbers["content_later"] < 0.1


def test_a_sink_of_the_content_goes_with_its_token():
    """Rows begin with token 7, which is no token of the text and is held nowhere else; the head looks for it."""
    rows = drawn_rows()
    rows[rows == 7] = 8
    rows[:, 0] = 7
    numbers = contents(read_like(by_position(8.0, token=7), rows, IDS[IDS != 7]))
    assert numbers["content_natural"] > 0.5
    assert all(numbers[f"content_{kind}"] < 0.25 for kind in ("random", "frequent", "rare", "telling"))


def test_the_telling_token_is_the_one_with_a_law_of_its_own():
    """Behind token 9 there is always token 10; the head looks for token 9, wherever it stands."""
    rows = drawn_rows()
    rows[:, 30], rows[:, 31] = 9, 10
    rows[:, 40], rows[:, 41] = 9, 10
    rows[:, 1:][rows[:, :-1] == 9] = 10
    numbers = contents(read_like(by_position(8.0, token=9), rows))
    assert numbers["content_telling"] > 2 * numbers["content_random"]
    assert numbers["content_later"] > 2 * numbers["content_random"]
