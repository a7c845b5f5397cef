"""What depend announces: how many tokens a model computes under each policy, and how long the rest takes."""

from __future__ import annotations

import contextlib

import pytest
import torch
from tests.conftest import make_sinklm, make_tokenizer

from sinklab.models.loading import wrap_model
from sinklab.policies.full import Full
from sinklab.policies.recompute import Recompute
from sinklab.policies.window import Window
from sinklab.streaming.reader import open_reader
from sinklab.studies.depend import clock as clocks
from sinklab.studies.depend.clock import Clock
from sinklab.studies.depend.depend import depend
from sinklab.studies.depend.score import score_sheet
from sinklab.tasks.base import Question, Sheet


@pytest.fixture(scope="module")
def loaded():
    return wrap_model(make_sinklm(), tokenizer=make_tokenizer())


@pytest.fixture
def computed(loaded):
    """Numbers of tokens of all forwards of the model."""
    open_reader(loaded.model, "window")  # which proves once, on a text of its own, that the model can be served
    found: list[int] = []
    hook = loaded.model.register_forward_pre_hook(
        lambda module, args, kwargs: found.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    yield found
    hook.remove()


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Full(), 58),
        (Window(window=8), 58),
        # Each of the five tokens before one of an answer in a window of its own; what is passed over is not computed.
        (Recompute(window=8), 5 * 9),
        # Two windows for tokens 19 to 21, which blocks of four divide; tokens 56 and 57 share one.
        (Recompute(window=8, every=4), (19 - 11 + 1) + (21 - 15 + 1) + (57 - 51 + 1)),
    ],
)
def test_tokens_are_those_that_the_model_computes(loaded, computed, policy, expected):
    sheet = Sheet(torch.randint(4, 30, (3, 60)), (Question(20, 23), Question(57, 59)), at=60)
    score_sheet(open_reader(loaded.model, policy), sheet)
    assert sum(computed) == 3 * expected
    assert policy.computed([range(19, 22), range(56, 58)]) == expected


def test_a_text_that_fits_into_a_window_is_computed_once():
    assert Recompute(window=99).computed([range(9, 60)]) == 60
    assert Recompute(window=9).computed([range(3, 12)]) == 10 + 2 * 10


def test_re_computation_has_its_share_of_the_progress(loaded, computed):
    """The bar, and with it the time that is left, moves by what is computed and not by cells."""
    steps = []
    depend(
        loaded,
        ["long_text:contexts=[1.0,1.75]"],
        window=40,
        sinks=(4,),
        items=2,
        policies=["recompute:window=40"],
        progress=lambda stage, done, total: steps.append((stage, done, total)),
    )
    assert len({total for _, _, total in steps}) == 1
    done = [done for _, done, _ in steps]
    search, *read = computed  # for the sink, in the first 64 tokens of the texts, before the bar begins
    assert search == 2 * 64
    assert done[-1] == steps[0][2] == sum(read)
    shares = torch.tensor([0, *done]).diff() / done[-1]
    assert shares[4:6].sum() > 0.8  # two sheets under four policies, of which the third is re-computation


def test_a_pace_is_that_of_the_tokens_and_corrected_by_kind(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(clocks.time, "monotonic", lambda: now[0])
    cells = [("window", 100), ("full", 100), ("recompute", 4000), ("strided", 100), ("strided", 100), ("full", 100)]
    clock = Clock(cells, said.append, lambda *step: None)
    assert clock.tokens == 4500
    for (kind, tokens), seconds in zip(cells, (1.0, 1.1, 40.0, 20.0, 20.0, 1.0), strict=True):
        with clock.cell(kind, tokens):
            now[0] += seconds
    assert said == [
        "the first cell took 1.0 s; by the tokens that are computed the others take about 44 s",
        "a cell under strided took 20 s, slower by token; what is left takes about 21 s",
    ]
    assert clock.tokens == 0


def test_cells_that_are_there_or_fail_take_nothing(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(clocks.time, "monotonic", lambda: now[0])
    clock = Clock([("full", 100), ("window", 100), ("pinned", 100), ("window", 50)], said.append, lambda *step: None)
    clock.skip("full", 100)
    with contextlib.suppress(ValueError), clock.cell("pinned", 100):
        now[0] += 9.0
        raise ValueError("refused")
    with clock.cell("window", 100):
        now[0] += 4.0
    assert said == ["the first cell took 4.0 s; by the tokens that are computed the others take about 2.0 s"]
