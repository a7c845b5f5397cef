"""The measurement behind quantize(): loss by scheme, by site and by cure, over samples that no range was taken from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.attention.maps import token_text
from sinklab.corpora.samples import Samples
from sinklab.errors import ConfigurationError, MeasurementError, SinklabError, UnsupportedModelError
from sinklab.models.loading import LoadedModel
from sinklab.models.losses import LEAST_SHARE, guess_warning, is_causal_lm, loss_kind
from sinklab.models.positions import length_warnings
from sinklab.models.tokenizer import kind_of
from sinklab.results.blocks import interval, quote
from sinklab.results.intervals import Interval, mean_over_items, means_over_items, rare_cost
from sinklab.results.metric import Row
from sinklab.results.progress import Progress, plan, say, silent
from sinklab.results.store import Store
from sinklab.results.version import __version__
from sinklab.sinks import Sinks, find_sinks
from sinklab.studies.fold.measurement import folded_copies
from sinklab.studies.quantize.cures import (
    Cure,
    Spike,
    best_cure,
    cost_of,
    find_spikes,
    helping,
    spike_positions,
    token_bytes,
    tried_cures,
)
from sinklab.studies.quantize.found import BlockFound, CureFound, Found, SchemeFound, SiteFound, WorstChannel, rows
from sinklab.studies.quantize.twin import WHOLE_BITS, Range, Scheme, Site, Treatment, Twin

LEVEL = 0.95

OWN = "class, the model's own answer"
"""What the loss is taken of where samples have no classes: the gap is then about answers that change, right or wrong."""

CALIBRATING, SCHEMES, SPIKES, BLOCKS, SITES, CURES = "calibrating", "schemes", "spikes", "blocks", "sites", "cures"
"""Stages."""

CHECKED = 2
"""Calibration samples on which integer and simulated products are compared."""

FEW = 16
"""Samples of the first look at a block or a site, which is the last where they show that it carries no tenth of the gap."""

SHARE = 0.1
"""Of the gap: what carries less is looked at no further."""

LEADING = 4
"""Of the others, so many blocks, and sites of these, are looked at on all samples: those that cost most on the few."""

Verdict = Literal["gap", "none", "not measurable"]


@dataclasses.dataclass(frozen=True)
class Request:
    """What is measured: of the first scheme also sites and cures; a gap up to ``minimal_effect`` nats is none."""

    schemes: Sequence[Scheme]
    integer: bool = True
    minimal_effect: float = 0.01
    threshold: float = 0.3

    def __post_init__(self) -> None:
        if not 0 <= self.minimal_effect < float("inf"):
            raise ConfigurationError(f"`minimal_effect` {self.minimal_effect} must be 0 or more nats")


def judged(gap: Interval, minimal_effect: float) -> Verdict:
    """``none`` if the whole interval is at most ``minimal_effect``, ``gap`` if it is above 0, otherwise ``not measurable``."""
    if gap.high <= minimal_effect:
        return "none"
    return "gap" if gap.low > 0 else "not measurable"


def require_loss(model: PreTrainedModel, *, drawn: bool = False) -> None:
    """Refuse a model that has no loss by which a gap could be measured."""
    if loss_kind(model) is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no loss, so there is no gap to measure; load the model with its head"
        )
    if drawn and loss_kind(model) == "target token" and kind_of(model) in ("image", "audio"):
        raise UnsupportedModelError(
            f"the loss of {type(model).__name__} is taken of a target token, and what is drawn from a corpus of pictures or "
            "sound has no target text; give `inputs` with targets from Python"
        )


def examine(
    loaded: LoadedModel,
    calibration: Samples,
    samples: Samples,
    request: Request,
    *,
    corpus: str,
    bos: int,
    progress: Progress = silent,
    store: Store | None = None,
    identity: Mapping[str, object] | None = None,
) -> tuple[Found, list[Row]]:
    """Everything that ``sinklab quantize`` says of a model, and the rows of its table.

    Ranges and the positions of sinks and spikes are taken from ``calibration``, losses of the other ``samples``. The store
    keeps
    losses of every scheme, block, site and cure by the ``identity`` of what they depend on.
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
    about = {**(identity or {}), "treatment": [request.integer, request.threshold]}
    kept = functools.partial(_kept, store or Store(None), about)
    return _Examination(loaded, calibration, samples, request, progress, kept).run(loss_of, corpus, bos)


def _kept(store: Store, identity: Mapping[str, object], name: str, compute: Callable[[], Tensor]) -> Tensor:
    """Losses of an earlier run, or computed now and put into the store."""
    settings = {**identity, "of": name}
    if (stored := store.get("losses", settings, __version__)) is not None:
        return torch.from_numpy(stored.arrays["losses"])
    losses = compute()
    store.put("losses", settings, __version__, arrays={"losses": losses.numpy()})
    return losses


@dataclasses.dataclass(eq=False)
class _Examination:
    loaded: LoadedModel
    calibration: Samples
    samples: Samples
    request: Request
    progress: Progress
    kept: Callable[[str, Callable[[], Tensor]], Tensor]

    def __post_init__(self) -> None:
        self.sinks: Sinks | None = None
        self.known: dict[str, Tensor] = {}
        self.limits: list[str] = []
        self.twin = Twin(self.loaded.model, integer=self.request.integer)
        self.variants = [
            (scheme, per_token)
            for scheme in self.request.schemes
            for per_token in ((False, True) if scheme.by_token else (False,))
        ]

    def run(self, loss_of: str, corpus: str, bos: int) -> tuple[Found, list[Row]]:
        request, twin, loaded = self.request, self.twin, self.loaded
        first = request.schemes[0]
        # What each stage costs beside the others: of the later ones, where there is a gap.
        blocks_in_passes = 0.2 * len({site.block for site in twin.sites.values()})
        plan(
            self.progress,
            {CALIBRATING: 0.5, SCHEMES: 2 + len(request.schemes), SPIKES: 1, BLOCKS: blocks_in_passes, SITES: 5, CURES: 5},
        )
        self.progress(CALIBRATING, 0, 2)
        ranges = twin.ranges(self.calibration)
        left = twin.keep(ranges)
        self.progress(CALIBRATING, 1, 2)
        check = self._check(ranges)
        self.progress(CALIBRATING, 2, 2)
        clean = self._losses("unquantised", None, functools.partial(self._progressed, 0))
        if not bool(clean.isfinite().any(dim=1).all()) or bool(clean.isinf().any()):
            raise MeasurementError(f"{loaded.name}: the loss is not finite without any quantisation, so a gap means nothing")
        self.clean_means = _means(clean)
        bases, losses, schemes = self._schemes(ranges)
        self.progress(SPIKES, 0, 2)
        spikes = find_spikes(twin, self.calibration, ranges, first.activations)
        self.progress(SPIKES, 1, 2)
        sinks, refused = self._sinks()
        self.progress(SPIKES, 2, 2)
        channels = {key: self._channel(spike, twin.sites[key], sinks) for key, spike in spikes.items()}
        blocks: list[BlockFound] = []
        sites: list[SiteFound] = []
        cures: list[CureFound] = []
        # A gap that is none or is lost in the noise has no carrier and needs no cure; to look for them finds noise.
        examined = schemes[0].verdict == "gap"
        levels = [LEVEL, LEVEL]
        if examined:
            levels[0], blocks, sites = self._carriers(bases[0], schemes[0].gap, channels)
            if first.activations != WHOLE_BITS:
                cures, levels[1] = self._cures(bases[0], spikes, sinks, losses[0])
        best = best_cure(cures, request.minimal_effect)
        worst = max(spikes.values(), key=lambda spike: spike.ratio)
        found = Found(
            model=loaded.name, revision=loaded.revision, operation=loaded.operation, corpus=corpus, bos=bos,
            kind=self.samples.kind, texts=len(self.samples), calibration=len(self.calibration), tokens=self.samples.positions,
            loss_of=loss_of, minimal_effect=request.minimal_effect, clean_loss=means_over_items(self.clean_means[None])[0],
            quantized_share=twin.share, float_bytes=sum(site.width * site.outputs for site in twin.sites.values()) * 2,
            integer_check=check, schemes=schemes, examined=first.name, activation_bits=first.activations,
            level_of_sites=levels[0], level_of_cures=levels[1], sinks=None if sinks is None else list(sinks),
            sinks_refused=refused, blocks=blocks, sites=sites,
            largest_spike=channels[worst.site] if worst.large else None,
            cures=cures, recommended=None if best is None else best.cure, text=self._text(schemes[0], sites, cures, best),
            warnings=self._warnings(schemes[0], left),
        )  # fmt: skip
        return found, list(rows(found, channels, int(clean.isfinite().sum())))

    # --- parts ----------------------------------------------------------------------------------------------------------------

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
        self.sinks = sinks
        groups = (place for sink in sinks.sinks for place in sink.positions)
        return tuple(sorted({*sinks.positions, *groups})), None

    def _check(self, ranges: Mapping[str, Range]) -> float | None:
        """The largest difference of integer products from simulated ones over its bound, over the schemes that have any."""
        few = self.calibration.take(slice(0, CHECKED))
        checked = [
            self.twin.check(few, Treatment(scheme=scheme, ranges=ranges, per_token=per_token))
            for scheme in self.request.schemes
            if self.request.integer and scheme.of_integers
            for per_token in (False, True)
        ]
        return max(checked, default=None)

    def _schemes(self, ranges: Mapping[str, Range]) -> tuple[list[Treatment], list[Tensor], list[SchemeFound]]:
        """Treatments, losses and what is found of each scheme, which is said as soon as it is there."""
        bases = [Treatment(scheme=scheme, ranges=ranges, per_token=per_token) for scheme, per_token in self.variants]
        losses, found = list[Tensor](), list[SchemeFound]()
        for number, base in enumerate(bases, 1):
            name = f"{base.scheme.name}{' by token' if base.per_token else ''}"
            losses.append(self._losses(name, base, functools.partial(self._progressed, number)))
            found.append(self._scheme(base, losses[-1]))
            if self.progress is not silent:
                one = found[-1]
                gap = interval(Interval(one.gap, one.low, one.high), places=3)
                say(f"{one.name}: {gap} nats over {self.clean_means.mean():.3f}, {one.verdict}")
        return bases, losses, found

    def _losses(self, name: str, treatment: Treatment | None, progress: Callable[[int], None] = lambda done: None) -> Tensor:
        """Losses of all samples under a treatment of this name, measured once."""
        if name not in self.known:
            self.known[name] = self.kept(name, lambda: self.twin.losses(self.samples, treatment, progress))
        return self.known[name]

    def _progressed(self, number: int, done: int) -> None:
        """So many samples are done of one more than ``number`` passes for the schemes."""
        count = len(self.samples)
        self.progress(SCHEMES, number * count + done, (1 + len(self.variants)) * count)

    def _scheme(self, base: Treatment, losses: Tensor) -> SchemeFound:
        scheme, gaps = base.scheme, _means(losses) - self.clean_means
        gap = means_over_items(gaps[None])[0]
        verdict = judged(gap, self.request.minimal_effect)
        if scheme.formats != (None, None):
            products = "numbers of the formats multiplied in float32"
        elif scheme.activations == WHOLE_BITS:
            products = "int8 weights widened for products of floats"
        elif scheme.weights == WHOLE_BITS:
            products = "activations put on grids, products of floats"
        else:
            products = "int8 products (torch._int_mm)" if self.request.integer else "simulated in float32"
        return SchemeFound(
            scheme=scheme.name, per_token=base.per_token, products=products, loss=float(_means(losses).mean()),
            gap=gap.mean, low=gap.low, high=gap.high, verdict=verdict,
            weight_bytes=sum(self.twin.weight_bytes(site, scheme) for site in self.twin.sites.values()),
        )  # fmt: skip

    def _carriers(
        self, base: Treatment, gap: float, channels: Mapping[str, WorstChannel]
    ) -> tuple[float, list[BlockFound], list[SiteFound]]:
        """The level of the intervals, every block alone on grids, and of those that carry something every site alone."""
        of_block: dict[str, list[str]] = {}
        for key, site in self.twin.sites.items():
            of_block.setdefault(site.block, []).append(key)
        level = 1 - (1 - LEVEL) / (2 * (len(of_block) + len(self.twin.sites)))  # each is looked at twice at most
        least = max(self.request.minimal_effect, SHARE * gap)
        blocks = [
            BlockFound(block=name, layer=self.twin.sites[of_block[name][0]].layer, **found)
            for name, found in self._alone(base, of_block, level, least, BLOCKS).items()
        ]
        carrying = [one for one in blocks if one.low > 0 and one.high > least]
        leading = sorted(carrying, key=lambda one: -one.gap)[:LEADING]
        if len(carrying) > LEADING:
            self.limits.append(
                f"Sites are those of {LEADING} blocks that cost most; {len(carrying)} may carry a tenth of the gap."
            )
        if self.twin.by_few_words:
            self.limits.append(f"Of one block or site alone, words below {LEAST_SHARE:g} everywhere keep their share together.")
        keys = [key for one in carrying if one in leading for key in of_block[one.block]]
        alone = self._alone(base, {key: [key] for key in keys}, level, least, SITES)
        return level, blocks, [SiteFound(**dataclasses.asdict(channels[key]), **found) for key, found in alone.items()]

    def _alone(
        self, base: Treatment, groups: Mapping[str, Collection[str]], level: float, least: float, stage: str
    ) -> dict[str, dict[str, Any]]:
        """Gap with each group of sites alone on grids; on all samples of those with most that may be ``least`` on the first."""
        if not groups:
            return {}
        treatments = {name: dataclasses.replace(base, sites=frozenset(sites)) for name, sites in groups.items()}
        gaps: dict[str, np.ndarray] = {name: np.zeros(0) for name in groups}
        open_groups, count = list(groups), len(self.samples)
        for taken in (slice(0, FEW), slice(FEW, count)):
            samples, clean = self.samples.take(taken), self.clean_means[taken]
            if not len(clean) or not open_groups:
                continue
            shown = stage if taken.start == 0 else f"{stage} that may matter"
            chosen = [treatments[name] for name in open_groups]
            names = [f"{name} alone under {base.scheme.name}, from sample {taken.start}" for name in open_groups]

            def keep(batch: int, number: int, compute: Callable[[], Tensor], names: Sequence[str] = names) -> Tensor:
                few = " by few words" if self.twin.by_few_words else ""
                return self.kept(f"{names[number]}, batch {batch}{few}", compute)

            losses = self.twin.losses_of(samples, chosen, functools.partial(self.progress, shown), keep)
            for name, part in zip(open_groups, losses, strict=True):
                gaps[name] = np.concatenate([gaps[name], _means(part) - clean])
            intervals = {name: mean_over_items(gaps[name], level=level) for name in open_groups}
            open_groups = [name for name in open_groups if intervals[name].high > least]
            open_groups = sorted(open_groups, key=lambda name: -intervals[name].mean)[:LEADING]
        return {
            name: {"gap": found.mean, "low": found.low, "high": found.high, "texts": len(gaps[name])}
            for name, found in ((name, mean_over_items(values, level=level)) for name, values in gaps.items())
        }

    def _cures(
        self, base: Treatment, spikes: Mapping[str, Spike], sinks: tuple[int, ...] | None, losses: Tensor
    ) -> tuple[list[CureFound], float]:
        # Of two sides, a position is another token on each, and what is left whole is given by position.
        carrying = () if self.loaded.model.config.is_encoder_decoder else spike_positions(spikes)
        places = {tuple(sinks or ()), carrying} - {()}
        without = {places_: self.twin.ranges(self.calibration, places_) for places_ in places}
        tried = tried_cures(base, spikes, sinks or (), carrying, without)
        found = []
        prefix = token_bytes(self.loaded.model) if is_causal_lm(self.loaded.model) else None
        self.progress(CURES, 0, len(tried))
        folded = list(self._folded(base))
        level = 1 - (1 - LEVEL) / len(tried + folded)
        for number, (cure, cured) in enumerate([*((cure, None) for cure in tried), *folded]):
            if cured is None:  # scales by token were measured among the schemes
                name = f"{base.scheme.name} by token" if cure.treatment.per_token else f"{cure.name} under {base.scheme.name}"
                cured = _means(self._losses(name, cure.treatment))
            left, gain = means_over_items(np.stack([cured - self.clean_means, _means(losses) - cured]), level=level)
            share, activations, held = cost_of(self.twin, cure.treatment, _length(self.samples), prefix)
            found.append(
                CureFound(
                    cure=cure.name, label=cure.label, left=left, gain=gain, share_whole=share, activations_whole=activations,
                    extra_bytes=held, positions=list(cure.treatment.positions),
                )
            )  # fmt: skip
            self.progress(CURES, number + 1, len(tried) + len(folded))
        return found, level

    def _folded(self, base: Treatment) -> Iterator[tuple[Cure, np.ndarray]]:
        """Another cure: the scheme on the model with its sinks folded, which has ranges of its own, with its mean losses."""
        if self.sinks is None or base.scheme.activations == WHOLE_BITS:
            return
        tried = "the sinks folded"
        try:
            for name, label, model in folded_copies(self.loaded.model, self.calibration, self.sinks, self.loaded.operation):
                twin = Twin(model, integer=self.request.integer)
                ranges = twin.ranges(self.calibration)
                twin.keep(ranges)
                yield Cure(name, label, base), _means(twin.losses(self.samples, dataclasses.replace(base, ranges=ranges)))
                tried = "the neurons that write them silent"
        except SinklabError as error:
            say(f"not tried as a cure: {tried}, since {str(error).splitlines()[0]}")

    # --- in words -------------------------------------------------------------------------------------------------------------

    def _channel(self, spike: Spike, site: Site, sinks: tuple[int, ...] | None) -> WorstChannel:
        """The channel of a site with the widest range; ``sinks`` are positions, ``None`` where they could not be found."""
        at_sink = None if sinks is None else bool(spike.positions) and set(spike.positions) <= set(sinks)
        return WorstChannel(
            site=spike.site, layer=site.layer, channel=spike.channel, range_ratio=spike.ratio, spike=spike.large,
            everywhere=spike.everywhere, positions=list(spike.positions), tokens=list(map(self._position, spike.positions)),
            at_sink=at_sink,
        )  # fmt: skip

    def _position(self, position: int) -> str:
        """A position in words, with its token where all texts have the same there."""
        names = self.calibration.names or ()
        if position < len(names) and (name := names[position]):
            return name
        tokens = self.calibration.tokens
        if tokens is None or position >= tokens.shape[1]:
            return f"position {position}"
        own = tokens[:, position]
        text = f" {quote(token_text(self.loaded.tokenizer, int(own[0])))}" if bool((own == own[0]).all()) else ""
        return f"position {position}{text}"

    def _text(self, scheme: SchemeFound, sites: list[SiteFound], cures: list[CureFound], best: CureFound | None) -> str:
        """What was found, in a sentence."""
        name = scheme.name
        if scheme.verdict == "none":
            return f"{name} costs no more than {self.request.minimal_effect:g} nats: no cure is needed."
        if scheme.verdict == "not measurable":
            return f"What {name} costs is not measurable on {len(self.samples)} samples."
        carrier = max((site for site in sites if site.low > 0), key=lambda site: site.gap, default=None)
        by = "" if carrier is None else f", {carrier.gap:.3f} of it at {carrier.site}"
        if best is None:
            cured = "no cure that was tried helps" if cures else "there is no cure of weights"
        elif best.left.high <= self.request.minimal_effect:
            cured = f"{best.label} cures it"
        elif all(cure.left.low > 0 for cure in helping(cures)):
            cured = f"no cure takes all of it away; best: {best.label}"
        else:  # one may leave nothing, which these texts do not show
            cured = f"no cure is shown to; nearest: {best.label}"
        return f"{name} costs {scheme.gap:.3f} nats{by}; {cured}."

    def _warnings(self, scheme: SchemeFound, left: Sequence[str]) -> list[str]:
        """What limits the numbers, a sentence each; ``left`` are linear maps without a range."""
        model, count = self.loaded.model, len(self.samples)
        noun = {"pairs": "pair", "image": "picture", "audio": "recording"}.get(self.samples.kind, "text")
        warnings = [guess_warning(model, float(self.clean_means.mean())), *length_warnings(model, self.samples, None)]
        warnings += self.limits
        if scheme.verdict == "none":
            warnings.append(rare_cost(count, noun))
            if scheme.high < 0:
                warnings.append("A loss that falls is a change, too: these samples do not show what rounding may harm.")
        if left:
            also = f" and {len(left) - 1} more" if len(left) > 1 else ""
            warnings.append(
                f"What ranges are taken from does not run {left[0]}{also}: such linear maps stay as they are, in all that is "
                "said here."
            )
        return list(filter(None, warnings))


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
