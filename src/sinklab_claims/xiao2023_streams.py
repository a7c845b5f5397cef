"""Xiao et al. 2023: texts longer than the training: what a window with sinks does in a stream, and re-computation beside it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sinklab.errors import DoesNotApply
from sinklab.models.loading import LoadedModel
from sinklab.policies.base import Policy
from sinklab.registry import claims
from sinklab.results.metric import LOSS, Metric
from sinklab.streaming.perplexity import losses
from sinklab.training.rows import token_losses
from sinklab_claims.contract.claim import BASELINE, OfCheckpoint, OnCheckpoint, Part
from sinklab_claims.contract.effect import Difference, Numbers, Rise
from sinklab_claims.contract.trained import FEW_STREAMS, LONG, Checkpoint, Reads, once
from sinklab_claims.variants import Fields
from sinklab_claims.xiao2023 import MARGIN, TOGETHER, window_fails, windows_before, xiao

LAST = 128
"""Tokens at the end of every text at which re-computation, which reads a whole window for each, is compared."""

TOKENS_AT_ONCE = 32_768


@dataclasses.dataclass(frozen=True, eq=False)
class LongTexts:
    """Long texts and the model that reads them.

    Attributes:
        all_rows: int64 ``(texts, tokens)``, from random lines on, with BOS in front where the tokenizer puts one.
        bos: id of that token; ``None`` where there is none.
        trained: tokens of the context that the model was trained on.
        large: whether fewer texts are read, and tokens are predicted anew sixteen at a time.
    """

    loaded: LoadedModel
    all_rows: Tensor
    bos: int | None
    trained: int
    large: bool = False
    kept: dict[str, Tensor] = dataclasses.field(init=False, default_factory=dict)

    @property
    def rows(self) -> Tensor:
        """The texts that are read under every policy."""
        return self.all_rows[:FEW_STREAMS] if self.large else self.all_rows

    @property
    def budget(self) -> int:
        """Tokens before the query that a bounded cache holds: a quarter of the context, as in Xiao et al.'s Table 1, or of the
        text where that is shorter."""
        return min(self.trained, self.rows.shape[1]) // 4

    @property
    def last(self) -> slice:
        """The last tokens, at which windows are computed anew; of a larger cache fewer, since each window is dearer."""
        return slice(-LAST, None, 1 if self.large else max(1, self.budget // 64) ** 2)

    def losses(self, policy: Policy | dict[str, object] | str, rows: Tensor | None = None, first: int | None = None) -> Tensor:
        """Loss in nats of the tokens from ``first`` on, by default of the second half of the text, ``(texts, tokens)``.

        What is asked of the texts as they are is kept for the claims that ask it again.
        """
        key = f"{policy} {first}"
        if rows is None and key in self.kept:
            return self.kept[key]
        own = rows is None
        rows = self.rows if rows is None else rows
        start = rows.shape[1] // 2 if first is None else first
        at_once = max(1, TOKENS_AT_ONCE // rows.shape[1])
        found = torch.cat([losses(self.loaded.model, part, policy, first=start) for part in rows.split(at_once)])
        if own:
            self.kept[key] = found
        return found

    def recomputed(self) -> Tensor:
        """Loss of the :attr:`last` tokens if for each the budget and the query are encoded anew, ``(texts, tokens)``.

        Windows begin as texts do, with BOS, at the expense of the oldest token, where there is one: the model has hardly seen
        one that does not.
        """
        if "anew" in self.kept:
            return self.kept["anew"]
        group = TOGETHER if self.large else 1
        every = slice(None) if self.large else self.last
        windows = windows_before(self.rows, self.rows.shape[1] - LAST, self.budget + 1, group)[:, every].clone()
        if self.bos is not None:
            windows[..., 0] = self.bos
        device, at_once = self.loaded.device, max(1, TOKENS_AT_ONCE // windows.shape[-1])
        after = windows.shape[-1] - 1 - group
        with torch.no_grad():
            losses = [
                token_losses(self.loaded.model, part.to(device), after=after).cpu()
                for part in windows.flatten(0, 1).split(at_once)
            ]
        self.kept["anew"] = torch.cat(losses).view(len(windows), -1)
        return self.kept["anew"]


def keep(num_sinks: int, held: int, **settings: object) -> dict[str, object]:
    """The policy that holds ``held`` tokens before the query, ``num_sinks`` of them the first of the text."""
    return {"name": "sink_window", "num_sinks": num_sinks, "window": held - num_sinks, **settings}


@once
def long_texts(checkpoint: Checkpoint) -> LongTexts:
    """The long texts of a checkpoint; the same ones, and their losses, for every claim that reads alike."""
    return LongTexts(checkpoint.loaded, checkpoint.streams(), checkpoint.bos, checkpoint.trained_on, checkpoint.large)


def texts_of(checkpoint: Checkpoint, reads: Reads = "long") -> LongTexts:
    """Those texts, or longer ones than the training."""
    texts = long_texts(checkpoint)
    past = reads != "long" and texts.all_rows.shape[1] < LONG * texts.trained
    return dataclasses.replace(texts, all_rows=checkpoint.streams(past_training=True)) if past else texts


def on_checkpoint(numbers: Callable[[LongTexts], Numbers], reads: Reads = "long") -> OfCheckpoint:
    """The numbers of long texts as what a claim measures on a checkpoint and its own texts."""

    @functools.wraps(numbers)
    def measure(checkpoint: Checkpoint) -> Numbers:
        return numbers(texts_of(checkpoint, reads))

    return measure


def about_long_texts(numbers: Callable[[LongTexts], Numbers], reads: Reads = "long", **checkpoint: Any) -> dict[str, Any]:
    """What claims about long texts have in common, by the fields of a claim.

    Args:
        numbers: what is measured of a checkpoint.
        reads: whether the text must be longer than the training too.
        checkpoint: further fields of :class:`OnCheckpoint`.
    """
    return {"costs": {}, "checkpoint": OnCheckpoint(measure=on_checkpoint(numbers, reads), reads=reads, **checkpoint)}


# --- claims -------------------------------------------------------------------------------------------------------------------

ANEW = "re-computation, begun as texts are"

LAST_LOSS = Metric("last_loss", "nats", "Loss of the last tokens, at which re-computation is taken too.")


def past_the_context(texts: LongTexts) -> Numbers:
    """Losses of the second half, and of the last tokens, where re-computation is taken too."""
    dense = {"dense": texts.losses("full")} if texts.rows.shape[1] > texts.trained else {}  # within the training it cannot fail
    loss = {**dense, "no sinks": texts.losses(keep(0, texts.budget)), "four sinks": texts.losses(keep(4, texts.budget))}
    numbers = {
        label: {"loss": float(part.mean()), "last_loss": float(part[:, texts.last].mean())} for label, part in loss.items()
    }
    return {**numbers, ANEW: {"last_loss": float(texts.recomputed().mean())}}


@claims.register("long_streams")
@xiao
def long_streams() -> Fields:
    """On texts longer than the training, dense attention and a window without the first tokens lose the thread, and a window of
    the same size with four first tokens is as good as re-computing the window.

    Dense attention is judged where the texts are longer than the training; of a model that was trained on more they are not.
    Four sinks against everything else in Figure 1, at a cache of a quarter of the trained context. What is claimed of
    re-computation, which costs a window for every token, is that it is not missed: sinks may be better.
    """
    as_good = Difference("last_loss", "four sinks", ANEW)
    return dict(
        where="Figure 1 and Table 1",
        published="Perplexity of Llama-2-13B on a book of 65,000 tokens: dense 5641, window 5158, re-computation 5.43, four "
        "first tokens and 1,020 recent ones 5.40.",
        parts=(
            Part("dense attention fails", Difference("loss", "dense", "four sinks"), more_than=MARGIN),
            Part("a window without sinks fails", Difference("loss", "no sinks", "four sinks"), more_than=MARGIN),
            Part("four sinks are no worse than re-computation", as_good, less_than=MARGIN),
        ),
        **about_long_texts(past_the_context),
    )


def by_number(texts: LongTexts) -> Numbers:
    """Losses of the second half; every cache holds as many tokens as the others."""
    return {f"{sinks} sinks": {"loss": float(texts.losses(keep(sinks, texts.budget)).mean())} for sinks in (0, 1, 2, 4, 8)}


@claims.register("number_of_sinks")
@xiao
def number_of_sinks() -> Fields:
    """At equal cache size four first tokens are enough, and more of them add nothing.

    Sinks are part of the budget, as in the paper: a cache with more of them holds fewer recent tokens.
    """
    return dict(
        where="Table 2",
        published="Perplexity with 0, 1, 2, 4, 8 first tokens: Falcon-7B 17.90, 12.12, 12.12, 12.12, 12.12; MPT-7B 460.29, "
        "14.99, 15.00, 14.99, 14.98; Pythia-12B 21.62, 11.95, 12.09, 12.09, 12.02; Llama-2-7B 3359.95, 11.88, 10.51, 9.59, "
        "9.54.",
        parts=(
            Part("none is too few", Difference("loss", "0 sinks", "4 sinks"), more_than=MARGIN),
            Part("eight are no better than four", Difference("loss", "4 sinks", "8 sinks"), less_than=MARGIN),
        ),
        **about_long_texts(by_number),
    )


def line_breaks(texts: LongTexts) -> Numbers:
    """Losses of the second half, of texts whose first four tokens are their own or line breaks."""
    broken = texts.rows.clone()
    broken[:, :4] = _line_break(texts.loaded)
    return {
        "no sinks": {"loss": float(texts.losses(keep(0, texts.budget)).mean())},
        "four first tokens": {"loss": float(texts.losses(keep(4, texts.budget)).mean())},
        "four line breaks": {"loss": float(texts.losses(keep(4, texts.budget), broken).mean())},
    }


def _line_break(loaded: LoadedModel) -> int:
    """Id of a line break; some tokenizers put a space in front of whatever they are given, so it is the last id."""
    ids = loaded.encoder.encode("\n")
    if not ids or loaded.tokenizer is None or "\n" not in loaded.tokenizer.decode(ids[-1:]):
        raise DoesNotApply("its tokenizer has no token for a line break")
    return ids[-1]


@claims.register("line_breaks_as_sinks")
@xiao
def line_breaks_as_sinks() -> Fields:
    """Sinks matter for where they stand and not for what they say: with the first four tokens replaced by line breaks a window
    with sinks does as well.

    The absolute position makes the sink, not the meaning of its token. Where all rows of the training began with one token, it
    is that token which has the sink, and line breaks take its place: of the embedded model they are no better than no sinks.
    """
    fails = Part("a window without sinks fails", Difference("loss", "no sinks", "four first tokens"), more_than=MARGIN)
    as_good = Difference("loss", "four line breaks", "four first tokens")
    return dict(
        where="Table 1",
        published="Perplexity 5.60 with four line breaks, 5.40 with the four first tokens, 5158 with neither: 0.036 nats "
        "apart.",
        presupposes=(fails,),
        parts=(
            Part("line breaks restore the loss", Difference("loss", "no sinks", "four line breaks"), more_than=MARGIN),
            Part("they are as good as the first tokens", as_good, less_than=MARGIN),
        ),
        **about_long_texts(
            line_breaks,
            remark="Whether BOS stood in front of every row of the training, which decides here, a checkpoint does not say.",
        ),
    )


PARTS = {"an eighth": 8, "a quarter": 4, "half": 2, "the whole": 1}


def by_size(texts: LongTexts) -> Numbers:
    """Losses of the second half with four sinks; cache and query together fill the part of the context, or of the text."""
    sizes = {label: min(texts.trained, texts.rows.shape[1]) // divisor - 1 for label, divisor in PARTS.items()}
    return {label: {"loss": float(texts.losses(keep(4, size)).mean())} for label, size in sizes.items()}


@claims.register("cache_size_not_monotone")
@xiao
def cache_size_not_monotone() -> Fields:
    """A larger cache does not always lower the loss: there are models for which a step from an eighth of the trained context to
    all of it raises it.

    Of a context longer than the texts the parts are those of a text. The largest cache stays inside the trained context, so
    that what is found is not a failure of positions. A model for which every step lowers the loss is no evidence against it,
    nor are several of one recipe.
    """
    # In three of the four published models the loss rises by 0.040 to 0.055 from half of the context to the whole.
    worse = Part("a larger cache is worse", Rise("loss", tuple(PARTS)), more_than=0.02, of_some=True)
    return dict(
        where="Table 6",
        published="Perplexity with caches of an eighth, a quarter, half and the whole of the trained context: Falcon-7B 13.61, "
        "12.84, 12.34, 12.84; MPT-7B 14.12, 14.25, 14.33, 14.99; Pythia-12B 13.17, 12.52, 12.08, 12.09; Llama-2-7B 9.73, 9.32, "
        "9.08, 9.59.",
        parts=(worse,),
        **about_long_texts(by_size),
    )


FRESH, SINKS, BARE = "text by itself", "late, four sinks", "late, no sinks"


def late_in_a_stream(texts: LongTexts) -> Numbers:
    """Loss of the same tokens at the start of their texts, read by themselves, and late in one stream of all texts.

    They are those that a full cache has the context of, and from half of it on. Read by itself a text has lost nothing then. In
    a stream all before it has come and gone many times over, and what it sees beside itself are the first tokens of another.
    The texts are joined in one order and in the reverse, behind a first one, and those of the second half are taken; for a
    large model in one order, of the beginnings of half of the texts, twice as long as the cache.
    """
    rows = texts.all_rows[::2, : 2 * texts.budget] if texts.large else texts.all_rows  # a text's end is not asked about
    first, others = rows[:1], rows[1:]
    front, (number, length) = int(texts.bos is not None), others.shape
    tokens = slice(texts.budget // 2, texts.budget)
    late = number - number // 2

    def of_text(losses: Tensor) -> Tensor:
        return losses.view(-1, length - front)[late:, tokens]

    start, stop = front + tokens.start, front + tokens.stop
    fresh = texts.losses("full", others[:, :stop], first=start)
    found: dict[str, list[Tensor]] = {FRESH: [], SINKS: [], BARE: []}
    for order, alone in ((others, fresh), (others.flip(0), fresh.flip(0)))[: 1 if texts.large else 2]:
        found[FRESH].append(alone[late:])
        stream = torch.cat((first, order[:, front:].reshape(1, -1)), dim=1)
        for label, sinks in ((SINKS, 4), (BARE, 0)):
            found[label].append(of_text(texts.losses(keep(sinks, texts.budget), stream, first=length)))
    return {label: {"loss": float(torch.cat(parts).double().mean())} for label, parts in found.items()}


@claims.register("stable_over_long_texts")
@xiao
def stable_over_long_texts() -> Fields:
    """With four sinks and positions inside the cache a token costs no more late in a long stream than at the start of a text,
    where nothing has left the cache; without the sinks it costs more.

    The stream is 64 times as long as the training, or as the cache (of a large model 16 times); the published one a thousand
    times. That a token costs the
    same wherever it stands in a stream follows from how far layers of windows reach, so it is compared with the same token at
    the start of its text.
    """
    return dict(
        where="Figures 3 and 5",
        published="Stable perplexity over more than four million tokens of a hundred joined books, for 13 models of four "
        "families; windows without the first tokens fail as soon as these have left.",
        parts=(
            Part("with sinks a late token costs no more", Difference("loss", SINKS, FRESH), less_than=MARGIN),
            Part("without them it costs more", Difference("loss", BARE, FRESH), more_than=MARGIN),
        ),
        **about_long_texts(late_in_a_stream),
    )


LOSS_WITHIN = Metric("loss_within", "nats", "Loss within the trained context, once the cache is full.")


def by_positions(texts: LongTexts) -> Numbers:
    """Losses within the trained context, once the cache is full, and past twice its length."""
    numbers = {}
    for label, positions in (("inside the cache", "in_cache"), ("in the text", "original")):
        losses = texts.losses(keep(4, texts.budget, positions=positions), first=2 * texts.budget)
        within, past = texts.trained - 2 * texts.budget, 2 * texts.trained - 2 * texts.budget
        numbers[label] = {LOSS_WITHIN.name: float(losses[:, :within].mean()), LOSS.name: float(losses[:, past:].mean())}
    return numbers


@claims.register("position_inside_the_cache")
@xiao
def position_inside_the_cache() -> Fields:
    """A cache with sinks works past the trained length because positions are counted inside the cache; with those of the text
    the distance to the sinks leaves what the model was trained on, and the loss rises.

    The same tokens are seen either way; only the distance to the four sinks differs.
    """
    past, within = (Difference(metric, "in the text", "inside the cache") for metric in ("loss", "loss_within"))
    return dict(
        where="section 3.2 and Figure 4",
        published="Named crucial for the method, without a number: nine tokens read, cached tokens 0, 1, 2, 3, 6, 7, 8 stand "
        "at positions 0 to 6 and the next one at 7.",
        parts=(
            Part("past the trained length positions in the text are worse", past, more_than=MARGIN),
            Part("within the trained length they make no difference", within, more_than=-MARGIN, less_than=MARGIN),
        ),
        **about_long_texts(by_positions, "past the training"),
    )


def of_long_texts(texts: LongTexts) -> Numbers:
    """Losses of the last tokens under the names of :data:`FIRST_TOKENS`, in windows that begin as texts do."""
    last = {sinks: texts.losses(keep(sinks, texts.budget))[:, texts.last] for sinks in (0, 4)}
    numbers = {f"window_{sinks}": float(losses.mean()) for sinks, losses in last.items()}
    return {BASELINE: {**numbers, "re_computation": float(texts.recomputed().mean())}}


@claims.register("recomputation_equals_sinks")
@xiao
def recomputation_equals_sinks() -> Fields:
    """Re-computing the keys and values of a bare window for every token gives the loss that four kept first tokens give: the
    first token of any window serves as a sink."""
    agree = Difference("re_computation", BASELINE, BASELINE, "window_4")
    return dict(
        where="Figure 1 and Table 1",
        published="Perplexity 5.43 with re-computation, 5.40 with sinks, 5158 with neither (Llama-2-13B): 0.006 nats apart.",
        presupposes=(window_fails(BASELINE, "a window without sinks fails"),),
        parts=(Part("re-computation and sinks agree", agree, more_than=-MARGIN, less_than=MARGIN),),
        bases=("no-bos",),
        **about_long_texts(
            of_long_texts,
            remark="Windows begin with BOS where the tokenizer puts it in front of a text; whether every row of the "
            "training did, a checkpoint does not say.",
        ),
    )
