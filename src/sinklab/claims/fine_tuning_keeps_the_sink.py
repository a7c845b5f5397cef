"""Fine-tuning keeps the sink: a model that is trained on, at a low rate and on other text, has the sink that it had."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sinklab.attention.session import attend
from sinklab.claims._architecture import UNCHANGED, has_sink
from sinklab.probes.sink_rate import SinkRate
from sinklab.registry import claims
from sinklab.results.metric import PERCENTAGE, Metric
from sinklab.results.table import unpacked
from sinklab.training.config import PretrainingConfig
from sinklab.training.data import prepare_data
from sinklab_claims.contract.claim import BASELINE, Claim, Part, Times, Variant
from sinklab_claims.contract.effect import Difference
from sinklab_claims.contract.trained import TrainedModel
from sinklab_claims.reproduce.cells import base_called

__all__ = ["METRICS", "fine_tuning_keeps_the_sink", "on_the_first_text", "tune"]

METRICS = (
    Metric(
        "first_text_sink_rate",
        "percent",
        "Sink rate of the first token on held-out text of the first training, 64 tokens a row.",
        range=PERCENTAGE,
    ),
    Metric("first_text_loss", "nats", "Mean next-token loss on the same rows."),
)
"""Numbers of :func:`on_the_first_text`: unit and definition."""

MARGIN = 10.0
"""Points of the sink rate: the largest change that is published, of Mistral-7B, is 9.15."""


@claims.register("fine_tuning_keeps_the_sink")
def fine_tuning_keeps_the_sink() -> Claim:
    """A twentieth of the rate and a quarter of the steps; both models are measured on text of the first training.

    That the loss there has risen shows that the second training has changed something.
    """
    tuned = "fine-tuned"
    return Claim(
        statement="Fine-tuning does not change the sink much.",
        source="gu2024",
        reference="Gu et al. 2024 (arXiv 2410.10781), table 1",
        published="Base and chat: Mistral-7B 97.49 and 88.34, LLaMA2-7B 92.47 and 92.88, LLaMA2-13B 91.69 and 90.94, LLaMA3-8B "
        "99.02 and 98.85.",
        variants=(UNCHANGED, Variant(tuned, tune, after=BASELINE)),
        bases=("bos", "no-bos"),
        read_outs=(on_the_first_text,),
        presupposes=(
            has_sink(metric="first_text_sink_rate"),
            Part(
                "fine-tuning changes the model",
                Difference("first_text_loss", tuned, BASELINE),
                more_than=0.02,
            ),
        ),
        parts=(
            Part(
                "the sink rate stays",
                Difference("first_text_sink_rate", tuned, BASELINE),
                more_than=-MARGIN,
                less_than=MARGIN,
            ),
        ),
    )


def tune(config: PretrainingConfig) -> Mapping[str, object]:
    """Python source, or made-up text for a model that has been trained on Python source."""
    corpus = "bigram_backcopy" if config.data.corpus == "python_source" else "python_source"
    return {
        "data.corpus": corpus,
        "optimizer.learning_rate": Times(0.05),
        "training.steps": Times(0.25),
        "schedule.warmup_steps": Times(0.25),
    }


def on_the_first_text(trained: TrainedModel) -> Mapping[str, float]:
    """Sink rate and loss on held-out text of the scale's own configuration, after whichever training."""
    first = base_called(trained.config.name)
    rows = prepare_data(first, trained.cache).probe_rows(
        min(100, first.data.held_out_rows), min(64, first.model.max_position_embeddings)
    )
    rows, probe = rows.to(trained.loaded.device), SinkRate()
    with torch.no_grad(), attend(trained.loaded.model, (probe,)):
        loss = trained.loaded.model(input_ids=rows, labels=rows).loss
    of_first = [
        row["value"]
        for row in unpacked(probe.rows())
        if row["metric"] == "gu2024" and row.get("key_position") == 0 and "layer" not in row
    ]
    return {"first_text_sink_rate": of_first[0], "first_text_loss": loss.item()}
