"""Sink rates under each published definition, by name: at least four incompatible numbers go by the same word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, Statistics
from sinklab.attention.chosen_keys import keys_of_document, weights_of_keys
from sinklab.attention.operation import SHARE_OF_ROW, is_largest, row_share
from sinklab.attention.positions import by_position
from sinklab.attention.probe import Means, Probe, by_head, filled
from sinklab.errors import SessionError
from sinklab.registry import probes
from sinklab.results.intervals import TIE, just_above, require_threshold
from sinklab.results.metric import Metric, Row

_GU = "Gu et al. 2024 (arXiv 2410.10781)"


GU2024 = Metric(
    "gu2024",
    "percent",
    "alpha_k = sum over queries of the weight on key k / number of queries that see k, per document, layer and head; percent "
    f"of (document, layer, head) with alpha_k > threshold (strictly); {SHARE_OF_ROW}.",
    paper=_GU,
    range=(0.0, 100.0),
)
GU2024_NULL = Metric(
    "gu2024_null",
    "percent",
    "The same rule for the mean mass that a head gives to its null score (a learned sink logit, a key bias), over all "
    "queries of the document.",
    paper=_GU,
    range=(0.0, 100.0),
)
QIU2025_FIRST_ATTENTION = Metric(
    "qiu2025_first_attention",
    "fraction",
    "Mean over queries (and heads, layers) of the weight on the first token; queries that cannot see it count as 0; "
    f"{SHARE_OF_ROW}.",
    paper="Qiu et al. 2025 (arXiv 2505.06708)",
    range=(0.0, 1.0),
)
KAUL2024_FIRST_ARGMAX = Metric(
    "kaul2024_first_argmax",
    "percent",
    f"Percent of (query, head) pairs whose largest weight is on the first token; a tie within {TIE} counts for it.",
    paper="Kaul et al. 2024 (arXiv 2410.17174)",
    range=(0.0, 100.0),
)
FIRST_TOKEN_SHARE = Metric(
    "first_token_share", "fraction", "All weight on the first token divided by all weight on real keys.", range=(0.0, 1.0)
)
FIRST_FOUR_SHARE = Metric(
    "first_four_share",
    "weight",
    "Mean weight on the first four tokens together, over queries at position 4 and later.",
    paper="Xiao et al. 2023 (arXiv 2309.17453)",
)


@probes.register("sink_rate")
class SinkRate(Probe):
    """How often, and how much, heads put their attention on one position.

    ``gu2024`` is the metric of Gu et al., of causal attention to the letter: in each document, layer and head the mean
    weight ``alpha_k`` of key ``k`` over the queries that see it is compared with the threshold; the share of the
    comparisons that hold is the rate. A mean that equals the threshold but for rounding is not above it. Under a window
    the queries that see a key are fewer than all later ones. The rate is given for every position, so a sink at position 2
    is not missed; with operations that do not normalise, rows are divided by their sum first (their
    proxy). A null score (sink logit, key bias) is a position of its own, ``gu2024_null``.

    Every rate has rows for each layer and head and, without layer and head, for the whole model. Texts are whole, each read in
    one forward: what was generated is measured by reading it once more.

    Args:
        threshold: the epsilon of Gu et al., in [0, 1); their default 0.3.

    Raises:
        ConfigurationError: a threshold outside [0, 1).
        SessionError: a call with cached keys, in which a document goes on.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"columns", "mass", "log_sum_exp", "maximum"})
    metrics: ClassVar[tuple[Metric, ...]] = (
        GU2024, GU2024_NULL, QIU2025_FIRST_ATTENTION, KAUL2024_FIRST_ARGMAX, FIRST_TOKEN_SHARE, FIRST_FOUR_SHARE,
    )  # fmt: skip

    def __init__(self, threshold: float = 0.3) -> None:
        require_threshold(threshold)
        self.threshold = threshold
        self._by_position = Means("head", "key_position")
        self._by_head = Means("head")

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        share, count, mass, largest = filled(statistics, "column_share", "column_count", "row_mass", "row_max")
        if call.cached_keys:
            raise SessionError(
                f"{call.site.module}: sink rates are of whole texts; run the model without a cache, after generate() on all "
                "that it has returned"
            )
        self._judge(call, share, count, statistics.null_mass)
        counted = call.counted[:, None]
        weights = weights_of_keys(call, keys_of_document(call, 0, 1, 2, 3), statistics.log_sum_exp)
        first = weights[..., 0]
        largest_here = is_largest(first, largest)
        shared = row_share(first, mass, call.operation)
        # All at once: each of these sums costs less than the calls that it takes.
        values = torch.stack((shared, 100.0 * largest_here, first, mass.to(first.dtype)), dim=1).flatten(1, 2)
        sums, queries = (part.unflatten(0, (4, -1)) for part in by_head(values, counted))
        late = (call.query_positions >= 4)[:, None]
        self._by_head.add(QIU2025_FIRST_ATTENTION, call.site, sums[0], queries[0])
        self._by_head.add(KAUL2024_FIRST_ARGMAX, call.site, sums[1], queries[1])
        self._by_head.add(FIRST_TOKEN_SHARE, call.site, sums[2], queries[2], sums[3])
        self._by_head.add(FIRST_FOUR_SHARE, call.site, *by_head(weights.sum(-1), late))

    def _judge(self, call: AttentionCall, share: Tensor, count: Tensor, null_mass: Tensor | None) -> None:
        """Compare the mean share of every key, and of the null score, with the threshold, and count."""
        above, seen = just_above(self.threshold), (count > 0).expand_as(share)
        hits = 100.0 * (share.cpu().double() / count.clamp_min(1.0).cpu().double() > above)
        positions = call.key_positions
        self._by_position.add(GU2024, call.site, by_position(hits, positions), by_position(seen.float(), positions))
        if call.sink_scores is not None and null_mass is not None:
            documents = call.query_documents.cpu()
            for document in range(int(documents.max()) + 1):
                inside = (documents == document)[:, None].double()
                queries = inside.sum(-1)
                means = (null_mass.cpu().double() * inside).sum(-1) / queries.clamp_min(1.0)
                hits = 100.0 * (means > above)
                self._by_head.add(GU2024_NULL, call.site, hits.sum(0), (queries > 0).double().sum(0).expand(hits.shape[1]))

    def rows(self) -> Iterator[Row]:
        for means in (self._by_position, self._by_head):
            yield from means.pooled()
        for means in (self._by_position, self._by_head):
            yield from means.rows()
