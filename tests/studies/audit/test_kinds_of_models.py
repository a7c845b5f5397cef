"""Audits of masked models and encoder–decoders: hidden tokens and pairs of texts, whose losses and sinks stay apart."""

from __future__ import annotations

import json
import random

import pytest
import torch
import transformers
from tests.conftest import make_sinklm
from tests.test_real_models import real
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from sinklab import audit, measure
from sinklab.cli.catalogue import compare
from sinklab.corpora import resolve_corpus
from sinklab.errors import ConfigurationError, InputError
from sinklab.models.drawing import draw_samples
from sinklab.models.loading import LoadedModel, load_model, wrap_model
from sinklab.models.losses import IGNORED
from sinklab.sinks import find_sinks
from sinklab.studies.audit.compare import Comparison
from sinklab.studies.audit.page import head_data, read_audit

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


VOCABULARY = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", "<s>", *LETTERS])}
PAD, END, START = 0, 1, 3
LENGTH = 12


def tokenizer(template: str) -> transformers.PreTrainedTokenizerFast:
    level = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    level.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    level.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", START), ("</s>", END)])
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"} | (
        {"bos_token": "<s>"} if "<s>" in template else {}
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=level, **names)


def bart(sink: int | None = END, factor: float = 3.0) -> LoadedModel:
    """One layer a side, two heads; the first head of cross-attention gives nearly all it has to one token of the source."""
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=len(VOCABULARY), d_model=WIDTH, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32, pad_token_id=PAD,
        bos_token_id=START, eos_token_id=END, decoder_start_token_id=END,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config)
    with torch.no_grad():
        table = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0][: len(VOCABULARY)]
        model.model.shared.weight.copy_(table)
        for side in (model.model.encoder, model.model.decoder):
            side.embed_positions.weight.zero_()
        encoder, cross = model.model.encoder.layers[0], model.model.decoder.layers[0].encoder_attn
        for zeroed in (encoder.self_attn.out_proj.weight, encoder.fc2.weight):
            zeroed.zero_()  # what the encoder gives on is the token
        if sink is not None:
            cross.q_proj.weight[: WIDTH // 2] = 0.0
            cross.k_proj.weight[: WIDTH // 2] = 0.0
            cross.q_proj.bias[0], cross.k_proj.weight[0] = factor, factor * table[sink]
    return wrap_model(model, tokenizer("<s> $A </s>"), name="bart")


def t5(**changes) -> LoadedModel:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=len(VOCABULARY), d_model=32, d_kv=16, d_ff=16, num_layers=1, num_heads=2, pad_token_id=PAD, eos_token_id=END,
        **{"decoder_start_token_id": PAD} | changes,
    )  # fmt: skip
    return wrap_model(transformers.T5ForConditionalGeneration(config), tokenizer("$A </s>"), name="t5")


PAIRS = [(LETTERS[number : number + 3 + number % 7], LETTERS[: 3 + (5 * number) % 11][::-1]) for number in range(16)]


@pytest.fixture(scope="module")
def tsv(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs") / "letters.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    return path


@pytest.fixture(scope="module")
def paired(tsv, tmp_path_factory):
    out = tmp_path_factory.mktemp("audit") / "bart"
    return audit(bart(), corpus=str(tsv), seq_len=LENGTH, samples=16, out=out)


def test_what_the_model_is_given(tsv):
    """Each text with its tokens, cut and padded; the decoder reads its target one step later, from the model's own token on."""
    drawn = draw_samples(bart(), resolve_corpus(str(tsv)), seq_len=LENGTH, samples=16, seed=0, bos=True)
    ids, mask = drawn.arguments["input_ids"], drawn.arguments["attention_mask"].bool()
    spell = {number: word for word, number in VOCABULARY.items()}
    shown = {("".join(spell[token] for token in row[real].tolist())) for row, real in zip(ids, mask, strict=True)}
    assert shown == {f"<s>{source}</s>" for source, _ in PAIRS}
    assert bool((ids[~mask] == PAD).all())
    inputs, labels = drawn.arguments["decoder_input_ids"], drawn.targets
    real = labels != IGNORED
    assert torch.equal(drawn.arguments["decoder_attention_mask"].bool(), real)
    assert bool((inputs[:, 0] == END).all())
    assert torch.equal(inputs[:, 1:][real[:, 1:]], labels[:, :-1][real[:, 1:]])
    assert (drawn.kind, max(len(row[row != IGNORED]) for row in labels)) == ("pairs", LENGTH)


def test_the_loss_is_the_models_own(paired, tsv):
    loaded = bart()
    drawn = draw_samples(loaded, resolve_corpus(str(tsv)), seq_len=LENGTH, samples=16, seed=0, bos=True)
    with torch.no_grad():
        own = loaded.model(**{k: v for k, v in drawn.arguments.items() if k != "decoder_input_ids"}, labels=drawn.targets).loss
    assert "policies have no loss to compare" in paired.summary["cache"]["refused"]
    assert paired.summary["loss"] == pytest.approx(own.item(), rel=1e-5)
    assert (paired.summary["loss_kind"], paired.summary["bits_per_byte"]) == ("target token", None)


def test_three_kinds_of_attention_are_reported_apart(paired, capsys):
    """Planted: half of the heads of cross-attention at the end of a source, wherever that is; nothing in the encoder."""
    encoder, _, cross = parts = paired.summary["parts"]
    assert [(part["part"], part["num_heads"]) for part in parts] == [("encoder", 2), ("decoder", 2), ("cross-attention", 2)]
    assert cross["sink_role"] == "the first “</s>”"
    assert (cross["sinks"]["sinks"][0]["rate"], cross["sink_heads"]) == (50.0, 1)
    assert encoder["sinks"]["sinks"] == []
    for part in parts:
        whole = paired.table.query(
            "metric == 'gu2024' and layer.isna() and key_position == 0 and corpus == 'letters.tsv' and bos == 1"
        )
        assert part["sink_rate_gu2024"] == whole.set_index("part")["value"][part["part"]]
    paired.show()
    shown = " ".join(capsys.readouterr().out.split())
    assert "heads: 2 in the encoder, 2 in the decoder, 2 in the cross-attention" in shown
    assert "cross-attention the first “</s>”: 1 of 2 heads, sink rate 50.0 %" in shown
    assert "nats per target token" in shown


def test_numbers_about_a_sink_are_about_that_of_the_part(paired):
    rows = paired.table.query("metric == 'sink_column_weight' and layer.notna() and corpus == 'letters.tsv'")
    assert rows.groupby("part")["sink"].nunique().to_dict() == {"encoder": 1, "decoder": 1, "cross-attention": 1}
    cross = rows[rows["part"] == "cross-attention"].set_index("head")
    assert set(cross["sink"]) == {"the first “</s>”"}
    assert cross["value"][0] > 0.9
    assert cross["value"][1] < 0.5


def test_a_text_alone_is_continued_and_that_is_said(tmp_path):
    path = tmp_path / "letters.txt"
    path.write_text("".join(f"{LETTERS[shift:]}{LETTERS[:shift]}{LETTERS[shift:]}\n\n" for shift in range(26)))
    summary = audit(t5(), corpus=str(path), seq_len=10, samples=6, cache=False).summary
    says = "Source and target are halves of one text: 9 tokens are the source, the 10 after them the target."
    assert summary["samples_definition"] == says
    assert (summary["bos"], summary["bos_name"]) == (0, "")
    drawn = draw_samples(t5(), resolve_corpus(str(path)), seq_len=10, samples=6, seed=0, bos=False)
    assert drawn.tokens[:, -1].tolist() == [END] * 6
    assert drawn.targets.shape == (6, 10)
    whole = torch.cat((drawn.tokens[:, :-1], drawn.targets), dim=1)
    assert bool(((whole[:, 1:] - whole[:, :-1]) % 26 == 1).all())  # the alphabet goes on where the source ends
    assert torch.equal(drawn.arguments["decoder_input_ids"][:, 1:], drawn.targets[:, :-1])


def test_files_of_every_form_hold_the_same_pairs(tsv, tmp_path):
    jsonl, named, csv = tmp_path / "a.jsonl", tmp_path / "b.tsv", tmp_path / "c.csv"
    jsonl.write_text("".join(json.dumps({"source": source, "target": target}) + "\n" for source, target in PAIRS))
    named.write_text("nr\tsource\ttarget\n" + "".join(f"{n}\t{source}\t{target}\n" for n, (source, target) in enumerate(PAIRS)))
    csv.write_text("source,target\n" + "".join(f'"{source}",{target}\n' for source, target in PAIRS))
    for path in (tsv, jsonl, named, csv):
        corpus = resolve_corpus(str(path))
        assert (corpus.name, corpus.label) == ("pairs", path.name)
        assert sorted(corpus.pairs(0)) == sorted(PAIRS)
        assert list(corpus.pairs(3)) == random.Random(3).sample(PAIRS, len(PAIRS))
    nested = tmp_path / "d.jsonl"
    nested.write_text("".join(json.dumps({"translation": {"en": source, "de": target}}) + "\n" for source, target in PAIRS))
    settings = {"path": str(nested), "source": "translation.en", "target": "translation.de"}
    assert sorted(resolve_corpus({"name": "pairs", **settings}).pairs(0)) == sorted(PAIRS)


def test_what_cannot_be_read_is_refused_in_one_line(tsv, checkpoint):
    with pytest.raises(InputError, match=r"reads text, and corpus 'letters\.tsv' holds pairs of texts; give a text file"):
        measure(str(checkpoint), probes=["entropy"], corpus=str(tsv), seq_len=8, samples=2)
    with pytest.raises(InputError, match=r"'letters\.tsv' holds 16 of 17 pairs; lower `samples`"):
        measure(t5(), probes=["entropy"], corpus=str(tsv), seq_len=8, samples=17)
    with pytest.raises(ConfigurationError, match=r"has no decoder_start_token_id; set decoder_start_token_id in config\.json"):
        measure(t5(decoder_start_token_id=None), probes=["entropy"], corpus=str(tsv), seq_len=8, samples=2)


def test_the_page_shows_the_parts_apart(paired):
    page = (paired.folder / "report.html").read_text(encoding="utf-8")
    assert [part for part in ("encoder", "decoder", "cross-attention") if f"{part} · natural text" in page][2:]
    whole = read_audit(paired.folder)
    assert [row.label for row in whole.numbers.grid] == ["enc 0", "dec 0", "cross 0"]
    views = {view.part: view for view in whole.views}
    rates = {part: view.numbers.by_head_and_position("sink_rate", "gu2024", LENGTH) for part, view in views.items()}
    assert {part: values.shape for part, values in rates.items()} == dict.fromkeys(views, (1, 2, LENGTH))
    assert whole.maps.targets[0][0] == "</s>"
    data, _ = head_data(whole)
    assert len(data["positionRate"]) == 3
    (sink,) = [sink for sink in data["sinks"] if sink["name"] == "the first “</s>” of cross-attention"]
    assert sink["rates"] == [[0.0, 0.0], [0.0, 0.0], [100.0, 0.0]]


def test_sinks_of_a_part_are_found_from_python():
    loaded = bart()
    source = torch.tensor([[START, *(3 + (7 * row + place) % 20 + 1 for place in range(12)), END] for row in range(12)])
    inputs = {"input_ids": source, "decoder_input_ids": source[:, :11]}
    encoder, decoder, cross = (
        find_sinks(loaded.model, inputs, part=part) for part in ("encoder", "decoder", "cross-attention")
    )
    assert [len(found.heads) for found in (encoder, decoder, cross)] == [2, 2, 2]
    assert encoder.main is None
    assert (cross.main.position, cross.main.token, cross.main.sinking) == (13, END, 1)
    assert cross.weights.max() > 0.9  # what its heads give to it, and not those of self-attention
    with pytest.raises(
        ConfigurationError, match="`part` 'encoder': SinkLM showed no attention of such a part; parts are those"
    ):
        find_sinks(make_sinklm(vocab_size=30), source, part="encoder")


def test_parts_are_compared_as_models_are(paired, tsv, tmp_path):
    other = audit(bart(sink=None), corpus=str(tsv), seq_len=LENGTH, samples=16, cache=False, out=tmp_path / "plain")
    table = Comparison([paired.folder, other.folder]).table
    assert len(table.columns) == 6
    heads = table.loc["strongest sink: heads"]
    assert [heads[name] for name in heads.index if "cross" in name] == ["1 of 2", "0 of 2"]
    said = Comparison([paired.folder, other.folder]).findings
    assert [line.partition(": ")[0] for line in said] == list(table.columns)
    assert list(compare([paired.folder, other.folder]).display({}))  # what the terminal shows
    page = Comparison([paired.folder, other.folder]).write(tmp_path / "both.html").read_text(encoding="utf-8")
    assert page.count('class="one"') == 6
