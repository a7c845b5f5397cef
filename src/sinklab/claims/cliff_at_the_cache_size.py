"""Xiao et al. 2023, Table 7: what has left the cache is gone, and a line is found no further back than it reaches."""

from __future__ import annotations

from sinklab.claims._lines import line_stream, right_digits
from sinklab.claims._streaming import MODELS, model_of, opened
from sinklab.errors import ConfigurationError, DoesNotApply, InputError
from sinklab.models.loading import LoadedModel
from sinklab.registry import claims
from sinklab.results.metric import FRACTION, Metric
from sinklab.streaming.reader import open_reader
from sinklab_claims.contract.claim import Claim, OnCheckpoint, Part, Scale
from sinklab_claims.contract.effect import Numbers, Value
from sinklab_claims.contract.trained import Checkpoint

__all__ = ["METRICS", "cliff_at_the_cache_size", "of_checkpoint"]

METRICS = (
    Metric(
        "held by both", "of digits", "Share of right digits among ten where both caches hold the asked line.", range=FRACTION
    ),
    Metric(
        "held by the larger",
        "of digits",
        "Share of right digits among ten where the larger cache holds the asked line.",
        range=FRACTION,
    ),
    Metric("held by none", "of digits", "Share of right digits among ten where no cache holds the asked line.", range=FRACTION),
)

CACHES = {"smaller cache": 92, "larger cache": 156}
"""Recent tokens besides four sinks; both within the 256 tokens of the training."""

LINES = (1, 3, 4, 7, 9)
"""How many lines of 25 tokens back the asked one is: 72 tokens; 122 and 147; 222 and 272. The first is in both caches, the
next two are in the larger alone, and the last in neither. None lies where a cache would hold part of a line."""

TEXTS = 24

KNOWS = 0.2
"""Share of digits from which a model counts as able to look up; chance is 0.1."""

CHANCE = 0.15
"""Share of digits below which nothing was found: chance and the smallest difference of the task, 0.05."""


HOLDERS = ("held by none", "held by the larger", "held by both")


def measure(seed: int, scale: Scale) -> Numbers:
    """The numbers of the model of a scale."""
    return _looked_up(opened(model_of(scale, seed)), TEXTS, seed, bos=True)


def of_checkpoint(checkpoint: Checkpoint) -> Numbers:
    """The same of a checkpoint; its lines have other numbers of tokens, and answers from lines held in part are left out."""
    loaded, largest = checkpoint.loaded, max(CACHES.values()) + 4
    if checkpoint.trained_on < largest:
        raise DoesNotApply(f"it was trained on {checkpoint.trained_on} tokens, and the larger cache holds {largest}")
    line = len(loaded.encoder.encode("line 417: REGISTER_CONTENT is 5802\n"))
    try:
        return _looked_up(loaded, TEXTS, checkpoint.draw, bos=checkpoint.bos is not None, line=line)
    except (ConfigurationError, InputError) as error:
        raise DoesNotApply(f"its tokenizer cannot write the task: {error}") from None


def _looked_up(loaded: LoadedModel, rows: int, seed: int, *, bos: bool, line: int = 0) -> Numbers:
    """Share of the right digits among ten, by whether the asked line is held by both caches, by the larger, or by none.

    Args:
        line: tokens of a line; answers from lines of which a cache holds a part are left out.
    """
    budget = max(CACHES.values()) + 4
    streams = [line_stream(loaded.encoder, back, budget=budget, rows=rows, seed=seed, bos=bos) for back in LINES]
    numbers: dict[str, dict[str, float]] = {}
    for label, window in CACHES.items():
        reader = open_reader(loaded.model, {"name": "sink_window", "num_sinks": 4, "window": window})
        values_of: dict[str, list[float]] = {holders: [] for holders in HOLDERS}
        for tokens, questions, digits in streams:
            for question, found in zip(questions, right_digits(reader, tokens, questions, digits), strict=True):
                in_part = any(size < question.distance < size + line for size in CACHES.values())
                if question.start > budget and not in_part:  # before, nothing has been evicted
                    held = sum(question.distance <= size for size in CACHES.values())
                    values_of[HOLDERS[held]].append(float(found.mean()))
        if not all(values_of.values()):
            missing = " or ".join(holders for holders, values in values_of.items() if not values)
            raise DoesNotApply(f"with lines of {line} tokens none is {missing}")
        numbers[label] = {holders: sum(values) / len(values) for holders, values in values_of.items()}
    return numbers


@claims.register("cliff_at_the_cache_size")
def cliff_at_the_cache_size() -> Claim:
    """Two caches and three distances, as in the paper's table, on its own task made anew."""
    return Claim(
        statement="A cache with sinks does not lengthen the context: a line is looked up while it is in the cache, and not "
        "at all as soon as it has left.",
        source="xiao2023",
        reference="Xiao et al. 2023 (arXiv 2309.17453), Table 7 (StreamEval)",
        published="Accuracy of Llama-2-7B-32K-Instruct with caches of 2,048, 4,096, 8,192 and 16,384 tokens: 75.3, 77.2, "
        "76.4, 73.8 % for a line 1,840 tokens back; 0, 61.6, 50.1, 40.5 % at 2,300; 0, 0, 62.8, 46.9 % at 4,600; 0, 0, 0, "
        "45.7 % at 9,200.",
        presupposes=(
            Part(
                "the model can look up a line that it holds",
                Value("held by both", "larger cache"),
                more_than=KNOWS,
            ),
        ),
        parts=(
            Part(
                "what is in the larger cache is found",
                Value("held by the larger", "larger cache"),
                more_than=KNOWS,
            ),
            Part("the smaller one does not find it", Value("held by the larger", "smaller cache"), less_than=CHANCE),
            Part("what has left the larger is not found", Value("held by none", "larger cache"), less_than=CHANCE),
        ),
        measure=measure,
        natural_text=True,
        one_model=MODELS,
        checkpoint=OnCheckpoint(measure=of_checkpoint),
        costs={"tiny": "minutes", "small": "minutes"},
        evidence={
            "tiny": "one trained model, embedded:softmax, and seeds are draws of 24 texts; the score is the share of digits "
            "(chance 0.1) and not whole answers, of which a model of this size gets few",
            "small": "trainings of one recipe, and each reads 24 texts of its own; the score is the share of digits "
            "(chance 0.1) and not whole answers, of which a model of this size gets few",
        },
    )
