"""The twin: a copy of a model whose linear maps can be put on grids, one by one or all together."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from sinklab.attention.anatomy import Anatomy
from sinklab.attention.modules import linear_map, named_modules, of_peft, plain_module, submodule
from sinklab.corpora.samples import Samples
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.models.float_grids import FORMATS, FloatInputs, FloatWeights
from sinklab.models.integer_linear import Grid, LinearSetting, QuantizedLinear, WeightCodes, affine_grid, weight_codes
from sinklab.models.losses import FewWords, LogitMap, without_logits
from sinklab.studies.arguments import SCHEMES
from sinklab.studies.measure.probing import (
    TOKENS_PER_BATCH,
    UNKNOWN_POSITIONS,
    forward_arguments,
    sample_losses,
    scored_pairs,
    tokens_at_once,
)

WHOLE_BITS = 16
"""In a scheme: left as floating-point numbers, which deployed models hold in 16 bits."""

LOGITS = 2**26
"""Numbers that the logits of a batch have at most, 256 MiB."""

Keep = Callable[[int, int, Callable[[], Tensor]], Tensor]
"""Gives the losses of a batch under a treatment, by the numbers of both, and may call what computes them."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Bits of weights and of activations, 2 to 8, or 16 for numbers that stay as they are; and their floating-point formats,
    keys of :data:`~sinklab.models.float_grids.FORMATS`, where they are no integers."""

    weights: int
    activations: int
    formats: tuple[str | None, str | None] = (None, None)

    @property
    def name(self) -> str:
        """As it is typed."""
        weights, activations = self.formats
        if weights is not None and weights == activations:
            return weights
        return f"w{weights or self.weights}a{activations or self.activations}"

    @property
    def of_integers(self) -> bool:
        """Whether codes of both are integers."""
        return WHOLE_BITS not in (self.weights, self.activations) and self.formats == (None, None)

    @property
    def by_token(self) -> bool:
        """Whether a scale for each token is another way to put activations on grids: there are no blocks of a token."""
        kind = self.formats[1]
        return self.activations != WHOLE_BITS and (kind is None or FORMATS[kind].block is None)


def parse_schemes(names: Sequence[str]) -> list[Scheme]:
    """The schemes, each once, in their order."""
    schemes: dict[str, Scheme] = {}
    for name in names:
        SCHEMES.require("schemes", name)
        text = name.strip().lower()
        match = re.fullmatch(r"w(\w+?)a(\w+)", f"w{text}a{text}" if text in FORMATS else text)
        assert match is not None
        scheme = _scheme(match[1], match[2])
        if scheme.weights == scheme.activations == WHOLE_BITS:
            raise ConfigurationError(f"`schemes` {name!r} quantises nothing; give weights or activations fewer bits")
        schemes[scheme.name] = scheme
    if not schemes:
        raise ConfigurationError("`schemes` is empty; name at least one, such as w8a8")
    return list(schemes.values())


def _scheme(*parts: str) -> Scheme:
    """Of what stands behind w and a: bits, or a format."""
    weights, activations = (FORMATS[part].bits if part in FORMATS else int(part) if part.isdecimal() else 0 for part in parts)
    of_weights, of_activations = (part if part in FORMATS else None for part in parts)
    return Scheme(weights, activations, (of_weights, of_activations))


Watch = Callable[["Site", Tensor], None]


@dataclasses.dataclass(eq=False)
class Site:
    """A linear map inside a block: its input and its weights are put on grids.

    ``rows`` of input are read of one sample on average, padding left out, once the twin has been shown some.
    """

    name: str
    layer: int
    block: str
    width: int
    outputs: int
    rows: float = 0.0

    @property
    def products(self) -> float:
        """Multiplications of one sample."""
        return self.rows * self.width * self.outputs


@dataclasses.dataclass(frozen=True, eq=False)
class Range:
    """Smallest and largest value of each channel over calibration samples, float32 ``(channels,)`` each."""

    low: Tensor
    high: Tensor

    @property
    def sizes(self) -> Tensor:
        """Largest less smallest value, 0 counted as one."""
        return self.high.clamp(min=0) - self.low.clamp(max=0)


Ranges = Mapping[str, Range]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Treatment:
    """How a model is quantised: by a scheme, with static grids from ``ranges``, one for all channels and tokens.

    Attributes:
        sites: names of the sites that are quantised; ``None`` for all.
        per_token: a symmetric grid for every token's own range, in place of a static one.
        positions: tokens whose activations stay whole; ``channels``: by site, those that do.
    """

    scheme: Scheme
    ranges: Ranges
    sites: Collection[str] | None = None
    per_token: bool = False
    positions: tuple[int, ...] = ()
    channels: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def grid(self, site: Site) -> Grid | FloatInputs | int | None:
        """Of the activations of a site; bits where each token has its own; ``None`` where they stay as they are.

        A static range is that of the channels that are not whole; of all, where every one is.
        """
        bits = self.scheme.activations
        if bits == WHOLE_BITS:
            return None
        kind = self.scheme.formats[1]
        if self.per_token:
            return bits if kind is None else FloatInputs(FORMATS[kind])
        found, left_out = self.ranges[site.name], set(self.channels.get(site.name, ()))
        counted = [channel for channel in range(len(found.low)) if channel not in left_out]
        if not counted:  # nothing is left to give a range
            counted = list(range(len(found.low)))
        low, high = found.low[counted].min(), found.high[counted].max()
        if kind is not None:
            return FloatInputs(FORMATS[kind], torch.maximum(low.abs(), high.abs()))
        return affine_grid(low, high, bits)


class Twin:
    """A float32 copy of a model in which every linear map inside its blocks can be quantised; ``sites`` are these, by name.

    All that stands outside of the blocks stays as it is, and so does what happens inside the attention function.
    ``by_few_words`` says that :meth:`losses_of` takes losses by :class:`~sinklab.models.losses.FewWords`.
    """

    by_few_words = False

    def __init__(self, model: PreTrainedModel, *, integer: bool = True) -> None:
        require_unquantized(model)
        places = {str(parameter.device) for parameter in model.parameters()}
        if len(places) > 1 or "meta" in places:
            raise ConfigurationError(
                f"the weights of the model are spread over {', '.join(sorted(places))}, and codes are made of weights on one "
                "device; load it with `device`"
            )
        # The weights are read and never written, so a copy of what is float32 already shares them. What two modules have in
        # common they have in common in the copy, which the memo of deepcopy sees to.
        wide = {
            id(parameter): parameter
            if parameter.dtype == torch.float32
            else nn.Parameter(parameter.detach().float(), requires_grad=False)
            for parameter in model.parameters()
        }
        self.model, self.integer = copy.deepcopy(model, wide).eval(), integer
        for module in self.model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                if buffer.is_floating_point():
                    setattr(module, name, buffer.float())
        self._blocks = blocks_of(self.model)
        self.sites: dict[str, Site] = {}
        self._maps: dict[str, QuantizedLinear] = {}
        self._plain: dict[str, nn.Linear | Conv1D] = {}
        self._codes: dict[tuple[str, int, str | None], WeightCodes | FloatWeights] = {}
        self._few: dict[str, FewWords] = {}
        for name, module in list(named_modules(self.model)):
            block = next((block for block in self._blocks if name.startswith(f"{block}.")), None)
            if block is None or linear_map(module) is None:
                continue
            if not isinstance(module, (nn.Linear, Conv1D)) or type(module) not in (nn.Linear, Conv1D):
                raise UnsupportedModelError(
                    f"{name} is a {type(module).__name__}{' of PEFT' if of_peft(module) else ''}, not a plain nn.Linear; load "
                    "the model without adapters, or put them into its weights (merge_and_unload() of PEFT)"
                )
            self._replace(name, module, block)
        if not self._maps:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no linear map inside a block (nn.Linear in a ModuleList), so there is nothing to "
                "quantise"
            )

    def _replace(self, name: str, module: nn.Linear | Conv1D, block: str) -> None:
        parent, _, child = name.rpartition(".")
        quantized = QuantizedLinear(module, name).eval()
        self._plain[name] = module
        setattr(submodule(self.model, parent), child, quantized)
        layer = list(self._blocks).index(block)
        self.sites[name] = Site(name, layer, block, quantized.in_features, quantized.out_features)
        self._maps[name] = quantized

    def keep(self, reached: Collection[str]) -> list[str]:
        """Leave the maps as they are that samples did not reach, such as those of a tower of pictures; gives their names."""
        left = [name for name in self._maps if name not in reached]
        for name in left:
            parent, _, child = name.rpartition(".")
            setattr(submodule(self.model, parent), child, self._plain[name])
            del self.sites[name], self._maps[name]
        return left

    @property
    def share(self) -> float:
        """Of the numbers of all parameters, how many are weights of these maps, in [0, 1]."""
        own = sum(map_.weight.numel() for map_ in self._maps.values())
        return own / sum(parameter.numel() for parameter in self.model.parameters())

    def weight_bytes(self, site: Site, scheme: Scheme) -> int:
        """Of the weights of a map: codes and their scales, or whole numbers of 16 bits."""
        codes, numbers = self.codes(site.name, scheme), site.width * site.outputs
        if isinstance(codes, FloatWeights):
            return codes.bytes
        return 2 * numbers if codes is None else -(-numbers * scheme.weights // 8) + 4 * codes.scales.numel()

    def codes(self, key: str, scheme: Scheme) -> WeightCodes | FloatWeights | None:
        """The weights of a map as codes; ``None`` where they stay as they are."""
        bits, kind = scheme.weights, scheme.formats[0]
        if bits == WHOLE_BITS:
            return None
        known = key, bits, kind
        if known not in self._codes:
            matrix = self._maps[key].matrix
            self._codes[known] = weight_codes(matrix, bits) if kind is None else FloatWeights.of(FORMATS[kind], matrix)
        return self._codes[known]

    def apply(self, treatment: Treatment | None) -> None:
        """Quantise so from now on; ``None`` for the model as it was."""
        for name, site in self.sites.items():
            chosen = treatment is not None and (treatment.sites is None or name in treatment.sites)
            self._maps[name].setting = self._setting(treatment, site) if treatment is not None and chosen else None

    def _setting(self, treatment: Treatment, site: Site) -> LinearSetting:
        positions, channels = (
            torch.tensor(numbers, device=self.model.device) if numbers else None
            for numbers in (treatment.positions, treatment.channels.get(site.name, ()))
        )
        weights = self.codes(site.name, treatment.scheme)
        return LinearSetting(weights, treatment.grid(site), positions, channels, self.integer)

    def losses(
        self, samples: Samples, treatment: Treatment | None, progress: Callable[[int], None] = lambda done: None,
        few: FewWords | None = None,
    ) -> Tensor:  # fmt: skip
        """Losses under a treatment, float32 ``(samples, positions)``, NaN where none is taken; ``few`` as of sample_losses."""
        self.apply(treatment)
        losses: list[Tensor] = []
        try:
            for batch in self._batches(samples):
                losses.append(sample_losses(self.model, batch, few))
                progress(sum(map(len, losses)))
            return torch.cat(losses)
        finally:
            self.apply(None)

    def _batches(self, samples: Samples) -> list[Samples]:
        """So many samples at a time as their logits leave room for."""
        positions = samples.positions or UNKNOWN_POSITIONS
        classes = getattr(self.model.config.get_text_config(), "vocab_size", 1)
        with without_logits(self.model) as head:
            self.by_few_words = head is not None
            most = LOGITS // classes if head is None else tokens_at_once(self.model)
        count = -(-len(samples) // max(1, min(TOKENS_PER_BATCH, most) // positions))
        return list(samples.batches(-(-len(samples) // count)))

    @torch.inference_mode()
    def losses_of(
        self,
        samples: Samples,
        treatments: Sequence[Treatment],
        progress: Callable[[int, int], None] = lambda done, total: None,
        keep: Keep = lambda batch, number, compute: compute(),
    ) -> Tensor:
        """Losses under each treatment, ``(treatments, samples, positions)``; blocks before its first site run once."""
        order = {name: number for number, name in enumerate(self._blocks)}
        first = [min(order[site.block] for key, site in self.sites.items() if key in (one.sites or ())) for one in treatments]
        losses, done, batches = [], 0, self._batches(samples)
        trusted: bool | None = None  # whether blocks give again what they gave and nothing passes them by: in the first batch
        for of_batch, batch in enumerate(batches):
            with without_logits(self.model) as head, replaying(self._blocks) as replay:
                few: FewWords | None = None
                recorded = False

                def compute(
                    number: int, batch: Samples = batch, replay: Replay = replay, head: LogitMap | None = head
                ) -> Tensor:
                    nonlocal recorded, trusted, few
                    if not recorded:
                        arguments = forward_arguments(self.model, batch, full_logits=True)
                        clean = self.model(**arguments).logits
                        if trusted is None:
                            replay.begin(len(order) - 1)
                            again = self.model(**arguments).logits.nan_to_num_()
                            trusted = torch.equal(again, clean.nan_to_num()) and replay.trusted
                        if head is not None and batch.sha256 not in self._few:
                            self._few[batch.sha256] = FewWords(head, *scored_pairs(clean, batch))
                        few = self._few.get(batch.sha256)
                    replay.trusted, recorded = bool(trusted), True
                    replay.begin(first[number])
                    return self.losses(batch, treatments[number], few=few)

                parts = []
                for number in range(len(treatments)):
                    parts.append(keep(of_batch, number, functools.partial(compute, number)))
                    progress(done := done + 1, len(treatments) * len(batches))
                losses.append(torch.stack(parts))
        return torch.cat(losses, dim=1)

    @torch.inference_mode()
    def watch(self, samples: Samples, look: Watch) -> None:
        """Run the model as it was, and show the input of every site to ``look``.

        Padding is cut off before: some maps read tokens that were chosen among those of all samples (routed experts), or all
        of them in one row (shared ones), of which it could not be said which are padding.
        """
        self.apply(None)
        handles = [
            map_.register_forward_pre_hook(functools.partial(_shown, look, self.sites[name]))
            for name, map_ in self._maps.items()
        ]
        try:
            for alike in samples.unpadded():
                for batch in alike.batches(max(1, TOKENS_PER_BATCH // (alike.positions or UNKNOWN_POSITIONS))):
                    self.model(**forward_arguments(self.model, batch, full_logits=False))
        finally:
            for handle in handles:
                handle.remove()

    def ranges(self, samples: Samples, without: Collection[int] = ()) -> dict[str, Range]:
        """Ranges of the channels of every site over some samples, what stands at padding left out.

        Args:
            without: positions that are left out; they need inputs ``(samples, positions, channels)``, and are counted where a
                map reads another shape, such as an expert that is given tokens of many samples.
        """
        ranges: dict[str, Range] = {}
        rows = dict.fromkeys(self.sites, 0)

        def look(site: Site, values: Tensor) -> None:
            counted = torch.ones(values.shape[:-1], dtype=torch.bool, device=values.device)
            rows[site.name] += counted.numel()
            if without and values.ndim == 3:
                counted[:, [position for position in without if position < values.shape[1]]] = False
            low, high = values.detach().float()[counted].aminmax(dim=0)
            before = ranges.get(site.name)
            if before is not None:
                low, high = torch.minimum(low, before.low), torch.maximum(high, before.high)
            ranges[site.name] = Range(low, high)

        self.watch(samples, look)
        for name, count in rows.items():
            self.sites[name].rows = count / len(samples)
        return ranges

    def check(self, samples: Samples, treatment: Treatment) -> float:
        """Largest difference of integer and simulated products over its bound, over all maps; see ``QuantizedLinear.check``."""
        worst = [0.0]

        def look(site: Site, values: Tensor) -> None:
            worst.append(self._maps[site.name].check(values, self._setting(treatment, site)))

        self.watch(samples, look)
        return max(worst)


class Replay:
    """Blocks that give again what they gave of a batch: those that ran before the one from which on the model is run.

    Attributes:
        trusted: whether that is so; where nothing but the whole model will do, all of it is run.
    """

    def __init__(self, blocks: Mapping[str, nn.Module]) -> None:
        self.trusted, self._given, self._from = True, dict[int, object](), -1
        for number, block in enumerate(blocks.values()):
            block.forward = functools.partial(self._forward, number, block.forward)

    def begin(self, number: int) -> None:
        """From now on the blocks before this one are not run."""
        self._from = number if self.trusted else 0

    def _forward(self, number: int, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        if self._from < 0:
            self.trusted &= list(self._given) == list(range(number))  # each once, in the order of the model
            self._given[number] = _copied(given := forward(*args, **kwargs))
            return given
        return _copied(self._given[number]) if number < self._from else forward(*args, **kwargs)


@contextlib.contextmanager
def replaying(blocks: Mapping[str, nn.Module]) -> Iterator[Replay]:
    """Blocks that remember what they give in the first forward, see :class:`Replay`; as before when the block ends."""
    try:
        yield Replay(blocks)
    finally:
        for block in blocks.values():
            del block.forward


def _copied(given: object) -> object:
    """Tensors that nobody else writes into."""
    if isinstance(given, Tensor):
        return given.clone()
    return tuple(map(_copied, given)) if isinstance(given, tuple) else given


def _shown(look: Watch, site: Site, module: nn.Module, args: tuple[object, ...]) -> None:
    values = args[0]
    assert isinstance(values, Tensor), "a linear map reads a tensor"
    look(site, values)


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by qualified name: those with attention, else the members of its outermost module lists."""
    layers = dict(Anatomy(model).layers)
    if layers:
        return layers
    lists = [name for name, module in named_modules(model) if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(re.match(rf"{re.escape(other)}\.", name) for other in lists)]
    return {
        f"{name}.{child}": plain_module(block) for name in outermost for child, block in submodule(model, name).named_children()
    }


def require_unquantized(model: nn.Module) -> None:
    """Refuse a model whose weights are packed or rounded already."""
    how = getattr(getattr(model, "config", None), "quantization_config", None)
    if how is not None or getattr(model, "is_quantized", False):
        method = how.get("quant_method") if isinstance(how, dict) else getattr(how, "quant_method", None)
        raise ConfigurationError(
            f"the model is quantised already ({getattr(method, 'value', method) or 'by an unknown method'}); give the "
            "checkpoint that it was made from"
        )
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or type(parameter.data) is not Tensor:
            what = parameter.dtype if type(parameter.data) is Tensor else type(parameter.data).__name__
            raise ConfigurationError(
                f"the model is quantised already: {name} is {what}; give the checkpoint that it was made from"
            )
