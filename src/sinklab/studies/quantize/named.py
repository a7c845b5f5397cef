"""Positions, channels and predicted tokens of a quantised model in words, as entries of the summary."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from sinklab.attention.token_text import token_text
from sinklab.corpora.samples import Samples
from sinklab.models.loading import LoadedModel
from sinklab.results.naming import quote
from sinklab.results.summaries.quantize import TokenRise, WorstChannel
from sinklab.studies.quantize.spikes import Spike
from sinklab.studies.quantize.twin import Site

__all__ = ["Names"]

RISING = 8
"""Tokens that are listed."""


@dataclasses.dataclass(frozen=True, eq=False)
class Names:
    """What the samples call their positions and tokens.

    Attributes:
        calibration: samples that spikes were found on.
        samples: samples that losses are taken of.
    """

    loaded: LoadedModel
    calibration: Samples
    samples: Samples

    def channel(self, spike: Spike, site: Site, sinks: tuple[int, ...] | None) -> WorstChannel:
        """The channel of a site with the widest range.

        Args:
            sinks: positions of the sinks; ``None`` where they could not be found.
        """
        return {
            "site": spike.site,
            "kind": site.kind,
            "layer": site.layer,
            "channel": spike.channel,
            "range_ratio": spike.ratio,
            "spike": spike.large,
            "everywhere": spike.everywhere,
            "positions": list(spike.positions),
            "tokens": [self._position(position) for position in spike.positions],
            "at_sink": None if sinks is None else bool(spike.positions) and set(spike.positions) <= set(sinks),
        }

    def rising(self, clean: Tensor, losses: Tensor) -> list[TokenRise]:
        """The predicted tokens whose loss rises most.

        Args:
            clean, losses: of the model as it is, and on grids; in nats, float32 ``(samples, positions)``, NaN where none is
                taken.
        """
        rises = (losses - clean).nan_to_num(nan=-float("inf"))
        width = rises.shape[1]
        listed: list[TokenRise] = []
        for flat in rises.flatten().topk(min(RISING, int(rises.isfinite().sum()))).indices.tolist():
            text, position = divmod(flat, width)
            before, after = (float(part[text, position]) for part in (clean, losses))
            listed.append(
                TokenRise(text=text, position=position, token=self._predicted(text, position), before=before, after=after)
            )
        return listed

    def _position(self, position: int) -> str:
        """A position in words, with its token where all texts have the same there."""
        if self.calibration.names is not None and position < len(self.calibration.names):
            return self.calibration.names[position]
        tokens = self.calibration.tokens
        if tokens is None or position >= tokens.shape[1]:
            return f"position {position}"
        own = tokens[:, position]
        text = f" {quote(self._decoded(int(own[0])))}" if bool((own == own[0]).all()) else ""
        return f"position {position}{text}"

    def _predicted(self, text: int, position: int) -> str:
        targets, tokens = self.samples.targets, self.samples.tokens
        if targets is None:
            return "" if tokens is None else self._decoded(int(tokens[text, position + 1]))
        if targets.ndim == 1:
            return f"class {int(targets[text])}"
        return self._decoded(int(targets[text, position]))

    def _decoded(self, token: int) -> str:
        return token_text(self.loaded.tokenizer, token)
