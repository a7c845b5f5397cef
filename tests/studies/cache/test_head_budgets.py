"""Budgets per head: who is cut short, what is shared out, that bytes are equal and choice and measurement have texts apart."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.architectures.zoo import ZOO, build
from tests.conftest import make_sinklm

from sinklab.corpora import resolve_corpus
from sinklab.errors import ConfigurationError, InputError, UnsupportedModelError
from sinklab.models.loading import wrap_model
from sinklab.policies.per_head import PerHead
from sinklab.policies.sink_window import SinkWindow
from sinklab.streaming.perplexity import estimate, losses
from sinklab.streaming.reader import open_reader
from sinklab.studies.cache.head_budgets import (
    head_budgets,
    per_head_table,
    require_head_maps,
    require_room,
    selection_texts,
    sinks_with_room,
    write_head_maps,
)
from sinklab.studies.cache.head_orders import attention_order, checked_sources, labels_order, require_labels
from sinklab.studies.cache.head_windows import ladder, shared_by_cost, shared_by_order
from sinklab.studies.cache.long_texts import long_texts

HEADS = [(0, 0), (0, 1), (1, 0), (1, 1)]
ROWS, SELECTION = torch.randint(4, 40, (2, 3, 90), generator=torch.Generator().manual_seed(0)).unbind()


@pytest.fixture(scope="module")
def loaded():
    torch.manual_seed(0)
    return wrap_model(build(ZOO["llama"], "sdpa").eval())


@pytest.fixture(scope="module")
def entries(loaded):
    return head_budgets(loaded, ROWS, SELECTION, sources=["measured", "curves", "random"], budgets=[16], num_sinks=1)


# --- sharing out -------------------------------------------------------------------------------------------------------------


def test_an_order_is_cut_short_at_the_front():
    shared = list(shared_by_order(HEADS, 16, 40))
    assert shared[0] == {(0, 0): 2, (0, 1): 20, (1, 0): 20, (1, 1): 20}  # a quarter of the heads, an eighth of the window
    assert {sum(windows.values()) for windows in shared} <= {61, 62, 63, 64}  # what cannot be divided is left
    assert {sum(size < 16 for size in windows.values()) for windows in shared} == {1, 2, 3}
    assert max(max(windows.values()) for windows in shared) <= 40
    assert ladder(16, 40) == [2, 4, 8, 16, 24, 32]


small = st.dictionaries(st.sampled_from([1, 2, 4, 8, 12, 16]), st.integers(-20, 20), min_size=1)


@settings(max_examples=40, deadline=None)
@given(costs=st.lists(small, min_size=1, max_size=4), more=st.integers(0, 40))
def test_sharing_by_cost_is_as_good_as_any_that_holds_as_much(costs, more):
    """By trying all; on the way down the hulls no choice that holds no more tokens costs less."""
    by_head = {(0, head): {size: float(cost) for size, cost in sizes.items()} for head, sizes in enumerate(costs)}
    total = sum(min(sizes) for sizes in costs) + more
    chosen = shared_by_cost(by_head, total)
    held = sum(chosen.values())
    assert held <= total
    cost = sum(by_head[head][size] for head, size in chosen.items())
    if more >= sum(max(sizes) - min(sizes) for sizes in costs):  # room for all: each has its best
        assert cost == sum(min(sizes.values()) for sizes in costs)
    at_least = min(
        sum(sizes[size] for sizes, size in zip(costs, windows, strict=True))
        for windows in itertools.product(*costs)
        if sum(windows) <= total
    )
    # A greedy choice is off by less than one step, which saves what the whole range of one head does at most.
    assert cost - at_least <= max(max(sizes.values()) - min(sizes.values()) for sizes in costs) + 1e-9


# --- measured ----------------------------------------------------------------------------------------------------------------


def test_an_entry_is_the_paired_difference_on_texts_that_were_not_chosen_on(loaded, entries):
    uniform = losses(loaded.model, ROWS, SinkWindow(num_sinks=1, window=15), first=45)
    for entry in entries:
        budgets = tuple(tuple(map(tuple, layer)) for layer in entry["budgets"])
        found = losses(loaded.model, ROWS, PerHead(budgets=budgets), first=45)
        gap = estimate(found - uniform)
        assert entry["gap"] == {"mean": gap.mean, "low": gap.low, "high": gap.high}
        chosen = losses(loaded.model, SELECTION, PerHead(budgets=budgets), first=45)
        plain = losses(loaded.model, SELECTION, SinkWindow(num_sinks=1, window=15), first=45)
        assert entry["selection_gap"]["mean"] == pytest.approx(estimate(chosen - plain).mean, abs=1e-6)
        assert sum(window for layer in budgets for _, window in layer) <= 15 * len(budgets) * len(budgets[0])
        read = [open_reader(loaded.model, policy) for policy in (PerHead(budgets=budgets), SinkWindow(num_sinks=1, window=15))]
        for reader in read:
            reader.read(ROWS[:1])
        assert entry["bytes_ratio"] == read[0].bytes_held() / read[1].bytes_held() <= 1
        cut = {tuple(head) for head in entry["cut"]}
        assert cut == {
            (layer, head) for layer, row in enumerate(budgets) for head, (_, window) in enumerate(row) if window < 15
        }


def test_costs_are_those_of_one_head_alone(loaded, entries):
    measured, curves, chance = entries
    assert chance["costs"] == []
    one = next(cost for cost in measured["costs"] if (cost["layer"], cost["head"]) == (1, 0))
    budgets = [[(1, 15), (1, 15)] for _ in range(2)]
    budgets[1][0] = (1, one["window"])
    alone = losses(loaded.model, SELECTION, PerHead(budgets=tuple(map(tuple, budgets))), first=45)
    plain = losses(loaded.model, SELECTION, SinkWindow(num_sinks=1, window=15), first=45)
    assert one["cost"] == pytest.approx(estimate(alone - plain).mean, abs=1e-6)
    assert one in curves["costs"]
    assert len(curves["costs"]) == 4 * len(ladder(15, 88))
    order = sorted(measured["costs"], key=lambda cost: cost["cost"])
    assert sorted(measured["cut"]) == sorted([cost["layer"], cost["head"]] for cost in order[: len(measured["cut"])])


def test_the_count_of_a_cost_is_that_of_the_tokens_of_the_choice(loaded):
    """Two texts are left for the choice where three are measured; tokens are scored from 45 on."""
    entries = head_budgets(loaded, ROWS, SELECTION[:2], sources=["measured"], budgets=[16], num_sinks=1)
    table = per_head_table(entries, loaded, corpus="drawn", bos=False, run_id="r", seed=0)
    counts = {metric: set(rows["count"]) for metric, rows in table.groupby("metric")}
    assert (counts["per_head_gap"], counts["head_window_cost"]) == ({3 * 45}, {2 * 45})


def test_each_cost_is_one_row_that_says_what_the_others_hold(loaded):
    """Windows of 2 and 4 for one head are tried beside 8 tokens and beside 16, and by two sources."""
    entries = head_budgets(loaded, ROWS, SELECTION, sources=["measured", "curves"], budgets=[9, 17], num_sinks=1)
    table = per_head_table(entries, loaded, corpus="drawn", bos=False, run_id="r", seed=0)
    costs = table[table["metric"] == "head_window_cost"]
    assert not costs.duplicated(["layer", "head", "policy"]).any()
    for entry in entries:
        for cost in entry["costs"]:
            policy = f"1+{entry['window'] - 1}, 1 head with a window of {cost['window']}"
            row = costs[(costs["layer"] == cost["layer"]) & (costs["head"] == cost["head"]) & (costs["policy"] == policy)]
            assert row["value"].tolist() == [cost["cost"]]


def test_a_head_map_comes_back_as_the_policy(loaded, entries, tmp_path):
    write_head_maps(entries, loaded, tmp_path)
    policy = f"per_head:heads={tmp_path / 'heads-measured-16.json'}"
    require_head_maps(loaded, [policy], [])
    reader = open_reader(loaded.model, policy)
    assert [[list(budget) for budget in layer] for layer in reader.policy.budgets] == entries[0]["budgets"]
    weights = build(ZOO["llama"], "sdpa").eval()
    for parameter in weights.parameters():
        parameter.data.mul_(2.0)
    other = wrap_model(weights)
    with pytest.raises(ConfigurationError, match="the head map is for a model with the fingerprint"):
        require_head_maps(other, [policy], [])


def test_attention_beyond_a_short_window_by_hand(loaded):
    """The same order from the matrices that the model returns."""
    model = build(ZOO["llama"], "eager").eval()
    model.load_state_dict(loaded.model.state_dict())
    with torch.no_grad():
        maps = torch.stack(model(ROWS[:, :40], output_attentions=True).attentions)  # (layers, texts, heads, 40, 40)
    index = torch.arange(40)
    beyond = (index[:, None] - index > 5) & (index >= 1)
    mass = (maps * beyond).sum(-1)[..., beyond.any(1)].mean(dim=(1, 3)).unflatten(1, (2, -1)).mean(-1)
    expected = sorted(HEADS, key=lambda head: float(mass[head]))
    assert attention_order(loaded, ROWS[:, :40], (2, 2), 1, 5) == expected


# --- texts and labels --------------------------------------------------------------------------------------------------------


def test_texts_of_the_choice_are_others(tokenizer, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat and the dog on the log " * 30)
    reading = wrap_model(make_sinklm(), tokenizer)
    for text in (resolve_corpus("random_tokens"), resolve_corpus(str(path))):
        rows = long_texts(text, reading.encoder, tokens=20, documents=4, seed=0, bos=False)
        drawn = selection_texts(text, rows, reading, seed=0, bos=False)
        assert drawn.shape == rows.shape
        assert not (drawn[:, None] == rows).all(dim=2).any()
    rows = long_texts(text, reading.encoder, tokens=20, documents=1000, seed=0, bos=False)
    with pytest.raises(InputError, match=rf"corpus 'text_file' has no more than {len(rows)} of 20 tokens; lower `documents`"):
        selection_texts(text, rows, reading, seed=0, bos=False)


def folder_of(tmp_path, loaded, labels, **model):
    heads = [
        {"layer": layer, "head": head, "label": label, "effects": {"zero": {"text": {"mean": cost}}}}
        for (layer, head), (label, cost) in labels.items()
    ]
    of_model = {"model": loaded.name, "revision": loaded.revision, **model}
    (tmp_path / "summary.json").write_text(json.dumps({"heads": heads}))
    (tmp_path / "run.json").write_text(json.dumps({"kind": "causes", "model": of_model}))
    return tmp_path


def test_labels_of_query_heads_order_the_key_value_heads(loaded, tmp_path):
    labels = {(layer, head): ("dormant", 0.0) for layer in range(2) for head in range(4)}
    labels[0, 1] = ("semantic", 0.5)  # one of the two of key-value head 0
    labels[0, 2] = ("undecided", 0.1)
    labels[1, 3] = ("switch", 0.2)
    folder = folder_of(tmp_path, loaded, labels)
    assert checked_sources([str(folder), "random", "random"]) == [str(folder), "random"]
    require_labels(folder, loaded, (2, 2))
    assert labels_order(folder, loaded, (2, 2)) == [(1, 0), (1, 1), (0, 1), (0, 0)]


def test_a_group_of_which_a_head_was_not_examined_is_not_known_to_rest(loaded, tmp_path):
    """One query head of (0, 0) is dormant and nothing is known of the other; both of (1, 1) are dormant, at a larger cost."""
    labels = {(0, 0): ("dormant", 0.0), (1, 2): ("dormant", 0.3), (1, 3): ("dormant", 0.2), (0, 2): ("semantic", 0.1)}
    folder = folder_of(tmp_path, loaded, labels)
    assert labels_order(folder, loaded, (2, 2)) == [(1, 1), (0, 0), (1, 0), (0, 1)]


def test_labels_of_another_model_and_sources_that_are_none(loaded, tmp_path):
    folder = folder_of(tmp_path, loaded, {(5, 0): ("dormant", 0.0)})
    with pytest.raises(ConfigurationError, match=r"has labels of .* \(6 layers, 1 head\) and this is .* \(2 layers, 4 heads\)"):
        require_labels(folder, loaded, (2, 2))
    folder = folder_of(tmp_path, loaded, {(0, 0): ("dormant", 0.0)}, model="other", revision="sha256-0")
    with pytest.raises(ConfigurationError, match="has labels of other"):
        require_head_maps(loaded, [], [str(folder)])
    for name in ("one/causes", "two/causes"):
        (tmp_path / name).mkdir(parents=True)
        folder_of(tmp_path / name, loaded, {(0, 0): ("dormant", 0.0)})
    with pytest.raises(
        InputError, match=r"one/causes' and .*two/causes' have one name, 'causes', by which head maps are called"
    ):
        checked_sources([str(tmp_path / "one" / "causes"), "random", str(tmp_path / "two" / "causes")])
    with pytest.raises(
        InputError, match="`per_head` 'chance' is none of measured, curves, attention, random, and there is no run"
    ):
        checked_sources(["chance"])
    (tmp_path / "summary.json").write_text(json.dumps({"heads": 12}))
    with pytest.raises(InputError, match=r"its summary\.json has no labels of heads"):
        checked_sources([str(tmp_path)])


# --- models whose layers have a window ---------------------------------------------------------------------------------------


def with_window(size):
    torch.manual_seed(0)
    model = build(ZOO["mistral"], "sdpa").eval()
    model.config.sliding_window = size
    return wrap_model(model)


def test_no_head_holds_more_than_its_layer_sees():
    narrow = with_window(24)
    for entry in head_budgets(narrow, ROWS, SELECTION, sources=["random", "curves"], budgets=[12], num_sinks=1):
        windows = [window for layer in entry["budgets"] for _, window in layer]
        assert max(windows) <= 24 - 1 - 1  # the sink, and the token at hand
        assert sum(windows) <= 11 * len(windows)


def test_a_window_without_room_is_refused_before_anything_is_measured():
    narrow = with_window(24)
    require_room(narrow, ROWS, sources=["random"], budgets=[12], sinks=[0, 1])
    require_room(narrow, ROWS, sources=["curves"], budgets=[23], sinks=[0, 1])
    with pytest.raises(
        ConfigurationError, match=r"a window of 23 tokens leaves no room for budgets per head: .* of 23 at most"
    ):
        require_room(narrow, ROWS, sources=["random"], budgets=[12, 23], sinks=[0, 1])


def test_heads_keep_fewer_first_tokens_where_the_advised_number_leaves_no_room():
    model = wrap_model(build(ZOO["llama"], "sdpa").eval())
    about = {"sources": ["random"], "sinks": [0, 2, 8]}
    require_room(model, ROWS, sources=["random"], budgets=[9, 12], sinks=[0, 2, 8])
    with pytest.raises(ConfigurationError, match="leaves no room"):
        head_budgets(model, ROWS, SELECTION, sources=["random"], budgets=[9], num_sinks=8)
    assert sinks_with_room(model, ROWS, budgets=[9, 12], advised=8, **about) == 2
    assert sinks_with_room(model, ROWS, budgets=[12], advised=2, **about) == 2
    assert sinks_with_room(model, ROWS, budgets=[9], advised=8, **{**about, "sources": ["curves"]}) == 8
    head_budgets(model, ROWS, SELECTION, sources=["random"], budgets=[9], num_sinks=2)


def test_a_model_whose_heads_cannot_be_computed_apart_is_refused_before_anything_is_measured():
    model = build(ZOO["gpt_oss"], "eager").eval()
    model.config.sliding_window = 24
    with pytest.raises(UnsupportedModelError, match="has learned sink logits"):
        require_head_maps(wrap_model(model), [], ["random"])
