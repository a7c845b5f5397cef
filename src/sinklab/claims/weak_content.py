"""Xiao et al. 2023, role against content: the sink is on the first place, whatever token stands there."""

from __future__ import annotations

import torch
from torch import Tensor

from sinklab.claims._architecture import UNCHANGED, has_sink
from sinklab.claims.fixed_token import FIXED
from sinklab.read_outs._attention import FIRST_ATTENTION, FirstToken, first_rows, look
from sinklab.registry import claims
from sinklab.results.metric import FRACTION, Metric
from sinklab_claims.contract.claim import Claim, OnCheckpoint, Part, Variant
from sinklab_claims.contract.effect import Ratio
from sinklab_claims.contract.trained import Checkpoint, MeasuredModel

__all__ = ["METRICS", "contents", "weak_content"]

_FIRST = {"data.bos": "none", "data.fixed_position": 0, "data.random_positions": None}
RANDOM, UNSEEN = UNCHANGED, FIXED[0]
FREQUENT = Variant("the most frequent token first", _FIRST | {"data.fixed_token": 78})
"""The letter m, 7.8 % of the text of the smallest scale."""

TRIGGER = Variant("a trigger first", _FIRST | {"data.fixed_token": 2})
"""The character !, behind which that text repeats what came before: no other says as much about what follows."""

HALF = 0.5

OFTEN = 20
"""The most frequent tokens of a text; rarer ones do not occur often enough to say what follows them."""

KINDS = {
    "random": "a token drawn for each row from those of the text",
    "frequent": "the most frequent token of the text",
    "rare": "the rarest token of the text",
    "telling": "the token that says most about the next one: the law of what follows it is the farthest from the law of all "
    f"tokens (Kullback-Leibler), among the {OFTEN} most frequent ones",
}

METRICS = (
    Metric(
        "content_natural",
        "fraction",
        "Mean share of a row on the first token of the text, of the head that gives it most.",
        range=FRACTION,
    ),
    *(
        Metric(f"content_{kind}", "fraction", f"Share of that head on the first place where it holds {what}.", range=FRACTION)
        for kind, what in KINDS.items()
    ),
    Metric(
        "content_later",
        "fraction",
        "Share of that head on a place a quarter into the row which holds the telling token.",
        range=FRACTION,
    ),
)


def contents(trained: MeasuredModel) -> dict[str, float]:
    """Share of the strongest head on the first place, with other tokens there, over the same texts. :data:`METRICS`."""
    model, front, rows = trained.loaded.model, trained.front, first_rows(trained)
    later = rows.shape[1] // 4
    held = _tokens(rows, trained.text_ids.to(rows.device), torch.Generator().manual_seed(trained.draw))

    def with_token(token: Tensor | None, place: int = 0) -> Tensor:
        """Shares of all heads on a place, with a token there."""
        texts = rows.clone()
        if token is not None:
            texts[:, place] = token
        watcher = FirstToken(front + place)
        look(model, texts, (watcher,))
        return torch.cat(list(watcher.by_head(FIRST_ATTENTION).values()))

    natural = with_token(None)
    strongest = int(natural.argmax())
    numbers = {"content_natural": natural[strongest]}
    numbers |= {f"content_{kind}": with_token(token)[strongest] for kind, token in held.items()}
    numbers["content_later"] = with_token(held["telling"], later)[strongest]
    return {name: float(number) for name, number in numbers.items()}


def _tokens(rows: Tensor, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Ids of the kinds of tokens: of ``random`` one for each row, else one for all."""
    place = torch.searchsorted(ids, rows).clamp_max(len(ids) - 1)
    counts = torch.bincount(place[ids[place] == rows], minlength=len(ids)).double()
    law = counts / counts.sum()
    of_text = (ids[place] == rows)[:, 1:]

    def says(token: int) -> float:
        """Nats between the law of what follows and the law of all tokens."""
        after = torch.bincount(place[:, 1:][of_text & (rows[:, :-1] == ids[token])], minlength=len(ids)).double()
        following = after / after.sum().clamp_min(1)
        return float(torch.special.xlogy(following, following / law.clamp_min(1e-12)).sum())

    frequent = [int(token) for token in counts.argsort(descending=True, stable=True)[:OFTEN]]
    drawn = torch.randint(len(ids), (len(rows),), generator=generator).to(ids.device)
    return {
        "random": ids[drawn],
        "frequent": ids[frequent[0]],
        "rare": ids[counts.masked_fill(counts == 0, torch.inf).argmin()],
        "telling": ids[max(frequent, key=says)],
    }


def _with_bos(checkpoint: Checkpoint) -> str:
    """Why another token at the first place is another role there."""
    if checkpoint.bos is None:
        return ""
    return "every text that it read began with one token, and another one there has another role (bos_removed is about that)"


def _keeps(kind: str) -> Part:
    return Part(
        f"the first place keeps half of its weight with a token that is {kind}",
        Ratio(f"content_{kind}", RANDOM.label, RANDOM.label, other="content_natural"),
        more_than=HALF,
    )


@claims.register("weak_content")
def weak_content() -> Claim:
    """Trained with tokens of four kinds at the first place of every row, and read with tokens that it did not expect there.

    The base without BOS has a random token at the first place of every training row.

    Where every row of the training begins with one and the same token, what another token does there says something of roles
    and nothing of content; such models are the subject of ``bos_removed``.
    """
    variants = (RANDOM, UNSEEN, FREQUENT, TRIGGER)
    kept = tuple(_keeps(kind) for kind in KINDS)
    place = Part(
        "the telling token has less than half of that at a later place",
        Ratio("content_later", RANDOM.label, RANDOM.label, other="content_telling"),
        less_than=HALF,
    )
    return Claim(
        statement="The sink is on the first place of a text and not on what stands there: a random token, the most frequent "
        "one, one that never occurs elsewhere and one full of meaning all have it.",
        source="xiao2023",
        reference="Xiao et al. 2023 (arXiv 2309.17453), section 3.1 and Table 1",
        published="With the first four tokens kept a perplexity of 5.40, with line breaks in their place 5.60: the position of "
        "the tokens matters and not their meaning.",
        variants=variants,
        bases=("no-bos",),
        read_outs=("sinks", contents),
        presupposes=(has_sink(RANDOM.label),),
        parts=(
            *(has_sink(variant.label) for variant in variants[1:]),
            Part(
                "a trigger has at least half of what an unseen token has",
                Ratio("first_attention", TRIGGER.label, UNSEEN.label),
                more_than=HALF,
            ),
            *kept,
            place,
        ),
        costs={"tiny": "minutes"},
        checkpoint=OnCheckpoint(
            label=RANDOM.label,
            parts=(*kept, place),
            not_about=_with_bos,
            remark="On a checkpoint the first token of the texts that it reads is exchanged.",
        ),
    )
