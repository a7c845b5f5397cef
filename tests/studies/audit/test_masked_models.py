"""Masked encoders: both tokens of the tokenizer round every sample, a masked-LM loss stated as such, sinks at their tokens."""

from __future__ import annotations

import pytest
import torch
import transformers
from tests.test_real_models import real

from sinklab import audit, measure
from sinklab.corpora import resolve_corpus
from sinklab.models.drawing import draw_samples
from sinklab.models.loading import LoadedModel, load_model, wrap_model
from sinklab.models.losses import IGNORED
from sinklab.sinks import find_sinks
from sinklab.studies.audit.compare import Comparison

LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
CLS, SEP, MASK = 2, 3, 4
WIDTH = 64


def bert(sink: int | None = None, *, mask: bool = True, factor: float = 3.0) -> LoadedModel:
    """A model of one layer and two heads; with a token, its first head gives nearly all its attention to that token."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config)
    with torch.no_grad():
        table = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0][: len(WORDS)]
        model.bert.embeddings.word_embeddings.weight.copy_(table)
        model.bert.embeddings.position_embeddings.weight.zero_()
        model.bert.embeddings.token_type_embeddings.weight.zero_()
        if sink is not None:
            attention = model.bert.encoder.layer[0].attention.self
            attention.query.weight[: WIDTH // 2] = 0.0
            attention.key.weight[: WIDTH // 2] = 0.0
            attention.query.bias[0], attention.key.weight[0] = factor, factor * table[sink]
    words = {word: number for number, word in enumerate(WORDS) if mask or word != "[MASK]"}
    tokenizer = transformers.BertTokenizerFast(vocab=words, **({} if mask else {"mask_token": None}))
    return wrap_model(model, tokenizer, name="bert")


TEXT = "the quick brown fox jumps over the lazy dog while seven wizards box quietly near an old fjord bank\n\n"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("".join(TEXT[4 * shift :] for shift in range(12)))
    return path


@pytest.fixture(scope="module")
def result(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("audit") / "bert"
    return audit(bert(CLS), corpus=str(text), seq_len=24, samples=8, out=out)


def test_the_loss_is_that_of_hidden_tokens_alone(result, text):
    """Of the same samples, counted by hand from the model's own logits; attention is measured on the text as it is."""
    loaded = bert(CLS)
    drawn = draw_samples(loaded, resolve_corpus(str(text)), seq_len=24, samples=8, seed=0, bos=True)
    hidden, targets = drawn.scored.tokens, drawn.scored.targets
    at = targets != IGNORED
    assert at.sum(1).tolist() == [round(0.15 * 22)] * 8
    assert bool((hidden[at] == MASK).all())
    assert torch.equal(torch.where(at, targets, hidden), drawn.tokens)
    assert not (drawn.tokens == MASK).any()
    with torch.no_grad():
        own = torch.nn.functional.cross_entropy(loaded.model(input_ids=hidden).logits[at].double(), targets[at])
    summary = result.summary
    assert summary["loss"] == pytest.approx(own.item(), rel=1e-5)
    assert (summary["loss_kind"], summary["bits_per_byte"]) == ("masked token", None)
    assert (
        "masked-LM loss, cross-entropy of 15 % of the tokens of each sample, all hidden by [MASK], seed 0"
        in (summary["loss_definition"])
    )


def test_samples_are_framed_and_the_sink_has_its_name(result, capsys):
    summary = result.summary
    assert (summary["bos"], summary["bos_name"]) == (1, "[CLS] and [SEP]")
    assert summary["sink_role"] == "position 0, token “[CLS]”"
    assert summary["sinks"]["sinks"][0]["rate"] == 50.0  # one head of two, in every sample
    assert [(c["corpus"], c["bos"]) for c in summary["conditions"][:2]] == [("words.txt", 1), ("words.txt", 0)]
    assert summary["conditions"][1]["sink"] == "none"
    result.show()
    shown = capsys.readouterr().out
    assert "words.txt with [CLS] and [SEP]" in shown
    assert "nats per hidden token" in shown
    page = (result.folder / "report.html").read_text(encoding="utf-8")
    for place in (shown, page):
        assert "without [CLS] and [SEP]" in place
        assert "without BOS" not in place


def test_separators_at_the_end_are_seen_although_no_causal_model_would_see_them(text):
    summary = audit(bert(SEP), corpus=str(text), seq_len=24, samples=8, cache=False).summary
    assert summary["sink_role"] == "position 23, token “[SEP]”"
    assert summary["conditions"][0]["top_position"] == 23
    assert summary["candidate_positions"] == 24


def test_a_separator_that_varies_in_place_is_named_by_itself():
    """Texts of different lengths: one separator each, and two each, of which the head looks at both."""
    loaded = bert(SEP)
    letters = torch.arange(5, 31)
    rows = [[CLS, *letters[:number].tolist(), SEP] for number in range(6, 22)]
    tokens = torch.zeros(16, 23, dtype=torch.int64)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    found = find_sinks(loaded.model, {"input_ids": tokens, "attention_mask": (tokens > 0).long()}, decode=WORDS.__getitem__)
    assert [sink.name for sink in found.sinks] == ["the first “[SEP]”"]
    assert (found.main.sinking, len(found.heads), found.followed) == (1, 2, ())
    tokens[torch.arange(16), torch.arange(16) % 5 + 2] = SEP
    found = find_sinks(loaded.model, {"input_ids": tokens, "attention_mask": (tokens > 0).long()}, decode=WORDS.__getitem__)
    assert found.sinks == ()
    assert [sink.name for sink in found.followed] == ["“[SEP]” wherever it stands"]
    assert found.followed[0].heads[0][1] == 100.0


def test_a_tokenizer_without_a_mask_token_gives_no_loss_and_says_so(text):
    summary = audit(bert(mask=False), corpus=str(text), seq_len=24, samples=4, cache=False).summary
    assert (summary["loss"], summary["loss_kind"]) == (None, "masked token")
    assert summary["warnings"] == [
        "BertForMaskedLM predicts hidden tokens, and its tokenizer has no mask token to hide them with: no loss."
    ]


def test_a_masked_loss_is_never_ranked_with_another(result, checkpoint, text, tmp_path):
    decoder = audit(str(checkpoint), corpus=str(text), seq_len=24, samples=8, cache=False, out=tmp_path / "decoder")
    table = Comparison([result.folder, decoder.folder]).table
    assert table.loc["loss (nats per hidden token)"].notna().tolist() == [True, False]
    assert table.loc["loss (nats per token)"].notna().tolist() == [False, True]


def test_the_cls_of_a_chemistry_albert_receives_what_the_models_own_weights_say():
    """Published for whole reactions: 0.13 to 0.14 on average, 0.02 in the first layer, uniform 0.02 to 0.03."""
    path = real("rxnmapper-albert")
    corpus = resolve_corpus(str(path / "reactions.txt"))
    found = measure(str(path), probes=["attention_received"], corpus=corpus, seq_len=48, samples=8)
    by_layer = found.table.query("key_position == 0").groupby("layer")["value"].mean()
    loaded = load_model(str(path), attn_implementation="eager")
    drawn = draw_samples(loaded, corpus, seq_len=48, samples=8, seed=0, bos=True)
    assert loaded.encoder.bos_name == "[CLS] and [SEP]"
    with torch.no_grad():
        weights = loaded.model(input_ids=drawn.tokens, output_attentions=True).attentions
    # Sums of 8 * 8 * 48 float32 weights below 1, in two orders: some 1e-6.
    assert by_layer.tolist() == pytest.approx([layer[..., 0].mean().item() for layer in weights], abs=1e-5)
    assert 0.10 < by_layer.mean() < 0.14
    assert by_layer.loc[0] < 0.03
    assert by_layer.loc[6:].min() > 0.1
