"""Yona et al. 2025 (arXiv 2503.08908): further BOS tokens and one token repeated in the middle of a text take attention."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.chosen_keys import keys_of_document, weights_of_keys
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.registry import claims
from sinklab.results.metric import FRACTION, Metric
from sinklab.training.rows import token_losses
from sinklab_claims.contract.claim import BASELINE, OnCheckpoint, Part
from sinklab_claims.contract.effect import Difference, Value
from sinklab_claims.contract.trained import MeasuredModel, gives
from sinklab_claims.numbers.attention import batches, first_rows
from sinklab_claims.variants import Fields, has_sink, of_paper, without_bos_in_front

yona = of_paper("yona2025", "Yona et al. 2025 (arXiv 2503.08908)")

COUNT = 8
"""False sinks in a row."""

SHARE = 0.05
"""Of a row: what false sinks must take more than other tokens in their place to be called sinks."""

COST = 0.02
"""Nats per token, as in the other claims on tokens that are exchanged."""

KINDS = {
    "text": "tokens of another text",
    "bos": "further beginning-of-sequence tokens",
    "repeated": "one token of the text, drawn for each row, again and again",
}

_TAKEN = (
    "Mean share of a row on eight tokens a quarter into the text together, of the head that gives the first token most, over "
    "the queries behind them; the eight are"
)
_BESIDE = "Share of that head on the first token, over the same queries, beside"
_COST = "less that behind eight tokens of another text."

METRICS = (
    *(Metric(f"taken_by_{kind}", "fraction", f"{_TAKEN} {what}.", range=FRACTION) for kind, what in KINDS.items()),
    *(Metric(f"first_beside_{kind}", "fraction", f"{_BESIDE} {what}.", range=FRACTION) for kind, what in KINDS.items()),
    *(
        Metric(f"cost_of_{kind}", "nats", f"Next-token loss behind eight {what}, {_COST}")
        for kind, what in KINDS.items()
        if kind != "text"
    ),
)


class Behind(Watcher):
    """Mean share on the first token and on some tokens together, of every head, over the queries behind these.

    Args:
        front: learned tokens in front of every row.
        start, count: position and number of the tokens, those in front not counted.
    """

    name = "behind"
    needs: ClassVar[frozenset[str]] = frozenset({"log_sum_exp"})

    def __init__(self, front: int, start: int, count: int) -> None:
        first = front + start
        self.keys, self.after = (front, *range(first, first + count)), first + count
        self.sums: dict[int, Tensor] = {}
        self.queries: dict[int, int] = {}

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        weights = weights_of_keys(call, keys_of_document(call, *self.keys), statistics.log_sum_exp)
        behind = (call.query_positions >= self.after)[:, None, :, None]
        both = torch.stack((weights[..., 0], weights[..., 1:].sum(-1)), -1)
        layer = call.site.layer
        self.sums[layer] = self.sums.get(layer, 0) + (both * behind).sum((0, 2)).double().cpu()
        self.queries[layer] = self.queries.get(layer, 0) + int(behind.sum())

    def shares(self) -> Tensor:
        """Float64 ``(heads of all layers, 2)``: on the first token, and on the others."""
        return torch.cat([self.sums[layer] / self.queries[layer] for layer in sorted(self.sums)])


def _put_in(trained: MeasuredModel, rows: Tensor, start: int) -> dict[str, Tensor]:
    """Texts of each kind, as long as the rows."""
    ids, generator = trained.text_ids, torch.Generator().manual_seed(trained.draw)
    drawn = ids[torch.randint(len(ids), (len(rows), 1), generator=generator)].to(rows.device)
    tokens = {"text": rows.roll(1, 0)[:, start : start + COUNT], "repeated": drawn.expand(-1, COUNT)}
    if trained.bos is not None:
        tokens["bos"] = torch.full_like(tokens["text"], trained.bos)
    return {kind: torch.cat((rows[:, :start], put, rows[:, start:-COUNT]), 1) for kind, put in tokens.items()}


@gives(*METRICS)
@torch.no_grad()
def false_sinks(trained: MeasuredModel) -> dict[str, float]:
    """What false sinks take, what is left to the first token, and what they cost. :data:`METRICS`."""
    model, rows = trained.loaded.model, first_rows(trained)
    start = rows.shape[1] // 4
    shares, losses = {}, {}
    for kind, texts in _put_in(trained, rows, start).items():
        watcher = Behind(trained.front, start, COUNT)
        with attend(model, (watcher,)):
            behind = torch.cat([token_losses(model, part, after=start + COUNT) for part in batches(texts)])
        shares[kind] = watcher.shares()
        losses[kind] = float(behind.double().mean())
    strongest = int(shares["text"][:, 0].argmax())
    numbers = {}
    for kind, of_heads in shares.items():
        numbers[f"first_beside_{kind}"], numbers[f"taken_by_{kind}"] = of_heads[strongest].tolist()
        if kind != "text":
            numbers[f"cost_of_{kind}"] = losses[kind] - losses["text"]
    return numbers


def _takes(kind: str) -> Part:
    more = Difference(f"taken_by_{kind}", BASELINE, BASELINE, "taken_by_text")
    return Part(f"{kind} tokens take attention", more, more_than=SHARE)


def _takes_away(kind: str) -> Part:
    less = Difference(f"first_beside_{kind}", BASELINE, BASELINE, "first_beside_text")
    return Part(f"the first token keeps less beside {kind} tokens", less, less_than=-SHARE)


def _costs(kind: str) -> Part:
    return Part(f"predictions behind {kind} tokens are worse", Value(f"cost_of_{kind}", BASELINE), more_than=COST)


@claims.register("false_sinks_in_a_prompt")
@yona
def false_sinks_in_a_prompt() -> Fields:
    """A prompt can hold false sinks: further BOS tokens and one token repeated draw attention as the first token does, which
    keeps less, and predictions behind them are worse.

    Eight tokens of another text in the same place are what is compared with, so that positions are alike. With learned
    positions the first place is known by itself; the paper's models have rotary ones.
    """
    return dict(
        published="No such number: one word repeated sets off the circuit that marks the first token, and models diverge.",
        costs={},
        read_outs=("sinks", false_sinks),
        presupposes=(has_sink(),),
        parts=tuple(part(kind) for part in (_takes, _takes_away, _costs) for kind in ("bos", "repeated")),
        checkpoint=OnCheckpoint(not_about=without_bos_in_front),
    )
