"""Bondarenko et al. 2023: heads of a masked language model that rest on one place."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch

from sinklab.attention.session import attend
from sinklab.errors import DoesNotApply
from sinklab.models.losses import IGNORED, cross_entropies, hide_tokens, loss_kind
from sinklab.probes.attention_received import AttentionReceived
from sinklab.registry import claims
from sinklab.results.metric import FRACTION, Metric
from sinklab_claims.contract.claim import OnCheckpoint, Part
from sinklab_claims.contract.effect import Numbers, Value
from sinklab_claims.contract.trained import Checkpoint
from sinklab_claims.variants import Fields, of_paper

bondarenko = of_paper("bondarenko2023", "Bondarenko et al. 2023 (arXiv 2306.12929)")

MASKED_NUMBERS = (
    Metric(
        "strongest_place",
        "fraction",
        "Mean share of a row on a position, of the head and the position where it is largest; rows of 64 tokens of which 15 % "
        "are hidden.",
        range=FRACTION,
    ),
    Metric(
        "gain_by_context",
        "nats",
        "Loss at the hidden tokens by how often each is hidden in these rows at all, less that of the model.",
    ),
)

MASKED = "masked"

SINK = 0.3
"""Mean share of a row from which a head has a sink, the threshold of Gu et al. 2024."""

LEARNED = 1.0
"""Nats that the context must be worth; frequencies alone need none."""

ROWS, SEQ_LEN = 200, 64


@torch.no_grad()
def masked(checkpoint: Checkpoint) -> Numbers:
    """:data:`MASKED_NUMBERS` of a masked language model, on rows in the tokens that its tokenizer puts round them."""
    model, tokenizer = checkpoint.loaded.model, checkpoint.loaded.tokenizer
    if loss_kind(model) != "masked token" or tokenizer is None or tokenizer.mask_token_id is None:
        raise DoesNotApply("it fills no gaps in a text, and the claim is about models that were trained to")
    rows = checkpoint.rows(ROWS, SEQ_LEN)
    special = torch.tensor(sorted(checkpoint.loaded.encoder.special_ids), device=rows.device)
    gaps, targets = hide_tokens(rows, ~torch.isin(rows, special), int(tokenizer.mask_token_id), seed=checkpoint.draw)
    losses = [
        cross_entropies(model(input_ids=row[None]).logits, of[None]).double().sum()
        for row, of in zip(gaps, targets, strict=True)
    ]
    asked = targets[targets != IGNORED]
    share = torch.bincount(asked)[torch.unique(asked)].double() / len(asked)
    received = AttentionReceived()
    with attend(model, [received], verify=False):
        for part in gaps.split(20):
            model(input_ids=part)
    strongest = max(float(np.max(cast("np.ndarray", row["value"]))) for row in received.rows())
    gain = float(-(share * share.log()).sum() - torch.stack(losses).sum() / len(asked))
    return {MASKED: {"strongest_place": strongest, "gain_by_context": gain}}


@claims.register("masked_objective")
@bondarenko
def masked_objective() -> Fields:
    """A masked language model has a sink as a causal one has: some head gives one place more than 0.3 of a row, on average.

    Beside the two objectives of ``objective_and_mechanism``, on encoders of others. A training of 1.5 million parameters has
    none (``results/small.json``): its strongest head gives a place 0.031, where the context is worth 2.1 nats.
    """
    return dict(
        where="section 3",
        published="In BERT-base more than 97 % of the outliers are at [SEP], full stops and commas, on which heads rest that "
        "have nothing to add.",
        costs={},
        checkpoint=OnCheckpoint(
            measure=masked, about="text", remark="of a model of others, on texts in its own special tokens"
        ),
        presupposes=(Part("the context is read", Value("gain_by_context", MASKED), more_than=LEARNED),),
        parts=(Part("a head rests on one position", Value("strongest_place", MASKED), more_than=SINK),),
    )
