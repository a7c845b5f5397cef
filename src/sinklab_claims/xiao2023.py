"""Xiao et al. 2023: a window without the first tokens fails, sinks restore it; lines that leave a cache; a hidden sink."""

from __future__ import annotations

import random
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.chosen_keys import keys_of_document, weights_of_keys, weights_on_own_keys
from sinklab.attention.intervention import NEAR, Intervention
from sinklab.attention.probe import Watcher, filled
from sinklab.attention.session import attend
from sinklab.corpora.base import Encoder
from sinklab.errors import ConfigurationError, DoesNotApply, InputError
from sinklab.interventions.hide_key import HideKey
from sinklab.interventions.zero_value import ZeroValue
from sinklab.registry import claims, read_outs
from sinklab.results.metric import FRACTION, Metric
from sinklab.streaming.base import Reader
from sinklab.streaming.reader import open_reader
from sinklab.training.rows import limited_attention, token_losses
from sinklab_claims.contract.claim import BASELINE, OnCheckpoint, Part, Variant
from sinklab_claims.contract.effect import Difference, Numbers, Ratio, Value
from sinklab_claims.contract.trained import Checkpoint, MeasuredModel, gives, once
from sinklab_claims.numbers.attention import batches
from sinklab_claims.variants import Fields, has_sink, of_paper

xiao = of_paper("xiao2023", "Xiao et al. 2023 (arXiv 2309.17453)")

MARGIN = 0.05
"""Nats per token: a difference below it is none. Published failures are of 0.4 to 7 nats, agreements of 0 to 0.05."""

SAME = 0.02
"""Nats per token: a difference below it is none. Published is 0.024 for a plain model with one first token instead of four."""

LEFT = 0.05
"""Share of the failure that is left with one first token beside the window, from which one is too few. Published are 0.055 for
the plain model (perplexities of 27.87, 18.49 and 18.05) and 0.000 for the one with a learned token in front."""

HAS_SINK = 0.1
"""Mean weight on the first token from which a model has a sink. Even weights give it 0.07 over rows of 64 tokens."""

KEPT = (0, 1, 2, 4)
TOKENS, LEAST_ROWS = 8_192, 8
WINDOWS, FEW_WINDOWS = 2_048, 32
"""Tokens at which the windows are encoded anew, about; of a large model as many windows, each for :data:`TOGETHER` tokens."""

TOGETHER = 16
"""Tokens of a large model for which one window is encoded anew: the first sees 8 tokens fewer than a window holds, the last
7 more."""

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
        "training puts one in front of every row, and learned tokens in front; of a checkpoint of more than 50 million "
        "parameters for every sixteen tokens, which then see from 8 tokens fewer to 7 more.",
    ),
    Metric(
        "left_by_one",
        "fraction",
        "Share of what a window without first tokens loses against one with four that is still lost with one of them: window_1 "
        f"less window_4 over window_0 less window_4; absent where that is no more than {MARGIN} nats.",
    ),
)


@gives(*FIRST_TOKENS)
@once
@torch.no_grad()
def first_tokens(trained: MeasuredModel) -> dict[str, float]:
    """Held-out losses under windows of a quarter of the context.

    All are over the same tokens, as many as re-computation is taken at, and give :data:`FIRST_TOKENS`.
    """
    context, model = trained.context, trained.loaded.model
    size = max(KEPT[-1] + 1, context // 4)
    rows = trained.rows(max(LEAST_ROWS, TOKENS // context), context)
    targets = context - size - 1
    group, most = (TOGETHER, FEW_WINDOWS) if trained.large else (1, WINDOWS)
    every = max(1, len(rows) * targets // (group * most))
    asked = torch.arange(targets // group)[::every, None] * group + torch.arange(group)
    losses_of: dict[str, list[Tensor]] = {}
    for part in rows.split(max(1, TOKENS // context)):
        for number in KEPT:
            with limited_attention(model, size - number, range(number)):
                losses = token_losses(model, part, after=size)[:, asked.flatten()]
            losses_of.setdefault(f"window_{number}", []).append(losses.flatten())
        windows = windows_before(part, size + 1, size, group)[:, ::every].flatten(0, 1).clone()
        if trained.every_row_has_bos:
            windows[:, 0] = part[0, 0]
        after = windows.shape[1] - 1 - group
        anew = [token_losses(model, some, after=after).flatten() for some in windows.split(max(1, TOKENS // size))]
        losses_of.setdefault("re_computation", []).extend(anew)
    numbers = {name: float(torch.cat(parts).double().mean()) for name, parts in losses_of.items()}
    lost = numbers["window_0"] - numbers["window_4"]
    return numbers | ({"left_by_one": (numbers["window_1"] - numbers["window_4"]) / lost} if lost > MARGIN else {})


def windows_before(rows: Tensor, first: int, held: int, group: int = 1) -> Tensor:
    """Windows ``(rows, groups, tokens)`` whose last ``group`` tokens, from ``first`` on, are predicted from ``held`` tokens;
    those of a group of several from ``group // 2`` fewer to as many more, less one."""
    length = held + group - group // 2
    return rows[:, first - (length - group) :].unfold(1, length, group)


def window_fails(label: str, says: str) -> Part:
    """A window without first tokens loses against one with four."""
    return Part(says, Difference("window_0", label, label, "window_4"), more_than=MARGIN)


@claims.register("window_fails_sinks_restore")
@xiao
def window_fails_sinks_restore() -> Fields:
    """A softmax model that sees only a window of recent tokens loses far more than the context it is denied is worth: with four
    first tokens in the window's budget the loss is that of re-computing the window.

    Within the trained context, so that nothing fails but the eviction.
    """
    restored = Difference("window_4", BASELINE, BASELINE, "re_computation")
    return dict(
        where="Table 1 and Figure 1",
        published="Perplexity of Llama-2-13B: window of 1,024 tokens 5158, four first tokens and 1,020 recent ones 5.40, "
        "re-computation 5.43.",
        presupposes=(Part("the model has a sink", Value("first_attention", BASELINE), more_than=HAS_SINK),),
        parts=(
            window_fails(BASELINE, "without the first tokens the loss rises"),
            Part("with four it is that of re-computation", restored, less_than=MARGIN),
        ),
        costs={},
        checkpoint=OnCheckpoint(reads="context"),
        read_outs=("sinks", first_tokens),
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
            window_fails(TOKEN.label, "without the sink token a window fails"),
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
    beside a window is too few.

    The paper's reason: samples that begin anyhow have no token that could be the sink alone.
    """
    return dict(
        where="section 3.3 and Table 3",
        published="Perplexity with one and with four first tokens: plain model 18.49 and 18.05, learnable sink 18.01 and "
        "18.02.",
        costs={},
        bases=("no-bos",),
        presupposes=(window_fails(BASELINE, "the model fails without first tokens"),),
        parts=(Part("one first token is too few", Value("left_by_one", BASELINE), more_than=LEFT),),
        read_outs=(first_tokens,),
        checkpoint=OnCheckpoint(reads="context", not_about=_begins_alike),
    )


# --- a stream of lines --------------------------------------------------------------------------------------------------------

# StreamEval of Xiao et al., made anew, since its data were never released. A line is "line 417: REGISTER_CONTENT is 5802" with
# random digits; a question repeats it up to its content, with "Recall" in front. Digits are single tokens, so that distances
# are exact under any tokenizer.
BEFORE_LABEL, BEFORE_CONTENT, END = "line ", ": REGISTER_CONTENT is ", "\n"
QUESTION = "Recall line "
LABEL, CONTENT = 3, 4
LABELS = 1000
EVERY, QUESTIONS = 10, 2
"""Lines from one question to the next, and questions behind a full cache."""


class Question(NamedTuple):
    """Columns ``[start, stop)`` hold the content; its line is seen by who holds ``distance`` tokens before the last query."""

    start: int
    stop: int
    distance: int


def line_stream(
    encoder: Encoder, back: int, *, budget: int, rows: int, seed: int, bos: bool
) -> tuple[Tensor, list[Question], Tensor]:
    """Streams until two questions have come after ``budget`` tokens: ids ``(rows, length)``, questions, ids of the digits.

    Args:
        back: how many lines back the asked one is.

    Raises:
        InputError: no tokenizer, or one that does not give each digit a token of its own.
        ConfigurationError: there are not so many labels.
    """
    digits = torch.tensor([encoder.encode(str(digit))[-1:] for digit in range(10)])
    if digits.numel() != digits.unique().numel():
        raise InputError("this tokenizer does not give each digit a token of its own")
    digits, generator = digits.flatten(), random.Random(f"line_lookup {seed} {back}")
    labels = [generator.sample(range(LABELS), LABELS) for _ in range(rows)]
    parts, position = list[Tensor](), 0

    def put(columns: Tensor | list[int] | str) -> int:
        nonlocal position
        ids = torch.as_tensor(encoder.encode(columns) if isinstance(columns, str) else columns, dtype=torch.long)
        parts.append(ids.expand(rows, -1))
        position += parts[-1].shape[1]
        return position - parts[-1].shape[1]

    if bos:
        assert encoder.bos_token_id is not None
        put([encoder.bos_token_id])
    written, questions = list[tuple[int, Tensor, Tensor]](), list[Question]()
    while sum(question.start >= budget + 2 for question in questions) < QUESTIONS:
        if len(written) == LABELS:
            raise ConfigurationError(f"{LABELS} labels are used up before a line {back} back is asked behind {budget} tokens")
        number = len(written)
        label = digits[torch.tensor([[int(digit) for digit in f"{row[number]:0{LABEL}d}"] for row in labels])]
        content = digits[torch.tensor([[generator.randrange(10) for _ in range(CONTENT)] for _ in range(rows)])]
        put(BEFORE_LABEL)
        begin = put(label)
        for columns in (BEFORE_CONTENT, content, END):
            put(columns)
        written.append((begin, label, content))
        if len(written) % EVERY == 0 and len(written) > back:
            fact, label, content = written[-1 - back]
            for columns in (QUESTION, label, BEFORE_CONTENT):
                put(columns)
            start = put(content)
            questions.append(Question(start, position, position - 2 - fact))
            put(END)
    return torch.cat(parts, dim=1), questions, digits


def right_digits(reader: Reader, tokens: Tensor, questions: list[Question], digits: Tensor) -> list[Tensor]:
    """For each question the share of digits at which the right one is likelier than the nine others, float64 ``(rows,)``."""
    reader.reset()
    read, shares = 0, []
    for start, stop, _ in questions:
        logits = [reader.read(tokens[:, read:start], keep=1), reader.read(tokens[:, start : stop - 1])]
        read = stop - 1
        logarithms = torch.log_softmax(torch.cat(logits, dim=1).float(), dim=-1)
        answers = tokens[:, start:stop].to(logarithms.device)
        right = logarithms.gather(-1, answers[..., None])[..., 0]
        symbols = digits.to(logarithms.device).expand(*logarithms.shape[:2], -1)
        others = logarithms.gather(-1, symbols).masked_fill(symbols == answers[..., None], -torch.inf)
        shares.append((right > others.amax(dim=-1)).double().mean(dim=1).cpu())
    return shares


# --- lines that have left the cache -------------------------------------------------------------------------------------------

WHO = {"none": "no cache holds", "the larger": "the larger cache holds", "both": "both caches hold"}
"""By the number of caches that hold a line."""

HELD = tuple(
    Metric(f"held by {who}", "of digits", f"Share of right digits among ten where {what} the asked line.", range=FRACTION)
    for who, what in WHO.items()
)
HOLDERS = tuple(metric.name for metric in HELD)

CACHES = {"smaller cache": 92, "larger cache": 156}
"""Recent tokens besides four sinks; both within the 256 tokens of the training. For lines of 25 tokens: of shorter lines a
cache is as much smaller."""

LINE = 25

LINES = (1, 3, 4, 7, 9)
"""How many lines of 25 tokens back the asked one is: 72 tokens; 122 and 147; 222 and 272. The first is in both caches, the
next two are in the larger alone, and the last in neither. None lies where a cache would hold part of a line."""

ROWS, FEW_ROWS = 24, 4
"""Streams; of a large model fewer."""

KNOWS = 0.2
"""Share of digits from which a model counts as able to look up; chance is 0.1."""

CHANCE = 0.15
"""Share of digits below which nothing was found: chance and the smallest difference of the task, 0.05."""


def looked_up(checkpoint: Checkpoint) -> Numbers:
    """Share of the right digits among ten, by whether the asked line is held by both caches, by the larger, or by none.

    Answers from lines of which a cache holds a part are left out.
    """
    loaded = checkpoint.loaded
    line, bos = len(loaded.encoder.encode("line 417: REGISTER_CONTENT is 5802\n")), checkpoint.bos is not None
    caches = {label: round(window * line / LINE) for label, window in CACHES.items()}
    budget, rows = max(caches.values()) + 4, FEW_ROWS if checkpoint.large else ROWS
    if checkpoint.trained_on < budget:
        raise DoesNotApply(f"it was trained on {checkpoint.trained_on} tokens, and the larger cache holds {budget}")
    try:
        streams = [line_stream(loaded.encoder, back, budget=budget, rows=rows, seed=checkpoint.draw, bos=bos) for back in LINES]
    except (ConfigurationError, InputError) as error:
        raise DoesNotApply(f"its tokenizer cannot write the task: {error}") from None
    numbers: dict[str, dict[str, float]] = {}
    for label, window in caches.items():
        reader = open_reader(loaded.model, {"name": "sink_window", "num_sinks": 4, "window": window})
        values_of: dict[str, list[float]] = {holders: [] for holders in HOLDERS}
        for tokens, questions, digits in streams:
            for question, found in zip(questions, right_digits(reader, tokens, questions, digits), strict=True):
                in_part = any(size < question.distance < size + line for size in caches.values())
                if question.start > budget and not in_part:  # before, nothing has been evicted
                    held = sum(question.distance <= size for size in caches.values())
                    values_of[HOLDERS[held]].append(float(found.mean()))
        if not all(values_of.values()):
            missing = " or ".join(holders for holders, values in values_of.items() if not values)
            raise DoesNotApply(f"with lines of {line} tokens none is {missing}")
        numbers[label] = {holders: sum(values) / len(values) for holders, values in values_of.items()}
    return numbers


@claims.register("cliff_at_the_cache_size")
@xiao
def cliff_at_the_cache_size() -> Fields:
    """A cache with sinks does not lengthen the context: a line is looked up while it is in the cache, and not at all as soon as
    it has left."""
    larger, smaller = "larger cache", "smaller cache"
    return dict(
        where="Table 7 (StreamEval)",
        published="Accuracy of Llama-2-7B-32K-Instruct with caches of 2,048, 4,096, 8,192 and 16,384 tokens: 75.3, 77.2, "
        "76.4, 73.8 % for a line 1,840 tokens back; 0, 61.6, 50.1, 40.5 % at 2,300; 0, 0, 62.8, 46.9 % at 4,600; 0, 0, 0, "
        "45.7 % at 9,200.",
        presupposes=(Part("the model can look up a line that it holds", Value("held by both", larger), more_than=KNOWS),),
        parts=(
            Part("what is in the larger cache is found", Value("held by the larger", larger), more_than=KNOWS),
            Part("the smaller one does not find it", Value("held by the larger", smaller), less_than=CHANCE),
            Part("what has left the larger is not found", Value("held by none", larger), less_than=CHANCE),
        ),
        costs={},
        checkpoint=OnCheckpoint(
            measure=looked_up,
            remark="The score is the share of digits (chance 0.1) and not whole answers, of which a small model gets few.",
        ),
    )


# --- what is missed without the sink ------------------------------------------------------------------------------------------

HIDDEN, SILENT = "sink hidden", "value of the sink zeroed"

FREED = (
    Metric("cost", "nats", "Next-token loss with something done to the first key of all heads, less that without."),
    Metric(
        "freed_to_first",
        "fraction",
        "Of the weight that the first key loses, the share that the other first tokens gain: those up to the fourth; mean over "
        "all heads and the queries behind them.",
    ),
    Metric("freed_to_own", "fraction", "Likewise the share that the key of the query's own token gains."),
    Metric("freed_to_content", "fraction", "Likewise the share that all other keys gain."),
)

FIRST = 4
"""First tokens that may take the sink's place, as many as a bounded cache keeps."""

LEAST = 0.05
"""Nats per token: a cost below it is none, as in the other claims on eviction."""


class Shares(Watcher):
    """Weight on the first key, on those up to the fourth, on the query's own and on all, summed over heads and queries behind.

    Args:
        front: learned tokens in front of every row.
    """

    name = "shares"
    needs: ClassVar[frozenset[str]] = frozenset({"mass", "log_sum_exp"})

    def __init__(self, front: int) -> None:
        self.keys = tuple(range(front, front + FIRST))
        self.sums = torch.zeros(4, dtype=torch.float64)

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        behind = (call.query_positions > self.keys[-1])[:, None]
        firsts = weights_of_keys(call, keys_of_document(call, *self.keys), statistics.log_sum_exp)
        own = weights_on_own_keys(call, statistics.log_sum_exp)
        (mass,) = filled(statistics, "row_mass")
        groups = firsts[..., 0], firsts[..., 1:].sum(-1), own, mass
        self.sums += torch.stack([(group * behind).double().sum().cpu() for group in groups])


def freed(before: Tensor, after: Tensor) -> dict[str, float]:
    """Where the weight of the first key goes, of sums of :class:`Shares`."""
    first, second, own, mass = (after - before).tolist()
    return {
        "freed_to_first": second / -first,
        "freed_to_own": own / -first,
        "freed_to_content": (mass - first - second - own) / -first,
    }


@torch.no_grad()
def freed_weight(checkpoint: Checkpoint) -> Numbers:
    """The sink of the model, what two edits of its first key cost on the same texts, and where its weight goes.

    Hidden, a row hands its weight to the other keys; the first queries keep it, or the next token would become the sink. With a
    value of zero every other weight stays as it is, and what the sink says to others is gone.
    """
    model, rows = checkpoint.loaded.model, checkpoint.rows(32, 256)

    def read(*edits: Intervention) -> tuple[float, Tensor]:
        shares = Shares(checkpoint.front)
        with attend(model, (shares,), edits):
            loss = torch.cat([token_losses(model, part) for part in batches(rows)]).double().mean().item()
        return loss, shares.sums

    plain, before = read()
    place = checkpoint.front
    hidden, after = read(HideKey(place=place, spare=NEAR))
    return {
        BASELINE: read_outs["sinks"](checkpoint),
        HIDDEN: {"cost": hidden - plain, **freed(before, after)},
        SILENT: {"cost": read(ZeroValue(place=place))[0] - plain},
    }


@claims.register("mass_thrown_on_content")
@xiao
def mass_thrown_on_content() -> Fields:
    """Without its sink a model misses a place for its attention and not what is said there: hidden, the sink's weight falls on
    content and the loss rises; silenced, with its weight handed to nothing, it costs less than half of that."""
    return dict(
        where="section 3.1",
        published="No number: evicting the first tokens takes away most of the denominator of the softmax, which shifts all "
        "other weights.",
        presupposes=(has_sink(),),
        parts=(
            Part("the sink hidden, the loss rises", Value("cost", HIDDEN), more_than=LEAST),
            Part("most of its weight falls on content", Value("freed_to_content", HIDDEN), more_than=0.5),
            Part("silenced, it costs less than half", Ratio("cost", SILENT, HIDDEN), less_than=0.5),
        ),
        costs={},
        checkpoint=OnCheckpoint(measure=freed_weight, reads="context"),
    )
