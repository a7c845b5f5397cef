"""Cells: equal settings are one run, other settings are others, and what cannot be is refused before anything is trained."""

from __future__ import annotations

import re

import pytest

from sinklab.errors import ConfigurationError, InputError
from sinklab_claims.contract.claim import BASELINE, Times, Variant, base_config, bases_at, folder_names
from sinklab_claims.reproduce import store as store_of_cells
from sinklab_claims.reproduce.store import make_cells, open_store, resolved_changes


def test_equal_settings_are_one_run_whatever_they_are_called() -> None:
    base = base_config("tiny")
    one = make_cells([Variant("slow", {"optimizer.learning_rate": Times(0.5)})], "tiny", [0])
    two = make_cells([Variant("half", {"optimizer.learning_rate": base.optimizer.learning_rate / 2})], "tiny", [0])
    assert one["slow", 0] == two["half", 0]
    assert one["slow", 0].name.startswith("learning_rate=0.005-seed0-")


def test_what_changes_nothing_is_the_baseline() -> None:
    same = Variant("learned", {"model.position": {"name": "learned"}})
    cells = make_cells([Variant(BASELINE), same], "tiny", [0, 1])
    assert resolved_changes(base_config("tiny"), same) == {}
    assert cells["learned", 1].name == cells[BASELINE, 1].name
    assert cells[BASELINE, 0].name != cells[BASELINE, 1].name


def test_a_base_without_bos_has_a_random_token_in_its_place() -> None:
    (plain,), (other,) = (make_cells([Variant(BASELINE)], "tiny", [0], base).values() for base in ("bos", "no-bos"))
    assert plain.name == make_cells([Variant(BASELINE)], "tiny", [0])[BASELINE, 0].name
    assert other.name.startswith("no-bos-baseline-seed0-")
    assert (plain.config.data.bos, plain.config.data.random_positions) == ("rows", None)
    assert (other.config.data.bos, other.config.data.random_positions) == ("none", (0, 1))
    assert other.config.model == plain.config.model
    assert make_cells([Variant(BASELINE)], "60m", [0], "no-bos")[BASELINE, 0].name.startswith("baseline-")


def test_a_scale_has_the_bases_of_a_claim_or_what_it_has() -> None:
    assert bases_at("tiny", ("no-bos", "bos")) == ("no-bos", "bos")
    assert bases_at("small", ("no-bos",)) == ("no-bos",)
    assert bases_at("small") == ("bos",)
    assert bases_at("60m", ("bos", "no-bos")) == ("no-bos",)
    assert folder_names("tiny") == ("tiny", "tiny-bos", "tiny-no-bos")
    assert folder_names("small") == ("small", "small-bos", "small-no-bos")
    assert folder_names("60m") == ("60m",)
    assert folder_names("checkpoint") == ("checkpoint",)


def test_starting_after_another_variant() -> None:
    cells = make_cells([Variant("tuned", {"training.steps": 200}, after=BASELINE), Variant(BASELINE)], "tiny", [0])
    assert cells["tuned", 0].init_from == cells[BASELINE, 0].name
    alone = make_cells([Variant("short", {"training.steps": 200})], "tiny", [0])
    assert cells["tuned", 0].name != alone["short", 0].name
    with pytest.raises(ConfigurationError, match="start after each other in a circle: a, b, a"):
        make_cells([Variant("a", after="b"), Variant("b", after="a")], "tiny", [0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer.rate": 1.0}, "there is no field 'optimizer.rate'"),
        ({"data.seed": 3}, "variant 'x' sets data.seed, which belongs to the seeds"),
        ({"training.steps": 50}, r"variant 'x': warm-up and decay take 100 steps and the run has 50"),
        ({"model.operation": {"name": "sigmiod"}}, "variant 'x': .*no operation is called 'sigmiod'. Did you mean 'sigmoid'"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_cells([Variant("x", changes)], "tiny", [0])


def test_cells_that_are_added_to_a_store_read_the_text_of_those_that_have_begun(tmp_path, monkeypatch):
    """Other seeds and rows of one text are the same text; a cell that has not begun reads what is there then."""
    now = {"train": "a", "held_out": "b", "tokenizer": "c"}
    monkeypatch.setattr(store_of_cells, "prepare_texts", lambda new, cache, progress: {name: dict(now) for name in new})

    def opened(seed, **changes):
        cells = make_cells([Variant("one", changes)], "tiny", [seed])
        return open_store(tmp_path / "runs", {cell.name: cell for cell in cells.values()}, tmp_path, progress=False)

    first = next(iter(opened(0).cells))
    now["train"] = "other"
    opened(1)
    (tmp_path / "runs" / first).mkdir()
    for changes in ({}, {"data.unique_fraction": 0.5}, {"data.fixed_position": 1}, {"optimizer.learning_rate": 0.1}):
        with pytest.raises(
            InputError, match=f"gives another text than {re.escape(first)} in .* has read, .* another directory"
        ):
            opened(2, **changes)
    assert opened(0).texts[first]["train"] == "a", "what is there is not asked again"
    opened(2, **{"data.max_tokens": 20_000})  # another length of text has another hash in any case
    now["train"] = "a"
    assert len(opened(3).cells) == 4


def test_a_store_with_trainings_of_another_context_takes_others(tmp_path):
    """They read more or less of the held-out text, and the same training text: nothing has changed."""

    def opened(seed, corpus, **changes):
        cells = make_cells([Variant("one", {"data.corpus": str(corpus), **changes})], "tiny", [seed])
        return open_store(tmp_path / "runs", {cell.name: cell for cell in cells.values()}, tmp_path / "cache", progress=False)

    longer, data = {"model.max_position_embeddings": 256}, {"data.held_out_rows": 8}
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"some words of line {line} " * 30 for line in range(400)))
    first = opened(0, text, **data, **longer)
    (tmp_path / "runs" / next(iter(first.cells))).mkdir()
    both = opened(0, text, **data)
    one, other = both.texts.values()
    assert one["train"] == other["train"]
    assert one["held_out"] != other["held_out"]
    assert opened(1, text, **data, **longer).texts
    text.write_text("\n\n".join(f"other words of line {line} " * 30 for line in range(400)))
    for changes in ({}, longer):
        with pytest.raises(InputError, match="gives another text than"):
            opened(2, text, **data, **changes)


def test_a_store_that_moves_does_not_mix_precisions(monkeypatch):
    """A cell is in bfloat16 or in float32, and has a name for each; of scales for other machines nothing is decided here."""
    names = {}
    for there in (True, False):
        monkeypatch.setattr("sinklab.training.process.has_bfloat16", lambda device, there=there: there)
        cell = make_cells([Variant(BASELINE)], "small", [0])[BASELINE, 0]
        names[cell.config.training.dtype] = cell.name
        assert make_cells([Variant(BASELINE)], "60m", [0])[BASELINE, 0].config.training.dtype == "auto"
    assert set(names) == {"bfloat16", "float32"}
    assert len(set(names.values())) == 2
