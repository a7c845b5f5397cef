"""Denoising: planted sinks that move or stay, plain attention beside it, what a hidden key costs, refusals, what is printed."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest
import torch
import transformers
from tests.command_line import CliRunner
from tests.conftest import make_sinklm, make_tokenizer
from tests.studies.audit.test_masked_models import CLS, MASK, SEP, WORDS, bert
from tests.test_real_models import real
from torch.nn.functional import cross_entropy

from sinklab.cli.app import app
from sinklab.corpora import resolve_corpus
from sinklab.models.loading import load_model, wrap_model
from sinklab.results.table import read_table
from sinklab.studies.denoise.denoise import denoise
from sinklab.studies.denoise.filling import Filling
from sinklab.studies.denoise.measurement import follow
from sinklab.studies.denoise.places import changes
from sinklab.studies.denoise.tally import StateTally, TextTallies
from sinklab.studies.denoise.words import notes_on, sentences

TEXT = "the quick brown fox jumps over the lazy dog while seven wizards box quietly near an old fjord bank\n\n"
LENGTH = 12


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("".join(TEXT[4 * shift :] for shift in range(12)))
    return path


def texts(number: int = 6, length: int = LENGTH, seed: int = 0) -> torch.Tensor:
    """Random letters between ``[CLS]`` and ``[SEP]``."""
    rows = torch.randint(MASK + 1, len(WORDS), (number, length), generator=torch.Generator().manual_seed(seed))
    rows[:, 0], rows[:, -1] = CLS, SEP
    return rows


def letters(rows: torch.Tensor) -> torch.Tensor:
    return (rows != CLS) & (rows != SEP)


def planted(*, on_masked: bool) -> transformers.BertForMaskedLM:
    """One head that gives nearly all to the leftmost token, or to the leftmost masked one as long as there is one."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16,
        max_position_embeddings=LENGTH,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config).eval()
    embeddings, attention = model.bert.embeddings, model.bert.encoder.layer[0].attention.self
    with torch.no_grad():
        for table in (embeddings.word_embeddings, embeddings.position_embeddings, embeddings.token_type_embeddings):
            table.weight.zero_()
        embeddings.word_embeddings.weight[:, 2] = 10.0
        if on_masked:
            embeddings.word_embeddings.weight[MASK] = 0.0
            embeddings.word_embeddings.weight[MASK, 0] = 10.0
        embeddings.position_embeddings.weight[:, 1] = -torch.arange(LENGTH) / 10
        for module in (attention.query, attention.key):
            module.weight.zero_()
            module.bias.zero_()
        attention.query.bias[0] = attention.key.weight[0, 0] = attention.key.weight[0, 1] = 30.0
    return model


# --- filling in ---


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_every_step_fills_in_its_share_and_the_last_state_is_the_text(steps):
    rows = texts()
    free = letters(rows)
    free[0, :6] = False  # a prompt
    filling = Filling(rows, free, MASK, steps=steps, order="random", fill="text", draws=torch.rand(rows.shape))
    total = free.sum(1)
    for step in range(1, steps + 1):
        before = filling.masked.clone()
        filled = filling.take_step(torch.randn(*rows.shape, len(WORDS)))
        assert torch.equal(filled, before & ~filling.masked)
        assert (total - filling.masked.sum(1)).tolist() == [round(int(count) * step / steps) for count in total]
        assert torch.equal(filling.ids == MASK, filling.masked)
        assert torch.equal(filling.ids[~filling.masked], rows[~filling.masked])
    assert torch.equal(filling.ids, rows)


def test_the_surest_token_comes_first_and_is_the_likeliest_but_never_the_mask():
    rows = texts(1, 6)
    logits = torch.zeros(1, 6, len(WORDS))
    logits[0, :, MASK] = 50.0  # as sure as can be, of no token
    for position, sureness in ((1, 2.0), (2, 9.0), (3, 4.0), (4, 7.0)):
        logits[0, position, 10 + position] = sureness
    filling = Filling(rows, letters(rows), MASK, steps=4, order="confidence", fill="model", draws=torch.rand(rows.shape))
    order = [int(filling.take_step(logits).nonzero()[0, 1]) for _ in range(4)]
    assert order == [2, 4, 3, 1]
    assert filling.ids[0].tolist() == [CLS, 11, 12, 13, 14, SEP]


def test_from_left_to_right_and_by_draws():
    rows, draws = texts(1, 6), torch.tensor([[0.0, 0.9, 0.1, 0.5, 0.3, 0.0]])
    for order, expected in (("left", [1, 2, 3, 4]), ("random", [2, 4, 3, 1])):
        filling = Filling(rows, letters(rows), MASK, steps=4, order=order, fill="text", draws=draws)
        assert [int(filling.take_step(torch.zeros(1, 6, len(WORDS))).nonzero()[0, 1]) for _ in range(4)] == expected


@pytest.mark.parametrize("order", ["random", "left"])
def test_logits_that_nothing_is_taken_from_are_not_read(order):
    """They are those of a whole vocabulary; these have no values that could be."""
    rows = torch.tensor([[1, 6, 7, 8, 9, 2]])
    filling = Filling(rows, letters(rows), MASK, steps=2, order=order, fill="text", draws=torch.rand(rows.shape))
    for _ in range(2):
        filling.take_step(torch.empty(*rows.shape, len(WORDS), device="meta"))
    assert torch.equal(filling.ids, rows)


@pytest.mark.parametrize("fill", ["text", "model"])
def test_every_order_takes_the_same_tokens_as_with_probabilities_of_all_positions(fill):
    """Sureness of masked positions alone, and a guess of filled ones alone, are those of a softmax over everything."""
    torch.manual_seed(0)
    rows = torch.randint(5, len(WORDS), (3, 8))
    free, draws = torch.rand(rows.shape) < 0.7, torch.rand(rows.shape)
    for order in ("confidence", "random", "left"):
        filling = Filling(rows, free, MASK, steps=2, order=order, fill=fill, draws=draws)
        for _ in range(2):
            logits, before, masked = torch.randn(*rows.shape, len(WORDS)), filling.ids, filling.masked
            scores = logits.clone()
            scores[..., MASK] = float("-inf")
            sure, best = scores.log_softmax(-1).max(-1)
            filled = filling.take_step(logits)
            assert torch.equal(filling.ids, torch.where(filled, rows if fill == "text" else best, before))
            if order == "confidence":
                left = masked & ~filled
                for row in range(len(rows)):
                    assert not left[row].any() or sure[row][filled[row]].min() > sure[row][left[row]].max()


# --- what becomes of a sink ---


def test_a_head_moves_only_if_it_keeps_no_sink():
    cases = {  # keys that are sinks before, after: (before, both, moves, vanishes)
        ((0,), (0,)): (1, 1, 0, 0),
        ((0,), (3,)): (1, 1, 1, 0),
        ((0, 3), (3, 4)): (1, 1, 0, 0),
        ((0,), ()): (1, 0, 0, 1),
        ((), (2,)): (0, 0, 0, 0),
        ((), ()): (0, 0, 0, 0),
    }
    before, after = torch.zeros(2, 1, len(cases), 5, dtype=torch.bool)
    for number, (left, right) in enumerate(cases):
        before[0, number, list(left)] = True
        after[0, number, list(right)] = True
    found = changes(before, after)
    got = torch.stack((found.before, found.both, found.moves, found.vanishes), -1)[0].int().tolist()
    assert [tuple(one) for one in got] == list(cases.values())


@pytest.mark.parametrize("on_masked", [True, False])
def test_a_planted_sink_moves_with_the_leftmost_gap_or_stays_at_the_first_token(on_masked):
    rows = texts()
    found = follow(planted(on_masked=on_masked), rows, letters(rows), MASK, steps=LENGTH - 2, order="left").summary
    states = found["by_step"]
    assert [state["sink_rate"] for state in states] == [100.0] * (LENGTH - 1)
    assert states[-1]["on_special"] == 100.0
    assert found["heads"] == 1
    assert found["vanishes"] == {"mean": 0.0, "low": 0.0, "high": 50.0}  # 3 / 6 texts
    if on_masked:
        assert [state["on_masked"] for state in states] == [100.0] * (LENGTH - 2) + [0.0]
        assert [state["moves"] for state in states] == [100.0] * (LENGTH - 2) + [None]
        assert found["moves"] == {"mean": 100.0, "low": 50.0, "high": 100.0}
        assert found["wanders"] == 100.0
        said = "it is on another position in 100.0 [50.0, 100.0] % of the cases; in 0.0 [0.0, 50.0] % of the steps from a sink"
    else:
        assert {state["on_special"] for state in states} == {100.0}
        assert found["moves"] == {"mean": 0.0, "low": 0.0, "high": 50.0}
        assert found["wanders"] == 0.0
        said = "it is on another position in 0.0 [0.0, 50.0] % of the cases"
    assert said in sentences(found, 0.3)


def test_a_sink_that_leaves_only_where_its_token_is_filled_in_is_counted_by_text():
    """With all gaps but one to the right of it filled in at once, the sink moves once: behind the last step, to the front."""
    rows = texts()
    free = torch.zeros_like(rows, dtype=torch.bool)
    free[:, 5:8] = True
    found = follow(planted(on_masked=True), rows, free, MASK, steps=3, order="random", seed=1).summary
    draws = torch.rand(rows.shape, generator=torch.Generator().manual_seed(1))[:, 5:8]
    moved = []
    for draw in draws:  # the leftmost gap moves when it is filled in, and from the last gap to the first token
        gaps = [0, 1, 2]
        for _ in range(3):
            first = gaps[0]
            gaps.remove(min(gaps, key=lambda gap: float(draw[gap])))
            moved.append(not gaps or gaps[0] != first)
    assert found["moves"]["mean"] == pytest.approx(100 * np.mean(moved))


# --- beside plain code ---


@pytest.fixture(scope="module")
def random_bert():
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=LENGTH, initializer_range=0.6,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config).double().eval()


THRESHOLD = 0.2


def test_rates_losses_and_costs_are_those_of_returned_weights_and_attention_masks(random_bert):
    """The same run by weights that the model returns, and keys hidden by its attention mask: no code of ours."""
    rows, steps = texts(5), 4
    free = letters(rows)
    found = follow(random_bert, rows, free, MASK, steps=steps, order="random", threshold=THRESHOLD, seed=7)
    generator = torch.Generator().manual_seed(7)
    draws, others = torch.rand(rows.shape, generator=generator), torch.rand(rows.shape, generator=generator)
    filling = Filling(rows, free, MASK, steps=steps, order="random", fill="text", draws=draws)
    random_bert.set_attn_implementation("eager")
    costs, controls, scored, states = torch.zeros(5), torch.zeros(5), torch.zeros(5), 0
    for number in range(steps + 1):
        with torch.no_grad():
            given = random_bert(input_ids=filling.ids, output_attentions=True)
        weights = torch.cat(given.attentions, 1)  # (texts, heads of both layers, queries, keys)
        shares = weights.mean(2)
        sinks = shares > THRESHOLD
        state = found.summary["by_step"][number]
        assert state["sink_rate"] == pytest.approx(100 * float(sinks.any(-1).double().mean()))
        where = sinks.sum(1)
        for name, chosen in (
            ("on_special", ~free), ("on_masked", filling.masked), ("on_text", free & ~filling.masked)
        ):  # fmt: skip
            assert state[name] == pytest.approx(100 * float((where * chosen).sum() / where.sum()))
        masked = filling.masked
        if not bool(masked.any()):
            assert state["loss"] is None
            continue
        loss = summed_loss(given.logits, rows, masked)
        assert state["loss"] == pytest.approx(float(loss.sum() / masked.sum()), abs=1e-6)
        for text in range(5):
            if not bool(sinks[text].any()):
                continue
            mass = shares[text].mean(0)
            sink = max(sinks[text].any(0).nonzero()[:, 0].tolist(), key=lambda key: float(mass[key]))
            instead, taken = [], 0.0
            for key in others[text].argsort().tolist():
                if key != sink and taken < float(mass[sink]):
                    instead, taken = [*instead, key], taken + float(mass[key])
            states += 1
            scored[text] += int(masked[text].sum())
            for total, hidden in ((costs, [sink]), (controls, instead)):
                mask = torch.ones(1, LENGTH, dtype=torch.int64)
                mask[0, hidden] = 0
                with torch.no_grad():
                    without = random_bert(input_ids=filling.ids[text : text + 1], attention_mask=mask).logits
                total[text] += float(summed_loss(without, rows[text : text + 1], masked[text : text + 1]) - loss[text])
        filling.take_step(given.logits)
    cost = found.summary["cost"]
    assert cost["states"] == states > 5
    assert cost["hidden"]["mean"] == pytest.approx(float(costs.sum() / scored.sum()), abs=1e-6)
    assert cost["control"]["mean"] == pytest.approx(float(controls.sum() / scored.sum()), abs=1e-6)
    assert cost["difference"]["mean"] == pytest.approx(cost["hidden"]["mean"] - cost["control"]["mean"])
    assert cost["control_mass"] >= cost["mass"] > THRESHOLD / 8


def summed_loss(logits: torch.Tensor, rows: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    losses = cross_entropy(logits.flatten(0, 1), rows.flatten(), reduction="none").view_as(rows)
    return (losses * masked).sum(1)


def test_batches_do_not_change_a_number(random_bert):
    rows = texts(5)
    whole, single = (
        follow(random_bert, rows, letters(rows), MASK, steps=3, order="random", threshold=THRESHOLD, batch_size=size)
        for size in (None, 2)
    )
    flat = [json.loads(json.dumps(one.summary), parse_float=lambda value: round(float(value), 6)) for one in (whole, single)]
    assert flat[0] == flat[1]
    for left, right in zip(whole.rows, single.rows, strict=True):
        np.testing.assert_allclose(left["value"], right["value"], rtol=1e-6)
    assert torch.equal(whole.shown[1][:2], single.shown[1][:2])


def test_nothing_is_priced_where_the_model_writes_the_text(random_bert):
    rows = texts(4)
    found = follow(random_bert, rows, letters(rows), MASK, steps=3, fill="model", threshold=THRESHOLD).summary
    assert found["cost"] is None
    assert {state["loss"] for state in found["by_step"]} == {None}
    assert "nats" not in sentences(found, THRESHOLD)


# --- intervals and words ---


def test_shares_have_intervals_over_texts_and_none_without_two_of_them():
    tallies = TextTallies(4)
    tallies.sums["both"] += torch.tensor([10.0, 10.0, 0.0, 20.0])
    assert tallies.share("moves", "both") == {"mean": 0.0, "low": 0.0, "high": 100.0}  # three texts: 3 / 3
    tallies.sums["moves"] += torch.tensor([5.0, 1.0, 0.0, 4.0])
    share = tallies.share("moves", "both")
    assert share["mean"] == 25.0
    assert 0.0 <= share["low"] < 25.0 < share["high"] <= 100.0
    # The same share in all of them is no more certain than none in all.
    tallies.sums["moves"] = tallies.sums["both"] * 0.3
    assert tallies.share("moves", "both") == pytest.approx({"mean": 30.0, "low": 0.0, "high": 100.0})
    many = TextTallies(20)
    many.sums["both"] += torch.arange(1.0, 21.0)
    many.sums["moves"] += many.sums["both"] * 0.3
    assert many.share("moves", "both") == pytest.approx({"mean": 30.0, "low": 15.0, "high": 45.0})
    assert tallies.share("vanishes", "before") is None
    tallies.sums["before"][1] = 3.0
    assert tallies.share("vanishes", "before") == {"mean": 0.0, "low": None, "high": None}
    assert tallies.cost() is None


def test_the_interval_of_a_share_over_texts_holds_the_truth():
    """Texts differ in how often their heads move and in how many there are: 95 % of the intervals hold the mean over all."""
    generator = np.random.default_rng(0)
    held, runs = 0, 200
    for _ in range(runs):
        heads = generator.integers(5, 40, 24)
        rates = generator.beta(2, 6, 24)
        tallies = TextTallies(24)
        tallies.sums["both"] += torch.tensor(heads)
        tallies.sums["moves"] += torch.tensor(generator.binomial(heads, rates))
        share = tallies.share("moves", "both")
        held += share["low"] <= 25.0 <= share["high"]
    assert 0.90 <= held / runs <= 0.99


def state(**values) -> dict:
    usual = {"masked": 50.0, "sink_rate": 0.0, "on_special": None, "on_masked": None, "on_text": None, "moves": None}
    usual["sinks"] = round(values.get("sink_rate", 0.0))  # one of each head that has any
    return {"step": 0, **usual, "vanishes": None, "loss": 1.0, **values}


@pytest.mark.parametrize(
    ("low", "high", "says"),
    [
        (-0.4, -0.1, "the sink is worth less."),
        (0.1, 0.4, "the sink is worth more."),
        (-0.1, 0.4, "which of them costs more is open."),
        (1e-7, 3e-7, "they differ by less than 0.001 nats."),  # of a model that reads nothing, rounding
    ],
)
def test_the_price_is_said_as_far_as_its_interval_goes(low, high, says):
    one = {"mean": 0.1, "low": 0.0, "high": 0.2}
    cost = {"states": 3, "hidden": one, "control": one, "difference": {"mean": 0.2, "low": low, "high": high}, "mass": 0.2}
    summary = {
        "heads": 4, "moves": one, "vanishes": one, "cost": {**cost, "control_mass": 0.2},
        "by_step": [state(masked=100.0), state(masked=60.0, sink_rate=8.0, on_special=25.0, on_masked=50.0, on_text=25.0),
                    state(masked=0.0, sink_rate=2.0, on_special=100.0, on_masked=0.0, on_text=0.0)],
    }  # fmt: skip
    text = sentences(summary, 0.3)
    assert text.endswith(says)
    assert "Of 4 heads, 0.0 % have a sink where 100 % of the tokens are masked, and 2.0 % in the whole text" in text
    assert "; most, 8.0 %, where 60 % are masked." in text
    assert "Of the sinks 40 % stand on special tokens or the prompt, 40 % on masked tokens, and 20 % on text" in text


def test_a_sink_of_more_than_half_of_the_mass_is_compared_with_nothing():
    rows = texts(8)
    summary = follow(planted(on_masked=False), rows, letters(rows), MASK, steps=2).summary
    cost = summary["cost"]
    assert cost["mass"] > 0.9
    assert cost["mass"] + cost["control_mass"] == pytest.approx(1.0, abs=1e-5)
    masses = f"{cost['control_mass']:.3f} of a row against {cost['mass']:.3f}"
    says = sentences(summary, 0.3)
    assert says.endswith(f"which all together have less mass, {masses}: there are none to compare the sink with.")


def test_without_a_sink_nothing_is_said_of_places():
    summary = {"heads": 4, "moves": None, "vanishes": None, "cost": None, "by_step": [state(), state()]}
    assert sentences(summary, 0.3) == "No head has a sink in any state: no key has more than 0.3 of a row on average."


def test_places_are_shares_of_the_sinks_and_not_of_the_heads_that_have_them():
    """One head of one text: a sink on a special token in one state, and in the next one three on text."""
    states = [StateTally() for _ in range(2)]
    special = torch.tensor([[True, False, False, False]])
    for each, on, masked in zip(states, ([0], [1, 2, 3]), (True, False), strict=True):
        hits = torch.zeros(1, 1, 4, dtype=torch.bool)
        hits[0, 0, on] = True
        rows = torch.zeros(1, 4, dtype=torch.int64)
        filling = Filling(rows, ~special & masked, MASK, steps=1, order="left", fill="text", draws=torch.rand(1, 4))
        each.add(filling, special, hits)
    recorded = [each.record(step) for step, each in enumerate(states)]
    assert [one["sinks"] for one in recorded] == [1, 3]
    summary = {"heads": 1, "moves": None, "vanishes": None, "cost": None, "by_step": recorded}
    said = "Of the sinks 25 % stand on special tokens or the prompt, 0 % on masked tokens, and 75 % on text that was filled in."
    assert said in sentences(summary, 0.3)


def test_a_loss_above_a_guess_where_little_is_masked_is_not_said_of_more(random_bert):
    """The surest gaps come first, so that the last ones may be the hardest."""
    losses = [state(masked=90.0, loss=3.0), state(masked=60.0, loss=3.5), state(masked=6.0, loss=4.5), state(loss=None)]
    (note,) = notes_on(random_bert, {"by_step": losses, "positions": 12}, 0.3)
    assert note.startswith(
        f"In 1 of 3 states with gaps, with 6 % of the tokens masked, the loss is above that of a guess among all tokens, "
        f"{np.log(57):.2f} nats, and in the others it is not:"
    )
    assert "so many gaps" not in note


def test_losses_above_a_guess_are_named(random_bert):
    losses = [state(masked=90.0, loss=9.0), state(masked=60.0, loss=8.0), state(masked=10.0, loss=1.0)]
    (note,) = notes_on(random_bert, {"by_step": losses, "positions": 12}, 0.3)
    assert note.startswith(
        f"With 60 % of the tokens masked and more the loss is above that of a guess among all tokens, {np.log(57):.2f}"
    )
    assert notes_on(random_bert, {"by_step": [state(loss=None)], "positions": 12}, 0.3) == []


def test_texts_in_which_an_even_head_sinks_and_those_beyond_the_training_are_named(random_bert):
    (note,) = notes_on(random_bert, {"by_step": [state()], "positions": 4}, 0.25)
    assert note.startswith(
        "A head that looks at all 4 keys alike gives each 0.25 of its rows, which is no less than the threshold"
    )
    (note,) = notes_on(random_bert, {"by_step": [state()], "positions": 13}, 0.25)
    assert note.startswith("The samples have 13 tokens and the model was made for 12")


# --- the command ---


def run(*arguments: object, status: int = 0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "bert"
    loaded = bert(CLS)
    loaded.model.save_pretrained(path)
    loaded.tokenizer.save_pretrained(path)
    return path


def test_the_command_writes_what_it_prints(folder, text, tmp_path):
    out = tmp_path / "out"
    shown = run("denoise", folder, "--corpus", text, "--seq-len", 16, "--samples", 4, "--steps", 3, "--out", out).stdout
    assert {path.name for path in out.iterdir()} == {"denoising.png", "summary.json", "table.parquet", "run.json"}
    assert (out / "denoising.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((out / "summary.json").read_text())
    assert summary["text"] in shown
    assert [one["step"] for one in summary["by_step"]] == [0, 1, 2, 3]
    # The planted head gives nearly all to [CLS], whatever is masked; its twin has random weights.
    assert [one["sink_rate"] for one in summary["by_step"]] == [50.0] * 4
    assert summary["moves"]["mean"] == 0.0
    assert summary["mask_token"] == MASK
    table = read_table(out / "table.parquet")
    rates = table.query("metric == 'denoising_sink_rate' and step == 3").sort_values("head")
    assert rates["value"].tolist() == [100.0, 0.0]
    losses = table.query("metric == 'masked_token_loss'")
    assert losses["value"].tolist() == [one["loss"] for one in summary["by_step"][:-1]]


def test_a_decoder_that_was_trained_to_fill_gaps_is_believed_with_its_mask_token(text):
    model = make_sinklm(vocab_size=301)
    with pytest.raises(
        Exception, match="SinkLM predicts the next token and sees none behind a gap; give a model that fills gaps"
    ):
        denoise(wrap_model(model, make_tokenizer()), corpus=str(text), mask_token=300)
    both_ways = type(model)(type(model.config)(**{**model.config.to_dict(), "prefix_length": 127})).eval()
    loaded = wrap_model(both_ways, make_tokenizer())
    found = denoise(loaded, corpus=str(text), mask_token=300, seq_len=12, samples=3, steps=2)
    assert found.summary["mask_token"] == 300
    assert len(found.summary["by_step"]) == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--steps", 0], "--steps must be at least 1, got 0"),
        (["--samples", 1], "--samples 1: an interval over samples needs two or more"),
        (["--prompt", -1], "--prompt -1 must be 0 or more: tokens that are not masked"),
        (["--threshold", 1], "--threshold 1.0 must be in [0, 1)"),
        (["--batch-size", 0], "--batch-size must be at least 1, got 0"),
        (["--steps", 40], "--steps 40: a text has 14 tokens to fill in, and every step fills in one or more"),
        (["--prompt", 12, "--steps", 3], "--steps 3: a text has 2 tokens to fill in behind a prompt of 12, and every"),
        (["--prompt", 13, "--steps", 3], "--steps 3: a text has 1 token to fill in behind a prompt of 13, and every"),
        (["--mask-token", 7], "--mask-token 7 is not that of the tokenizer, 4; leave it out"),
        (["--mask-token", 900], "--mask-token 900 is no token of BertForMaskedLM, which has 57"),
    ],
)
def test_settings_that_leave_nothing_to_measure_are_refused(folder, text, arguments, says):
    done = run("denoise", folder, "--corpus", text, "--seq-len", 16, "--samples", 4, *arguments, status=2)
    assert says in done.stderr


def test_other_models_are_refused_with_what_they_do(text):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    bare = transformers.BertModel(transformers.BertConfig(vocab_size=len(WORDS), **sizes))
    with pytest.raises(Exception, match="BertModel has no head that predicts tokens; give a model that fills gaps in a text"):
        denoise(wrap_model(bare, bert().tokenizer), corpus=str(text))
    two = transformers.BartForConditionalGeneration(
        transformers.BartConfig(vocab_size=len(WORDS), d_model=16, encoder_layers=1, decoder_layers=1)
    )
    with pytest.raises(Exception, match="writes one text behind another, and denoising fills in one"):
        denoise(wrap_model(two, bert().tokenizer), corpus=str(text))


def test_the_sink_of_an_encoder_comes_with_the_text_and_is_cheap_to_hide():
    loaded = load_model(str(real("rxnmapper-albert")))
    corpus = resolve_corpus(f"records:path={real('rxnmapper-albert') / 'reactions.txt'}")
    found = denoise(loaded, corpus=corpus, samples=8, steps=4).summary
    rates = [one["sink_rate"] for one in found["by_step"]]
    assert max(rates[:3]) < 1.0 < 4.0 < rates[-1] < 10.0
    assert found["by_step"][-1]["on_special"] > 95.0
    assert found["moves"] is None or found["moves"]["mean"] == 0.0


def test_a_model_without_a_mask_token_is_asked_for_it(text):
    unnamed = bert(mask=False)
    with pytest.raises(
        Exception, match="its tokenizer names no mask token; give the id of the token that stood in their place"
    ):
        denoise(unnamed, corpus=str(text), seq_len=12, samples=3, steps=2)
    found = denoise(unnamed, corpus=str(text), mask_token=MASK, seq_len=12, samples=3, steps=2)
    assert found.summary["mask_token"] == MASK


REMOTE = """
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class TinyDreamConfig(PreTrainedConfig):
    model_type = "tiny_dream"
    hidden_size, num_hidden_layers, num_attention_heads, vocab_size = 16, 1, 2, 301


class TinyDreamAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, 0, False
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, hidden_states):
        def heads(projection):
            return projection(hidden_states).unflatten(-1, (2, 8)).transpose(1, 2)

        name = self.config._attn_implementation
        arguments = heads(self.q_proj), heads(self.k_proj), heads(self.v_proj), None
        outputs = CALL
        return self.o_proj(outputs.flatten(2))


class TinyDreamLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = TinyDreamAttention(config)

    def forward(self, hidden_states):
        return hidden_states + self.self_attn(hidden_states)


class TinyDream(PreTrainedModel):
    config_class, _supports_sdpa, _supports_attention_backend = TinyDreamConfig, True, True

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(301, 16)
        self.layers = nn.ModuleList([TinyDreamLayer(config)])
        self.lm_head = nn.Linear(16, 301, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids=None, attention_mask=None, **kwargs):
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return MaskedLMOutput(logits=self.lm_head(hidden))
"""


@pytest.mark.parametrize(
    ("call", "refused"),
    [
        (
            "ALL_ATTENTION_FUNCTIONS.get_interface(name, None)(self, *arguments, scaling=8**-0.5)[0]",
            None,
        ),
        ("nn.functional.scaled_dot_product_attention(*arguments).transpose(1, 2)", "TinyDream computes attention in its own"),
    ],
    ids=["interface", "own-code"],
)
def test_a_masked_diffusion_model_of_code_of_its_own(call, refused, tmp_path, monkeypatch):
    """The form of LLaDA and Dream; before, one off the interface was said to predict the next token."""
    # As transformers imports it: which modules call the interface is read from their source.
    name = f"tiny_dream_{'own' if refused else 'interface'}"
    (tmp_path / f"{name}.py").write_text(REMOTE.replace("CALL", call))
    monkeypatch.syspath_prepend(tmp_path)
    code = importlib.import_module(name)
    torch.manual_seed(0)
    model = code.TinyDream(code.TinyDreamConfig()).eval()
    text = tmp_path / "text.txt"
    text.write_text("def read(path):\n    return open(path).read()\n" * 60)
    loaded = wrap_model(model, make_tokenizer())
    if refused is not None:
        with pytest.raises(Exception, match=refused):
            denoise(loaded, corpus=str(text), mask_token=300, seq_len=12, samples=2, steps=2)
        return
    found = denoise(loaded, corpus=str(text), mask_token=300, seq_len=12, samples=2, steps=2)
    assert len(found.summary["by_step"]) == 3
