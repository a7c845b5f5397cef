"""The second tier: models that compute attention in their own code, measured from the weights that they return themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from sinklab.attention import seam
from sinklab.attention.anatomy import Anatomy, off_seam_modules, uses_returned
from sinklab.attention.call import AttentionCall, Site, Statistics, run_name, run_of
from sinklab.attention.looks_ahead import looks_ahead
from sinklab.attention.modules import named_modules
from sinklab.attention.operation import Operation
from sinklab.attention.positions import Positions
from sinklab.attention.probe import Probe
from sinklab.attention.session import Session
from sinklab.attention.statistics.columns import column_statistics
from sinklab.attention.visibility import Causal, Everything, Keys, Visibility, Window
from sinklab.errors import MeasurementError, SessionError, UnsupportedModelError
from sinklab.results.blocks import counted
from sinklab.results.environment import require_memory

RowSums: TypeAlias = Literal["one", "null_mass", "any"]
"""What rows of weights sum to: one; one together with a null mass; anything, as under sigmoid attention."""

UNAVAILABLE: dict[str, str] = {
    "scores": "scores before the softmax",
    "head_outputs": "outputs of heads",
    "attention_outputs": "outputs of attention modules",
    "gated_heads": "outputs of heads behind a gate",
    "vectors": "queries, keys and values",
}
"""What a probe may need and weights alone do not give (keys of :data:`sinklab.attention.probe.NEEDS`), in words."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenWeights(Operation):
    """Weights that are there already and stand where a call has its scores; what computed them is not known.

    Args:
        sums: what rows sum to. A null mass is what a row lacks to one, good to the rounding of the row sum.
    """

    name: ClassVar[str] = "given weights"
    sums: RowSums = "one"

    @property
    def normalized(self) -> bool:  # type: ignore[override]
        """Whether a row and its null mass sum to one."""
        return self.sums != "any"

    def weights(self, scores: Tensor, visible: Tensor | None, null_scores: Tensor | None = None) -> Tensor:
        scores = scores if scores.dtype == torch.float64 else scores.float()
        return scores if visible is None else scores.masked_fill(~visible, 0.0)

    def null_mass(self, scores: Tensor, visible: Tensor | None, null_scores: Tensor | None = None) -> Tensor | None:
        return (1.0 - self.weights(scores, visible).sum(dim=-1)).clamp(min=0.0) if self.sums == "null_mass" else None


@dataclasses.dataclass
class GivenCall(AttentionCall):
    """A call of which the weights are known and nothing else.

    Its queries, keys and values are NaN of width one: whoever reads them without saying so in ``needs`` (``vectors``) gets NaN
    and not a number that looks like one.

    Attributes:
        given: ``(batch, num_heads, q_len, kv_len)``, the weights, in any floating-point dtype.
    """

    given: Tensor = dataclasses.field(kw_only=True)
    has_scores: ClassVar[bool] = False

    def scores(self, query_start: int, query_stop: int) -> Tensor:
        given = self.given[:, :, query_start:query_stop]
        return given.to(torch.promote_types(given.dtype, torch.float32))


def given_call(
    weights: Tensor,
    site: Site,
    rule: Visibility,
    queries: Positions,
    keys: Positions,
    *,
    key_tokens: Tensor | None = None,
    row_sums: RowSums = "one",
    cached_keys: int = 0,
) -> GivenCall:
    """The call of some weights, ``(batch, num_heads, q_len, kv_len)``, under a rule that says which keys a query sees, besides
    padding; that is neither measured nor seen."""
    weights = weights.detach()
    batch, heads, q_len, kv_len = weights.shape
    unknown = torch.full((), float("nan"), dtype=weights.dtype, device=weights.device)
    real = keys.positions >= 0
    visible = rule if bool(real.all()) else Keys(real) if isinstance(rule, Everything) else rule & Keys(real)
    return GivenCall(
        site=site, queries=unknown.expand(batch, heads, q_len, 1), keys=unknown.expand(batch, heads, kv_len, 1),
        values=unknown.expand(batch, heads, kv_len, 1), scaling=1.0, visible=visible, operation=GivenWeights(sums=row_sums),
        query_positions=queries.positions, key_positions=keys.positions, query_documents=queries.documents,
        key_documents=keys.documents, sink_scores=unknown.expand(1, heads, 1) if row_sums == "null_mass" else None,
        key_tokens=key_tokens, cached_keys=cached_keys, given=weights,
    )  # fmt: skip


FaultKind: TypeAlias = Literal["number", "negative", "hidden", "future", "sum"]


@dataclasses.dataclass(frozen=True)
class Fault:
    """Why some weights cannot be attention weights under the rule that they are said to follow: where, and what was found.

    ``hidden`` is weight on a key that the query does not see; ``future`` the same, where the key comes later.
    """

    kind: FaultKind
    text: str


def row_tolerance(weights: Tensor) -> float:
    """How far the sum of a row of a softmax may be from one: four times the rounding of weights to their dtype, and twice that
    of a float32 sum of ``kv_len`` terms."""
    return 2.0 * max(torch.finfo(weights.dtype).eps, 2.0**-23) + 2.0 * weights.shape[-1] * 2.0**-24


def find_fault(call: GivenCall, row_sums: RowSums, tolerance: float | None = None) -> tuple[Fault | None, float]:
    """What is wrong with the weights of a call, the first thing found, and the largest distance of a row sum from one.

    Rows of padding are not looked at. ``tolerance`` is of row sums and of hidden keys; :func:`row_tolerance` by default.
    """
    allowed = row_tolerance(call.given) if tolerance is None else tolerance
    largest = 0.0
    for start, stop in call.blocks():
        counted = call.counted[:, None, start:stop, None]
        weights = call.scores(start, stop).masked_fill(~counted, 0.0)
        visible = call.visible.block(start, stop, 0, call.kv_len)
        unseen = (weights > allowed) & ~visible
        checks: tuple[tuple[FaultKind, Tensor], ...] = (
            ("number", ~torch.isfinite(weights)),
            ("negative", weights < 0),
            ("future", unseen & (call.key_positions[:, None, None] > call.query_positions[:, None, start:stop, None])),
            ("hidden", unseen),
        )
        for kind, bad in checks:
            if bool(bad.any()):
                sample, head, query, key = (int(index) for index in bad.nonzero()[0])
                value = f"{float(weights[sample, head, query, key]):.4g}"
                return Fault(kind, f"sample {sample}, head {head}, query {start + query} gives {value} to key {key}"), largest
        if row_sums == "any":
            continue
        excess = (weights.sum(dim=-1) - 1.0).masked_fill(~counted[..., 0], 0.0)
        excess = excess.clamp(min=0.0) if row_sums == "null_mass" else excess.abs()
        largest = max(largest, float(excess.max()))
        if largest > allowed:
            sample, head, query = (int(index) for index in (excess > allowed).nonzero()[0])
            total = float(weights[sample, head, query].sum())
            return Fault("sum", f"sample {sample}, head {head}, query {start + query} sums to {total:.6g}"), largest
    return None, largest


@dataclasses.dataclass(frozen=True)
class Reach:
    """How far weights look from their query, back and ahead, in keys; and how far they could under the rule of the call.

    Where they look less far in all heads and samples, the model has a window that the rule does not know.
    """

    back: int
    ahead: int
    possible_back: int
    possible_ahead: int

    @property
    def whole(self) -> bool:
        """Whether somebody looks as far as the rule lets him."""
        return (self.back, self.ahead) == (self.possible_back, self.possible_ahead)


def reach(call: GivenCall) -> Reach:
    """How far the weights of a call look; -1 in a direction in which nothing is seen."""
    found: list[int] = [-1, -1, -1, -1]
    offset = call.kv_len - call.q_len
    for start, stop in call.blocks():
        counted = call.counted[:, None, start:stop, None]
        seen = call.visible.block(start, stop, 0, call.kv_len) & counted
        looked = (call.given[:, :, start:stop] > 0) & seen
        queries = torch.arange(start, stop, device=seen.device)[:, None] + offset
        distance = queries - torch.arange(call.kv_len, device=seen.device)
        for number, (pairs, signed) in enumerate(
            ((looked, distance), (looked, -distance), (seen, distance), (seen, -distance))
        ):
            found[number] = max(found[number], int(signed.masked_fill(~pairs.any(0).any(0), -1).max()))
    return Reach(*found)


TIER = "second tier: from the weights that the model returns"
"""What tables, summaries, pages and the terminal say of every number of this tier."""

_HINTS = {
    "number": "",
    "negative": "",
    "hidden": ", which it does not see",
    "future": ", which comes later: it is not causal while its weights are asked for. Load it with attn_implementation='eager'",
    "sum": ", and not to 1: is the model in training mode (dropout)? Call model.eval()",
}
"""What follows the words of a :class:`~sinklab.attention.returned.Fault`, by kind."""


def unavailable(probe: Probe | type[Probe]) -> str:
    """What a probe reads that this tier does not have, in words; empty where it has everything."""
    return ", ".join(words for need, words in UNAVAILABLE.items() if need in probe.needs)


def bytes_of_weights(model: nn.Module, samples: int, length: int) -> int:
    """Bytes that the weights of all layers take at once, and those of one layer twice more in float32 while it is computed.

    A lower bound where the config does not give the number of heads.
    """
    config = getattr(model, "config", None)
    heads = getattr(config.get_text_config(), "num_attention_heads", None) if config is not None else None
    one = samples * (heads if isinstance(heads, int) else 1) * length * length
    size = next((parameter.element_size() for parameter in model.parameters()), 4)
    return len(off_seam_modules(model)) * one * size + 2 * one * 4


@contextlib.contextmanager
def attend_returned(model: nn.Module, probes: Sequence[Probe] = ()) -> Iterator[ReturnedSession]:
    """Show ``probes`` the attention weights that ``model`` returns when it is asked for them, until the block ends.

    For models that :func:`~sinklab.attention.session.attend` refuses because none of their attention goes through the attention
    interface. The model is asked with ``output_attentions=True``, and its output reaches the caller without them. What is
    proved of every forward: a tensor of weights for each attention module that ran, over all keys; rows that sum to one;
    nothing for padding, and nothing for later keys if the model is causal; some weight as far away as the rule of visibility
    allows, so that no window is missed. That these weights made the output is the model's word.

    Memory is what the weights of all layers take (:func:`bytes_of_weights`), quadratic in the length.

    Args:
        model: of transformers, with one stack of layers, its implementation being ``eager``.
        probes: what to measure; those that read scores, queries, keys, values or outputs of heads and attention are refused.

    Raises:
        UnsupportedModelError: another model, weights of another shape or none, or a probe that reads more than weights.
        MeasurementError: weights that cannot be those of the attention that the model is said to have.
        ConfigurationError: weights that need more memory than the machine has.
        SessionError: as for :func:`~sinklab.attention.session.attend`.
    """
    session = ReturnedSession(model, probes)
    with session._recording():
        yield session


class ReturnedSession(Session):
    """What is being seen of one model in this tier; made by :func:`attend_returned`."""

    tier = TIER

    def __init__(self, model: nn.Module, probes: Sequence[Probe] = ()) -> None:
        super().__init__(model, probes)
        model = self.model  # out of what is put round it
        self.off_seam = []  # they are measured
        for probe in self.probes:
            if missing := unavailable(probe):
                raise UnsupportedModelError(f"probe {probe.name!r} reads {missing}, which {self._name} does not give ({TIER})")
        config = getattr(model, "config", None)
        parameters = inspect.signature(model.forward).parameters
        takes = "output_attentions" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        if config is None or not takes:
            raise UnsupportedModelError(
                f"{self._name} computes attention in its own code and does not take `output_attentions`"
            )
        implementation = getattr(config, "_attn_implementation", None)
        if implementation not in (None, "eager"):
            raise UnsupportedModelError(
                f"{self._name} computes attention in its own code, and on {implementation!r} it may compute "
                "something else when it is asked for its weights; load it with attn_implementation='eager'"
            )
        if config.is_encoder_decoder or getattr(config, "attention_window", None) is not None:
            what = "an encoder and a decoder" if config.is_encoder_decoder else "windows of its own layout (`attention_window`)"
            raise UnsupportedModelError(
                f"{self._name} computes attention in its own code and has {what}, which is not measured"
            )
        decodes = isinstance(model, PreTrainedModel) and (model.can_generate() or getattr(config, "is_decoder", False))
        self._is_decoder = decodes and not looks_ahead(model)
        self._window = int(getattr(config, "window_size", 0) or 0)
        self._causal: bool | None = None
        self._farthest: Counter[str] = Counter()
        self._ran: list[str] = []
        self._wanted = False
        self._known: dict[str, Site] = {}

    def _dissected(self, model: nn.Module) -> Anatomy:
        modules = dict(named_modules(model))
        return Anatomy(model, {name: modules[name] for name in self.off_seam} if uses_returned(model) else None)

    def owns(self, module: nn.Module) -> bool:
        """Never: calls of the attention interface are not looked at here."""
        return False

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        if any(isinstance(other, Session) and other.model is self.model for other in seam.active_observers()):
            raise SessionError(f"a session on this {self._name} is already active; pass all probes to one attend_returned()")
        with contextlib.ExitStack() as stack:
            # Before the hooks of the base class, which end the forward.
            for name, module in self._anatomy.attention.items():
                stack.callback(module.register_forward_pre_hook(functools.partial(self._note, name)).remove)
            stack.callback(self.model.register_forward_pre_hook(self._ask, with_kwargs=True).remove)
            stack.callback(self.model.register_forward_hook(self._take).remove)
            stack.enter_context(super()._recording())
            yield

    def _note(self, name: str, module: nn.Module, args: tuple[object, ...]) -> None:
        if self._active():
            self._ran.append(name)

    def _ask(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        if not self._active():
            return None
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim != 2:
            raise UnsupportedModelError(
                f"{self._name} was given an attention mask of shape {tuple(mask.shape)}; in this tier only padding (batch, "
                "tokens) is known to be hidden"
            )
        first = next((one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.ndim >= 2), None)
        if first is not None:
            samples, length = first.shape[:2]
            needed = bytes_of_weights(self.model, samples, length)
            require_memory(needed, f"the weights that {self._name} returns of {samples:,} samples of {length:,} tokens")
        self._ran.clear()
        self._wanted = bool(kwargs.get("output_attentions"))
        return args, {**kwargs, "output_attentions": True}

    def _take(self, module: nn.Module, args: tuple[object, ...], output: object) -> object:
        if not self._active():
            return None
        now = self._hooks.now
        now.called.update(now.starts)
        returned = getattr(output, "attentions", None)
        weights = [one for one in returned or () if isinstance(one, Tensor)]
        if not isinstance(output, ModelOutput) or len(weights) != len(self._ran):
            raise UnsupportedModelError(
                f"{self._name} was asked for its attention weights and returned those of {counted(len(weights), 'layer')}, "
                f"while {counted(len(self._ran), 'attention module')} ran ({', '.join(self._ran[:2])}, …); it cannot "
                "be measured"
            )
        with torch.no_grad(), torch.autocast(weights[0].device.type, enabled=False):
            runs: Counter[str] = Counter()
            calls = []
            for name, given in zip(self._ran, weights, strict=True):
                calls.append(self._call(name, runs[name], given.detach()))
                runs[name] += 1
            self._settle(calls)
            for call in calls:
                self._prove(call)
                self._show(call)
        if self._wanted:
            return output
        return type(output)(**{name: value for name, value in output.items() if name != "attentions"})

    def _call(self, name: str, run: int, given: Tensor) -> GivenCall:
        """The call of one module, under a rule that hides nothing but padding."""
        now = self._hooks.now
        tokens = now.token_ids[-1].shape[1] if now.token_ids else None
        q_len, cached = given.shape[2] if given.ndim == 4 else None, now.cached or 0
        if q_len is None or given.shape[3] != cached + q_len or (tokens is not None and q_len != tokens):
            of = "its tokens" if tokens is None else f"{tokens} tokens"
            raise UnsupportedModelError(
                f"{name} ({type(self._anatomy.attention[name]).__name__}) returns weights of shape {tuple(given.shape)} "
                f"for {of}; expected (batch, heads, queries, keys) over all keys ({cached} cached). It cannot be measured"
            )
        batch, heads, q_len, kv_len = given.shape
        if heads > 1 and kv_len > 1 and bool((given == given[:, :1]).all()):
            raise UnsupportedModelError(
                f"{name} ({type(self._anatomy.attention[name]).__name__}) returns the same weights for all of its {heads} "
                "heads, as WavLM does, which returns their mean; what one head does cannot be measured"
            )
        mask = next((mask for mask in reversed(now.token_masks) if tuple(mask.shape) == (batch, kv_len)), None)
        if mask is None and not all(bool(other.all()) for other in now.token_masks):
            raise UnsupportedModelError(
                f"{self._name} was given an attention mask of shape {tuple(now.token_masks[-1].shape)} and returns weights "
                f"over {kv_len:,} keys, of which it is not known which are padding; give it samples of one length, not padded"
            )
        keys = Positions.plain(batch, kv_len, given.device)
        if mask is not None:
            keys = Positions.counted(mask, 0, kv_len, given.device)
        queries = now.counted(batch, q_len, given.device)
        label = run_name(name, run)
        if label not in self._known:
            self._known[label] = Site(module=label, layer=len(self._known))
            self.sites.append(self._known[label])
        self.calls[name] += 1
        key_tokens = now.key_tokens(keys.positions, q_len)
        return given_call(
            given, self._known[label], Everything(given.device), queries, keys, key_tokens=key_tokens, cached_keys=cached
        )

    def _settle(self, calls: Sequence[GivenCall]) -> None:
        """Give the calls their rules; a model is causal by what it is, or by its first weights, with nothing for later keys."""
        if self._causal is None and calls[0].q_len > 1:
            self._causal = self._is_decoder or all(reach(call).ahead <= 0 for call in calls)
        if self._causal is False:
            return
        for call in calls:
            module = self._anatomy.attention[run_of(call.site.module)[0]]
            rule: Visibility = Causal(call.kv_len - call.q_len, call.given.device)
            if getattr(module, "attention_type", None) == "local":  # GPT-Neo
                rule &= Window(self._window, call.kv_len - call.q_len, call.given.device)
            call.visible = rule if isinstance(call.visible, Everything) else rule & call.visible

    def _prove(self, call: GivenCall) -> None:
        module = call.site.module
        fault, error = find_fault(call, "one")
        if fault is not None:
            raise MeasurementError(f"the weights that {module} of {self._name} returns: {fault.text}{_HINTS[fault.kind]}")
        if call.kv_len > self._farthest[module]:  # a window shows at lengths beyond it
            self._farthest[module] = call.kv_len
            seen = reach(call)
            if not seen.whole:
                raise UnsupportedModelError(
                    f"the weights that {module} of {self._name} returns have nothing for keys more than "
                    f"{max(seen.back, seen.ahead)} away, in no head and no sample of {call.kv_len} tokens: a window that "
                    "sinklab does not know. It cannot be measured"
                )
        self._record_check(int(call.counted.sum()) * call.num_heads, error)

    def _show(self, call: GivenCall) -> None:
        self._operations.add(call.operation)
        if self.probes:
            needs = self._statistics_needs
            self._show_call(call, column_statistics(call, needs) if needs else Statistics())
