"""The no-op certificate of 16 heads, 64 queries and 64 keys: CPU time, the gap that is left, and a stock solver."""

from __future__ import annotations

import numpy as np
import torch
from _timing import Bar, best_times, exit_with
from scipy.optimize import minimize
from torch import Tensor

from sinklab.studies.theory.hull_certificate import Certificate, certify_hulls

HEADS, LENGTH, HEAD_DIM = 16, 64, 64
TOLERANCE = 1e-4
PEER_QUERIES = range(7, LENGTH, 8)


@torch.no_grad()
def measure() -> list[Bar]:
    bars = []
    visible = torch.ones(HEADS, LENGTH, LENGTH, dtype=torch.bool).tril()
    asked = torch.ones(HEADS, LENGTH, dtype=torch.bool)
    asked[:, 0] = False  # it sees the sink alone
    for name, vectors in kinds().items():
        gram = vectors @ vectors.mT
        whole = certify_hulls(gram, visible, 0, tolerance=TOLERANCE, asked=asked)
        between = (whole.with_upper + whole.without_upper).div(2).where(asked, 0.0)
        times = best_times(
            {
                "bounds": lambda g=gram: certify_hulls(g, visible, 0, tolerance=TOLERANCE, asked=asked),
                "needed": lambda g=gram, d=between: certify_hulls(g, visible, 0, delta=d, tolerance=TOLERANCE, asked=asked),
                "peer": lambda v=vectors: [slsqp(v[0, 1 : query + 1].numpy()) for query in PEER_QUERIES],
            },
            3,
        )
        # Queries 7, 15, … 63 stand for all of all heads; each has a hull with the sink and one without.
        peer = times["peer"] / len(PEER_QUERIES) * 2 * HEADS * (LENGTH - 1)
        bars += [
            Bar("certificate", f"CPU time, 16 heads × 64 queries × 64 keys ({name})", times["bounds"], "<=", 5.0, "s"),
            Bar("certificate", f"the same with the needed weight ({name})", times["needed"], "<=", 10.0, "s"),
            Bar("certificate", f"largest gap ÷ largest value norm ({name})", gap(whole), "<=", TOLERANCE, ""),
            Bar("certificate", f"SLSQP, hull by hull ÷ ours ({name})", peer / times["bounds"], ">=", 20.0),
        ]
    return bars


def kinds() -> dict[str, Tensor]:
    """Projected values in three geometries: no structure; content on one side and a small sink; nearly in eight dimensions."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(HEADS, *shape, generator=generator, dtype=torch.float64)

    one_sided = normal(LENGTH, HEAD_DIM) + 0.5
    one_sided[:, 0] *= 0.02
    flat = normal(LENGTH, 8) @ normal(8, HEAD_DIM) + 0.01 * normal(LENGTH, HEAD_DIM)
    return {"normal": normal(LENGTH, HEAD_DIM), "small sink": one_sided, "low rank": flat}


def gap(certificate: Certificate) -> float:
    """The largest difference of an upper and a lower bound, over the largest norm of a visible value."""
    counted, scale = certificate.counted, certificate.scale
    pairs = ((certificate.with_upper, certificate.with_lower), (certificate.without_upper, certificate.without_lower))
    return max(float(((upper - lower) / scale)[counted].max()) for upper, lower in pairs)


def slsqp(vectors: np.ndarray) -> float:
    """Distance from 0 to the hull of the vectors."""
    gram = vectors @ vectors.T
    count = len(gram)
    done = minimize(
        lambda weights: weights @ gram @ weights,
        np.full(count, 1 / count),
        jac=lambda weights: 2 * gram @ weights,
        bounds=[(0, 1)] * count,
        constraints=[{"type": "eq", "fun": lambda weights: weights.sum() - 1, "jac": lambda weights: np.ones(count)}],
        method="SLSQP",
        options={"ftol": 1e-8, "maxiter": 500},
    )
    return float(max(done.fun, 0.0)) ** 0.5


if __name__ == "__main__":
    exit_with(measure)
