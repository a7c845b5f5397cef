"""Xiao et al. 2023: a window without the first tokens fails, sinks restore it, and what else can take their place."""

from __future__ import annotations

import torch
from torch import Tensor

from sinklab.errors import DoesNotApply
from sinklab.models.loading import LoadedModel
from sinklab.registry import claims
from sinklab.results.metric import FRACTION, LOSS, Metric
from sinklab.training.rows import limited_attention, token_losses
from sinklab_claims.contract.claim import BASELINE, OnCheckpoint, Part, Variant
from sinklab_claims.contract.effect import Difference, Numbers, Rise, Value
from sinklab_claims.contract.trained import Checkpoint, MeasuredModel, gives
from sinklab_claims.models import (
    DRAWS,
    LAST,
    MARGIN,
    MODELS,
    NOT_OF_TRAININGS,
    LongTexts,
    about_long_texts,
    at_scale,
    keep,
    on_checkpoint,
)
from sinklab_claims.variants import UNCHANGED, Fields, of_paper

__all__ = ["first_tokens"]

xiao = of_paper("xiao2023", "Xiao et al. 2023 (arXiv 2309.17453)")

# --- windows within the trained context ---------------------------------------------------------------------------------------

SAME = 0.02
"""Nats per token: a difference below it is none. Published is 0.024 for a plain model with one first token instead of four."""

LEFT = 0.05
"""Share of the failure that is left with one first token beside the window, from which one is too few. Published are 0.055 for
the plain model (perplexities of 27.87, 18.49 and 18.05) and 0.000 for the one with a learned token in front."""

HAS_SINK = 0.1
"""Mean weight on the first token from which a model has a sink. Even weights give it 0.07 over rows of 64 tokens."""

KEPT = (0, 1, 2, 4)
TOKENS, LEAST_ROWS = 8_192, 8
WINDOWS = 2_048
"""Tokens at which the windows are encoded anew, about."""

FIRST_TOKENS = (
    *(
        Metric(
            f"window_{number}",
            "nats",
            f"Held-out loss when every query sees {number} first tokens (learned ones in front counted) and the most recent "
            "ones (itself among them), a quarter of the context together; positions stay those of the text.",
        )
        for number in KEPT
    ),
    Metric(
        "re_computation",
        "nats",
        "Held-out loss when that quarter is encoded anew for every token, with BOS in the place of its oldest token where "
        "training puts one in front of every row, and learned tokens in front.",
    ),
    Metric(
        "left_by_one",
        "fraction",
        "Share of what a window without first tokens loses against one with four that is still lost with one of them: window_1 "
        f"less window_4 over window_0 less window_4; absent where that is no more than {MARGIN} nats.",
    ),
)


@gives(*FIRST_TOKENS)
@torch.no_grad()
def first_tokens(trained: MeasuredModel) -> dict[str, float]:
    """Held-out losses under windows of a quarter of the context.

    All are over the same tokens, as many as re-computation is taken at, and give :data:`FIRST_TOKENS`.
    """
    context, model = trained.context, trained.loaded.model
    size = max(KEPT[-1] + 1, context // 4)
    rows = trained.rows(max(LEAST_ROWS, TOKENS // context), context)
    targets = context - size - 1
    every = max(1, len(rows) * targets // WINDOWS)
    losses_of: dict[str, list[Tensor]] = {}
    for part in rows.split(max(1, TOKENS // context)):
        for number in KEPT:
            with limited_attention(model, size - number, range(number)):
                losses_of.setdefault(f"window_{number}", []).append(token_losses(model, part, after=size)[:, ::every].flatten())
        # The window of the token at position t holds t - size … t - 1; the first of these tokens is size + 1.
        windows = part.unfold(1, size + 1, 1)[:, 1::every].flatten(0, 1).clone()
        if trained.every_row_has_bos:
            windows[:, 0] = part[0, 0]
        losses = [token_losses(model, some, after=size - 1).flatten() for some in windows.split(max(1, TOKENS // size))]
        losses_of.setdefault("re_computation", []).extend(losses)
    numbers = {name: float(torch.cat(parts).double().mean()) for name, parts in losses_of.items()}
    lost = numbers["window_0"] - numbers["window_4"]
    return numbers | ({"left_by_one": (numbers["window_1"] - numbers["window_4"]) / lost} if lost > MARGIN else {})


def _fails(label: str, says: str) -> Part:
    """A window without first tokens loses against one with four."""
    return Part(says, Difference("window_0", label, label, "window_4"), more_than=MARGIN)


@claims.register("window_fails_sinks_restore")
@xiao
def window_fails_sinks_restore() -> Fields:
    """A softmax model that sees only a window of recent tokens loses far more than the context it is denied is worth: with four
    first tokens in the window's budget the loss is that of re-computing the window.

    Within the trained context, so that nothing fails but the eviction; seeds are trainings.
    """
    restored = Difference("window_4", BASELINE, BASELINE, "re_computation")
    return dict(
        where="Table 1 and Figure 1",
        published="Perplexity of Llama-2-13B: window of 1,024 tokens 5158, four first tokens and 1,020 recent ones 5.40, "
        "re-computation 5.43.",
        presupposes=(Part("the model has a sink", Value("first_attention", BASELINE), more_than=HAS_SINK),),
        parts=(
            _fails(BASELINE, "without the first tokens the loss rises"),
            Part("with four it is that of re-computation", restored, less_than=MARGIN),
        ),
        variants=(UNCHANGED,),
        checkpoint=OnCheckpoint(reads="context"),
        read_outs=("sinks", first_tokens),
    )


def of_long_texts(texts: LongTexts) -> Numbers:
    """Losses of the last tokens under the names of :data:`FIRST_TOKENS`, in windows that begin as texts do."""
    first = texts.rows.shape[1] - LAST
    numbers = {f"window_{sinks}": float(texts.losses(keep(sinks, texts.budget), first=first).mean()) for sinks in (0, 4)}
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
        presupposes=(_fails(BASELINE, "a window without sinks fails"),),
        parts=(Part("re-computation and sinks agree", agree, more_than=-MARGIN, less_than=MARGIN),),
        variants=(UNCHANGED,),
        bases=("no-bos",),
        read_outs=("sinks", first_tokens),
        checkpoint=OnCheckpoint(
            measure=on_checkpoint(of_long_texts),
            reads="long",
            remark="Windows begin with BOS where the tokenizer puts it in front of a text; whether every row of the "
            "training did, a checkpoint does not say.",
        ),
        costs={"tiny": "minutes", "60m": "gpu", "1b": "gpu"},
    )


PLAIN = Variant("no BOS", {"data.bos": "none"})
TOKEN = Variant("sink token, no BOS", {"data.bos": "none", "model.operation": {"name": "sink_token"}})


@claims.register("learnable_sink")
@xiao
def learnable_sink() -> Fields:
    """With a learned token in front of every training sample, that token alone makes a window work; without it the window
    fails, and the loss of the whole context is that of the plain model.

    Without BOS, as the paper's models are trained; with it every model has a token that is always the same in front. How much
    of the failure is left with the token alone is judged as a share of it, which does not depend on how large it is.
    """
    costs = Difference("held_out_loss", TOKEN.label, PLAIN.label)
    return dict(
        where="Table 3 and Figure 6",
        published="Perplexity at 160 million parameters with 0, 1, 2 and 4 first tokens beside the window: learnable sink "
        "1235, 18.01, 18.01, 18.02; plain model 27.87, 18.49, 18.05, 18.05. The loss curves overlap.",
        parts=(
            _fails(TOKEN.label, "without the sink token a window fails"),
            Part("it alone is enough", Value("left_by_one", TOKEN.label), less_than=LEFT),
            Part("the loss is no higher than the plain model's", costs, less_than=SAME),
        ),
        variants=(PLAIN, TOKEN),
        read_outs=(first_tokens, "sinks"),
        bases=("no-bos",),
    )


def _begins_alike(checkpoint: Checkpoint) -> str:
    """Why a model is not the plain one of the claim."""
    return "" if checkpoint.bos is None else "every text that it reads begins with one token, which can be the sink alone"


@claims.register("one_sink_is_too_few")
@xiao
def one_sink_is_too_few() -> Fields:
    """A model whose training samples begin with no fixed token spreads its sink over several first tokens, so that one of them
    beside a window is too few; with a learned token in front of every sample one is enough.

    The paper's reason: samples that begin anyhow have no token that could be the sink alone. Hence without BOS.
    """
    too_few = Part("one first token is too few", Value("left_by_one", PLAIN.label), more_than=LEFT)
    return dict(
        where="section 3.3 and Table 3",
        published="Perplexity with one and with four first tokens: plain model 18.49 and 18.05, learnable sink 18.01 and "
        "18.02.",
        presupposes=(_fails(PLAIN.label, "the plain model fails without first tokens"),),
        parts=(too_few, Part("one sink token is enough", Value("left_by_one", TOKEN.label), less_than=LEFT)),
        variants=(PLAIN, TOKEN),
        read_outs=(first_tokens,),
        bases=("no-bos",),
        checkpoint=OnCheckpoint(
            label=PLAIN.label,
            parts=(too_few,),
            reads="context",
            not_about=_begins_alike,
            remark="A checkpoint answers for the model without a sink token.",
        ),
    )


# --- texts longer than the training -------------------------------------------------------------------------------------------

ANEW = "re-computation, begun as texts are"

LAST_LOSS = Metric("last_loss", "nats", "Loss of the last tokens, at which re-computation is taken too.")


def past_the_context(texts: LongTexts) -> Numbers:
    """Losses past twice the trained context, and of the last tokens, where re-computation is taken too."""
    loss = {
        "dense": texts.losses("full"),
        "no sinks": texts.losses(keep(0, texts.budget)),
        "four sinks": texts.losses(keep(4, texts.budget)),
    }
    numbers = {label: {"loss": float(part.mean()), "last_loss": float(part[:, -LAST:].mean())} for label, part in loss.items()}
    return {**numbers, ANEW: {"last_loss": float(texts.recomputed().mean())}}


@claims.register("long_streams")
@xiao
def long_streams() -> Fields:
    """On texts longer than the training, dense attention and a window without the first tokens lose the thread, and a window of
    the same size with four first tokens is as good as re-computing the window.

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
    """Losses past twice the trained context; every cache holds as many tokens as the others."""
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


BEGINS_ALIKE = Metric(
    "begins_alike", "fraction", "1 if a token stands in front of every text, else 0.", outcome=True, range=FRACTION
)


def line_breaks(texts: LongTexts) -> Numbers:
    """Losses past twice the trained context, of texts whose first four tokens are their own or line breaks."""
    broken = texts.rows.clone()
    broken[:, :4] = _line_break(texts.loaded)
    four = {"loss": float(texts.losses(keep(4, texts.budget)).mean()), "begins_alike": float(texts.bos is not None)}
    return {
        "no sinks": {"loss": float(texts.losses(keep(0, texts.budget)).mean())},
        "four first tokens": four,
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

    The absolute position makes the sink, not the meaning of its token. At the scales, where it is known how models were
    trained, it is about those whose rows did not all begin with one token: where they did, it is that token which has the sink,
    and line breaks take its place.
    """
    fails = Part("a window without sinks fails", Difference("loss", "no sinks", "four first tokens"), more_than=MARGIN)
    as_good = Difference("loss", "four line breaks", "four first tokens")
    return dict(
        where="Table 1",
        published="Perplexity 5.60 with four line breaks, 5.40 with the four first tokens, 5158 with neither: 0.036 nats "
        "apart.",
        presupposes=(fails, Part("rows began with any token", Value("begins_alike", "four first tokens"), less_than=0.5)),
        parts=(
            Part("line breaks restore the loss", Difference("loss", "no sinks", "four line breaks"), more_than=MARGIN),
            Part("they are as good as the first tokens", as_good, less_than=MARGIN),
        ),
        measure=at_scale(line_breaks),
        natural_text=True,
        one_model=MODELS,
        checkpoint=OnCheckpoint(
            measure=on_checkpoint(line_breaks),
            presupposes=(fails,),
            reads="long",
            remark="Whether BOS stood in front of every row of the training, which decides here, a checkpoint does not say.",
        ),
        costs=NOT_OF_TRAININGS,
        evidence={
            "tiny": f"{DRAWS['tiny']}. Every row of its training began with BOS, which the line breaks replace: they are "
            "no better than no sinks, in three draws by 0.006 to 0.026 nats worse"
        },
    )


PARTS = {"an eighth": 8, "a quarter": 4, "half": 2, "the whole": 1}


def by_size(texts: LongTexts) -> Numbers:
    """Losses past twice the trained context with four sinks; cache and query together fill the part of the context."""
    sizes = {label: texts.trained // divisor - 1 for label, divisor in PARTS.items()}
    return {label: {"loss": float(texts.losses(keep(4, size)).mean())} for label, size in sizes.items()}


@claims.register("cache_size_not_monotone")
@xiao
def cache_size_not_monotone() -> Fields:
    """A larger cache does not always lower the loss: there are models for which a step from an eighth of the trained context to
    all of it raises it.

    The largest cache stays inside the trained context, so that what is found is not a failure of positions. A model for which
    every step lowers the loss is no evidence against it, nor are several of one recipe.
    """
    # In three of the four published models the loss rises by 0.040 to 0.055 from half of the context to the whole.
    worse = Part("a larger cache is worse", Rise("loss", tuple(PARTS)), more_than=0.02, of_some=True)
    return dict(
        where="Table 6",
        published="Perplexity with caches of an eighth, a quarter, half and the whole of the trained context: Falcon-7B 13.61, "
        "12.84, 12.34, 12.84; MPT-7B 14.12, 14.25, 14.33, 14.99; Pythia-12B 13.17, 12.52, 12.08, 12.09; Llama-2-7B 9.73, 9.32, "
        "9.08, 9.59.",
        parts=(worse,),
        **about_long_texts(by_size) | {"costs": NOT_OF_TRAININGS, "evidence": {"tiny": DRAWS["tiny"]}},
    )


FRESH, SINKS, BARE = "text by itself", "late, four sinks", "late, no sinks"


def late_in_a_stream(texts: LongTexts) -> Numbers:
    """Loss of the same tokens at the start of their texts, read by themselves, and late in one stream of all texts.

    They are those that a full cache has the context of, and from half of it on. Read by itself a text has lost nothing then. In
    a stream all before it has come and gone many times over, and what it sees beside itself are the first tokens of another.
    The texts are joined in one order and in the reverse, behind a first one, and those of the second half are taken.
    """
    first, others = texts.rows[:1], texts.rows[1:]
    front, (number, length) = int(texts.bos is not None), others.shape
    tokens = slice(texts.budget // 2, texts.budget)
    late = number - number // 2

    def of_text(losses: Tensor) -> Tensor:
        return losses.view(-1, length - front)[late:, tokens]

    start, stop = front + tokens.start, front + tokens.stop
    fresh = texts.losses("full", others[:, :stop], first=start)
    found: dict[str, list[Tensor]] = {FRESH: [fresh[late:], fresh.flip(0)[late:]], SINKS: [], BARE: []}
    for order in (others, others.flip(0)):
        stream = torch.cat((first, order[:, front:].reshape(1, -1)), dim=1)
        for label, sinks in ((SINKS, 4), (BARE, 0)):
            found[label].append(of_text(texts.losses(keep(sinks, texts.budget), stream, first=length)))
    return {label: {"loss": float(torch.cat(parts).double().mean())} for label, parts in found.items()}


@claims.register("stable_over_long_texts")
@xiao
def stable_over_long_texts() -> Fields:
    """With four sinks and positions inside the cache a token costs no more late in a long stream than at the start of a text,
    where nothing has left the cache; without the sinks it costs more.

    The stream is 64 times as long as the training; the published one a thousand times. That a token costs the same wherever it
    stands in a stream follows from how far layers of windows reach, so it is compared with the same token at the start of its
    text.
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
        **about_long_texts(by_positions),
    )
