"""Outliers: kurtosis and largest absolute value of what attention modules and layers of a trained model put out."""

from __future__ import annotations

from sinklab.probes.outliers import KURTOSIS, LAYER_KURTOSIS, LAYER_MAX_INF_NORM, MAX_INF_NORM, Outliers
from sinklab.read_outs._attention import first_text, look
from sinklab.registry import read_outs
from sinklab.results.table import unpacked
from sinklab_claims.contract.trained import MeasuredModel

__all__ = ["METRICS", "outliers"]

METRICS = (MAX_INF_NORM, KURTOSIS, LAYER_MAX_INF_NORM, LAYER_KURTOSIS)
"""Metrics, those of the probe for the whole model (Bondarenko et al. 2023, arXiv 2306.12929)."""


@read_outs.register("outliers")
def outliers(trained: MeasuredModel) -> dict[str, float]:
    """Numbers of :data:`METRICS` on 100 held-out rows of 64 tokens (fewer where there are not so many), as in training.

    Learned tokens that the model puts in front count like others.
    """
    probe = Outliers()
    look(trained.loaded.model, first_text(trained), (probe,))
    return {row["metric"]: row["value"] for row in unpacked(probe.rows()) if "layer" not in row}
