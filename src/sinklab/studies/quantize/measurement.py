"""The measurement behind quantize(): loss by scheme, by site and by cure, over samples that no range was taken from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.attention.names import named_modules
from sinklab.corpora.samples import Samples
from sinklab.errors import ConfigurationError, MeasurementError, SinklabError, UnsupportedModelError
from sinklab.models.integer_linear import GROUP
from sinklab.models.loading import LoadedModel
from sinklab.models.losses import guess_warning, is_causal_lm, loss_kind
from sinklab.models.positions import length_warnings
from sinklab.models.tokenizer import kind_of
from sinklab.results.intervals import Interval, means_over_items
from sinklab.results.metric import Row
from sinklab.results.run import Progress, silent
from sinklab.results.summaries.quantize import CureEntry, QuantizeSummary, SchemeEntry, SiteEntry
from sinklab.sinks import find_sinks
from sinklab.studies.quantize.cures import Cure, cost_of, modules_whole, of_activations, spike_positions, token_bytes
from sinklab.studies.quantize.named import Names
from sinklab.studies.quantize.rows import quantize_rows
from sinklab.studies.quantize.scheme import WHOLE_BITS, Scheme
from sinklab.studies.quantize.spikes import Spike, find_spikes
from sinklab.studies.quantize.twin import Range, Treatment, Twin
from sinklab.studies.quantize.verdict import best_cure, judged, texts_needed, verdict_text

__all__ = ["examine", "require_loss"]

SUMMARY_VERSION = 1
LEVEL = 0.95
MANY = 4
"""Modules that the larger of two cures keeps whole, if there are four times as many."""

OWN = "class, the model's own answer"
"""What the loss is taken of where samples have no classes: the gap is then about answers that change, right or wrong."""

CHECKED = 2
"""Calibration samples on which integer and simulated products are compared."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be measured.

    Attributes:
        schemes: the first one is examined: its sites, its cures.
        residual: quantise the residual stream too.
        integer: multiply codes as integers.
        minimal_effect: nats up to which a gap is none.
        threshold: of find_sinks.
    """

    schemes: Sequence[Scheme]
    residual: bool = False
    integer: bool = True
    minimal_effect: float = 0.01
    threshold: float = 0.3

    def check(self, products: str) -> None:
        """Refuse what cannot be measured.

        Raises:
            ConfigurationError: see the messages.
        """
        if products not in ("integer", "simulated"):
            raise ConfigurationError(f"`products` {products!r} must be integer or simulated")
        if not 0 <= self.minimal_effect < float("inf"):
            raise ConfigurationError(f"`minimal_effect` {self.minimal_effect} must be 0 or more nats")
        if not 0 <= self.threshold < 1:
            raise ConfigurationError(f"`threshold` {self.threshold} must be at least 0 and below 1")


@dataclasses.dataclass(frozen=True, eq=False)
class Examined:
    """Summary without recipe, rows of the table, and the treatment that the recipe is to be made of."""

    summary: QuantizeSummary
    rows: list[Row]
    outside: list[str]
    transposed: bool
    ragged: str


def examine(
    loaded: LoadedModel,
    calibration: Samples,
    samples: Samples,
    request: Request,
    *,
    corpus: str,
    bos: int,
    progress: Progress = silent,
) -> Examined:
    """Everything that ``sinklab quantize`` says of a model.

    Args:
        calibration: samples that ranges of activations and positions of sinks and spikes are taken from.
        samples: others, which losses are taken of, four or more.

    Raises:
        MeasurementError: a loss that is not finite without any quantisation, or integers that are not what they should be.
        UnsupportedModelError, ConfigurationError: see :class:`Twin`.
    """
    require_loss(loaded.model)
    loss_of = str(loss_kind(loaded.model))
    if samples.targets is None and loss_of == "class":
        calibration, samples = (_with_own_answers(loaded.model, part) for part in (calibration, samples))
        loss_of = OWN
    elif samples.targets is None and loss_of != "next token":
        raise UnsupportedModelError(
            f"the loss of {type(loaded.model).__name__} is taken of a {loss_of}, and these samples have no targets; give "
            "`inputs` with them from Python"
        )
    return _Examination(loaded, calibration, samples, request, loss_of, corpus, bos, progress).run()


def require_loss(model: PreTrainedModel, *, drawn: bool = False) -> None:
    """Refuse a model that has no loss by which a gap could be measured.

    Args:
        drawn: on samples that are drawn from a corpus: recordings and pictures have no target texts.

    Raises:
        UnsupportedModelError: it has none.
    """
    if loss_kind(model) is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no loss, so there is no gap to measure; load the model with its head"
        )
    if drawn and loss_kind(model) == "target token" and kind_of(model) in ("image", "audio"):
        raise UnsupportedModelError(
            f"the loss of {type(model).__name__} is taken of a target token, and what is drawn from a corpus of pictures or "
            "sound has no target text; give `inputs` with targets from Python"
        )


class _Examination:
    def __init__(
        self,
        loaded: LoadedModel,
        calibration: Samples,
        samples: Samples,
        request: Request,
        loss_of: str,
        corpus: str,
        bos: int,
        progress: Progress,
    ) -> None:
        self.loaded, self.calibration, self.samples, self.request = loaded, calibration, samples, request
        self.loss_of, self.corpus, self.bos, self.progress = loss_of, corpus, bos, progress
        self.twin = Twin(loaded.model, residual=request.residual, integer=request.integer)
        self.names = Names(loaded, calibration, samples)

    def run(self) -> Examined:
        request, twin = self.request, self.twin
        self.progress("calibrating", 0, 3)
        ranges = twin.ranges(self.calibration)
        left = twin.keep(ranges)
        first = request.schemes[0]
        spikes = find_spikes(twin, self.calibration, ranges, first.activations)
        self.progress("calibrating", 1, 3)
        sinks, refused = self._sinks()
        self.progress("calibrating", 2, 3)
        check = self._check(ranges)
        self.progress("calibrating", 3, 3)
        self.clean = clean = self._clean_losses()
        self.clean_means = _means(clean)
        bases, losses = self._bases(ranges)
        schemes = [self._scheme(base, part) for base, part in zip(bases, losses, strict=True)]
        difference = self._difference(bases[0], losses[0]) if request.integer and check is not None else None
        sites: list[SiteEntry] = []
        cures: list[CureEntry] = []
        # A gap that is none or is lost in the noise has no carrier and needs no cure; to look for them finds noise.
        examined = schemes[0]["verdict"] == "gap"
        levels = [LEVEL, LEVEL]
        if examined:
            keys = list(twin.sites) if first.activations != WHOLE_BITS else [site.key for site in twin.linear]
            gaps = self._scan(bases[0], keys)
            levels[0] = 1 - (1 - LEVEL) / len(keys)
            intervals = means_over_items(gaps, level=levels[0])
            sites = [
                self._site(spikes[key], interval, sinks) for key, interval in zip(keys, intervals, strict=True)
            ]  # fmt: skip
            cures, levels[1] = self._cures(bases, spikes, sinks, gaps, keys, losses[0])
        best = best_cure(cures, request.minimal_effect)
        worst = max(spikes.values(), key=lambda spike: spike.ratio)
        summary: QuantizeSummary = {
            "summary_version": SUMMARY_VERSION,
            "model": self.loaded.name,
            "revision": self.loaded.revision,
            "operation": self.loaded.operation,
            "corpus": self.corpus,
            "bos": self.bos,
            "kind": self.samples.kind,
            "texts": len(self.samples),
            "calibration": len(self.calibration),
            "tokens": self.samples.positions,
            "loss_of": self.loss_of,
            "unit": "nats",
            "residual": request.residual,
            "minimal_effect": request.minimal_effect,
            "clean_loss": means_over_items(self.clean_means[None])[0].to_dict(),
            "quantized_share": twin.share,
            "float_bytes": sum(site.width * site.outputs for site in twin.linear) * 2,
            "integer_check": check,
            "loss_difference": difference,
            "schemes": schemes,
            "examined": first.name,
            "activation_bits": first.activations,
            "level_of_sites": levels[0],
            "level_of_cures": levels[1],
            "sinks": None if sinks is None else list(sinks),
            "sinks_refused": refused,
            "sites": sites,
            "largest_spike": self.names.channel(worst, twin.sites[worst.site], sinks) if worst.large else None,
            "gap_by_position": _column_means(losses[0] - clean),
            "tokens_that_rise": self.names.rising(clean, losses[0]) if examined else [],
            "cures": cures,
            "recommended": None if best is None else best["cure"],
            "recipe": None,
            "text": "",
        }
        summary["text"] = " ".join(filter(None, (verdict_text(summary), *self._warnings(left))))
        layers = {key: site.layer for key, site in twin.sites.items()}
        rows = quantize_rows(
            summary, spikes, layers, clean_loss=float(self.clean_means.mean()), scored=int(clean.isfinite().sum())
        )
        return Examined(summary, list(rows), _outside(twin), any(map_.transposed for map_ in twin.maps), _ragged(twin))

    # --- parts ----------------------------------------------------------------------------------------------------------------

    def _clean_losses(self) -> Tensor:
        """Losses of the model as it is."""
        losses = self.twin.losses(self.samples, None)
        if not bool(losses.isfinite().any(dim=1).all()) or bool(losses.isinf().any()):
            raise MeasurementError(
                f"{self.loaded.name}: the loss is not finite without any quantisation, so a gap means nothing"
            )
        return losses

    def _warnings(self, left: Sequence[str]) -> list[str]:
        """What limits the numbers, a sentence each, or an empty text; ``left`` are linear maps without a range."""
        model = self.loaded.model
        warnings = [guess_warning(model, float(self.clean_means.mean())), *length_warnings(model, self.samples, None)]
        if left:
            also = f" and {len(left) - 1} more" if len(left) > 1 else ""
            warnings.append(
                f"What ranges are taken from does not run {left[0]}{also}: such linear maps stay as they are, in all that is "
                "said here."
            )
        return warnings

    def _sinks(self) -> tuple[tuple[int, ...] | None, str | None]:
        """Positions of the sinks on the calibration samples; ``None`` with the reason where they cannot be found."""
        model = self.loaded.model
        if model.config.is_encoder_decoder:
            return None, "encoder and decoder have positions of their own, and tokens are left whole by position"
        try:
            arguments = self.calibration.on(model.device, model.dtype)
            sinks = find_sinks(
                model, arguments, threshold=self.request.threshold, names=self.calibration.names,
                together=self.calibration.together,
            )  # fmt: skip
        except SinklabError as error:
            return None, str(error).splitlines()[0]
        groups = (place for sink in sinks.sinks for place in sink.positions)
        return tuple(sorted({*sinks.positions, *groups})), None

    def _check(self, ranges: Mapping[str, Range]) -> float | None:
        """The largest difference of integer products from simulated ones over its bound, over the schemes that have any."""
        checked = []
        few = self.calibration.take(slice(0, CHECKED))
        for scheme in self.request.schemes:
            if self.request.integer and WHOLE_BITS not in (scheme.weights, scheme.activations):
                for per_token in (False, True):
                    checked.append(self.twin.check(few, Treatment(scheme=scheme, ranges=ranges, per_token=per_token)))
        return max(checked, default=None)

    def _bases(self, ranges: Mapping[str, Range]) -> tuple[list[Treatment], list[Tensor]]:
        bases = []
        for scheme in self.request.schemes:
            for per_token in (False, True) if scheme.activations != WHOLE_BITS else (False,):
                bases.append(Treatment(scheme=scheme, ranges=ranges, per_token=per_token))
        losses = []
        for number, base in enumerate(bases):
            losses.append(self.twin.losses(self.samples, base))
            self.progress("schemes", number + 1, len(bases))
        return bases, losses

    def _difference(self, base: Treatment, losses: Tensor) -> float:
        """Mean loss with integer products less that with simulated ones; codes at a tie may fall to either side, so not 0."""
        self.twin.integer = False
        try:
            return float(np.mean(_means(losses) - _means(self.twin.losses(self.samples, base))))
        finally:
            self.twin.integer = True

    def _scheme(self, base: Treatment, losses: Tensor) -> SchemeEntry:
        scheme, gaps = base.scheme, _means(losses) - self.clean_means
        gap = means_over_items(gaps[None])[0]
        verdict = judged(gap, self.request.minimal_effect)
        needed = texts_needed(gap, len(gaps), self.request.minimal_effect) if verdict == "not measurable" else None
        return {
            "scheme": scheme.name,
            "per_token": base.per_token,
            "products": self._products(scheme),
            "loss": float(_means(losses).mean()),
            "gap": gap.mean,
            "low": gap.low,
            "high": gap.high,
            "verdict": verdict,
            "texts_needed": needed,
            "weight_bytes": sum(self.twin.weight_bytes(site, scheme.weights) for site in self.twin.linear),
        }

    def _products(self, scheme: Scheme) -> str:
        """What ran."""
        if scheme.activations == WHOLE_BITS:
            return "int8 weights widened for products of floats"
        if scheme.weights == WHOLE_BITS:
            return "activations put on grids, products of floats"
        return "int8 products (torch._int_mm)" if self.request.integer else "simulated in float32"

    def _scan(self, base: Treatment, keys: Sequence[str]) -> np.ndarray:
        """Gaps with one site alone quantised, ``(sites, samples)``."""
        gaps = []
        for number, key in enumerate(keys):
            alone = dataclasses.replace(base, sites=frozenset({key}))
            gaps.append(_means(self.twin.losses(self.samples, alone)) - self.clean_means)
            self.progress("one site at a time", number + 1, len(keys))
        return np.stack(gaps)

    def _cures(
        self,
        bases: Sequence[Treatment],
        spikes: Mapping[str, Spike],
        sinks: tuple[int, ...] | None,
        gaps: np.ndarray,
        keys: Sequence[str],
        losses: Tensor,
    ) -> tuple[list[CureEntry], float]:
        base, tried = bases[0], list[Cure]()
        if base.scheme.activations != WHOLE_BITS:
            # Of two sides, a position is another token on each, and what is left whole is given by position.
            carrying = () if self.loaded.model.config.is_encoder_decoder else spike_positions(spikes)
            places = {tuple(sinks or ()), carrying} - {()}
            without = {places_: self.twin.ranges(self.calibration, places_) for places_ in places}
            tried += of_activations(base, spikes, sinks or (), carrying, without)
        counts = [count for count in (1, MANY) if count == 1 or len(keys) >= MANY * count]
        tried += [modules_whole(base, gaps, keys, count) for count in counts]
        if base.scheme.activations != WHOLE_BITS:
            tried += [modules_whole(dataclasses.replace(base, per_token=True), gaps, keys, count) for count in counts]
        level = 1 - (1 - LEVEL) / len(tried)
        entries = []
        prefix = token_bytes(self.loaded.model) if is_causal_lm(self.loaded.model) else None
        for number, cure in enumerate(tried):
            cured = _means(cure.losses(self.twin, self.samples))
            left, gain = means_over_items(np.stack([cured - self.clean_means, _means(losses) - cured]), level=level)
            cost = cost_of(self.twin, cure.treatment, _length(self.samples), prefix)
            entries.append(
                CureEntry(
                    cure=cure.name, label=cure.label, left=left.to_dict(), gain=gain.to_dict(), share_whole=cost.share,
                    activations_whole=cost.activations, extra_bytes=cost.bytes, modules=list(cure.modules),
                    positions=list(cure.treatment.positions), configurable=cure.configurable,
                )
            )  # fmt: skip
            self.progress("cures", number + 1, len(tried))
        return entries, level

    def _site(self, spike: Spike, gap: Interval, sinks: tuple[int, ...] | None) -> SiteEntry:
        channel = self.names.channel(spike, self.twin.sites[spike.site], sinks)
        return {**channel, "gap": gap.mean, "low": gap.low, "high": gap.high}


def _length(samples: Samples) -> float | None:
    """Positions of a sample on average, padding left out; ``None`` where that is not known before."""
    mask = samples.arguments.get("attention_mask")
    if mask is None or samples.tokens is None or mask.shape != samples.tokens.shape:
        return samples.positions
    return float(mask.bool().sum(1).double().mean())


def _with_own_answers(model: PreTrainedModel, samples: Samples) -> Samples:
    """The samples with the classes that the model itself gives them."""
    answers = []
    with torch.inference_mode():
        for batch in samples.batches(CHECKED):
            answers.append(model(**batch.on(model.device, model.dtype)).logits.argmax(-1).cpu())
    return dataclasses.replace(samples, targets=torch.cat(answers))


def _means(losses: Tensor) -> np.ndarray:
    """Mean loss of each sample, float64."""
    return np.nanmean(losses.double().numpy(), axis=1)


def _column_means(differences: Tensor) -> list[float | None]:
    """Mean of each position over the samples that have a loss there; ``None`` where none has."""
    taken = differences.isfinite()
    means = differences.double().where(taken, 0.0).sum(0) / taken.sum(0)
    return [float(mean) if counted else None for mean, counted in zip(means, taken.any(0), strict=True)]


def _ragged(twin: Twin) -> str:
    """A linear map whose inputs make no whole groups, and how many it has; empty where there is none."""
    return next((f"{map_.name} has {map_.in_features:,}" for map_ in twin.maps if map_.in_features % GROUP), "")


def _outside(twin: Twin) -> list[str]:
    """Linear maps that stay as they are whatever the scheme: those outside of blocks."""
    return [name for name, module in named_modules(twin.model) if isinstance(module, torch.nn.Linear)]
