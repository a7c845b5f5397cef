"""Operation: how queries, keys and values become head outputs, its learned parameters, and one call as paths receive it."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sinklab.attention.paths.row_kernel import RowKernel
from sinklab.errors import ConfigurationError
from sinklab.results.intervals import TIE

State = Mapping[str, Tensor]
"""What an operation is given besides queries, keys and values: its learned parameters by name and, when it
``needs_layer_input``, ``"layer_input"``, what entered the attention layer, ``(batch, q_len, hidden_size)``."""

EMPTY: dict[str, Tensor] = {}
"""State of an operation without parameters."""

ROW_SUM = 1e-8
"""Added to the sum of a row before its weights are divided by it, as in the released code of Gu et al. 2024
(arXiv 2410.10781); a row of zeros stays one."""

_LARGEST_ROUNDING = 2.0**-11
"""Of a log-sum-exp, in nats: as a factor it goes into every weight of its row, so their sum is that far from one. In float32
that is a log-sum-exp of 4,096; layer 0 of Qwen2.5-Coder 0.5B has 1,458."""


@dataclasses.dataclass(frozen=True)
class HeadShape:
    """Shape of the attention module that an operation's parameters are made for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    hidden_size: int
    scaling: float | None = None  # factor of the scores of the host, where it is not 1/sqrt(head_dim)
    folded: tuple[int, ...] | None = None  # key–value heads whose sinks are folded; None for all (attention/folding.py)
    queries_from: str = ""  # where these stand before rotation, for folded sinks
    keys_from: str = ""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where queries or keys stand in the output of a part of the attention module, before rotation."""

    module: str  # its name inside the attention module
    layout: str  # ``btn``, heads one behind the other in ``(batch, tokens, numbers)``; ``bthd`` or ``bhtd``
    start: int = 0  # in ``btn``: where the first head begins,
    step: int = 0  # and how far apart two are

    def __str__(self) -> str:
        return f"{self.module}:{self.layout}:{self.start}:{self.step}"

    @staticmethod
    @functools.cache
    def of(written: str) -> Source:
        """From what :meth:`__str__` gives."""
        module, layout, start, step = written.split(":")
        return Source(module, layout, int(start), int(step))

    def read(self, output: Tensor, heads: int, size: int) -> Tensor:
        """A view ``(batch, heads, tokens, size)`` of the output."""
        if self.layout == "bhtd":
            return output
        if self.layout == "bthd":
            return output.transpose(1, 2)
        if self.step == size:
            split = output[..., self.start : self.start + heads * size].unflatten(-1, (heads, size))
        else:
            split = output.unflatten(-1, (-1, self.step))[..., self.start : self.start + size]
        return split.transpose(1, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation(abc.ABC):
    """From queries, keys and values to head outputs; its fields are its settings, all of them numbers or flags.

    Every operation is one composition, of which it overrides the parts in which it differs from softmax attention::

        queries, keys = features(queries, keys)
        scores        = queries · keysᵀ · scaling  (+ the host's soft cap and position bias)
        null_scores   = null_scores(queries, scaling)          the score of attending to nothing, if there is such a thing
        weights       = weights(scores, visible, null_scores)  on real keys
        null_mass     = null_mass(scores, visible, null_scores)
        outputs       = finish(weights · values, null_mass)    null value, output bias, gate

    An instance is stateless and hashable: learned parameters live on the attention module and are handed in as ``state``. It is
    registered with transformers as ``sinklab_<name>`` and may then replace the attention of any model on the seam.

    Attributes:
        is_softmax: weights are the softmax of the scores, with the null score as one more term of the denominator if there is
            one; everything that works from a log-sum-exp (flash kernels, fused statistics) then serves the operation.
        normalized: every row's weights and null mass sum to one together. Where they do not, the metric of Gu et al. divides
            rows by their sum (their proxy).
        signed: weights may be negative (identity and MLP kernels); the proxy then takes absolute values.
        needs_layer_input: ``state["layer_input"]`` is read (gates).
        folds: keys of sinks are hidden, and ``state["unrotated"]``, queries before rotation, and ``state["sinks"]``, boolean
            ``(batch, q_len)``, are read where they are there (:mod:`sinklab.attention.folding`).
    """

    name: ClassVar[str]
    normalized: ClassVar[bool]
    is_softmax: ClassVar[bool] = False
    signed: ClassVar[bool] = False
    needs_layer_input: ClassVar[bool] = False
    folds: ClassVar[bool] = False

    def require(self, holds: bool, why: str) -> None:
        """Refuse settings of which something does not hold, with a :class:`ConfigurationError`."""
        if not holds:
            raise ConfigurationError(f"operation {self.name!r}: {why}")

    # --- what the attention module is given -------------------------------------------------------------------------------

    def parameters(self, shape: HeadShape) -> dict[str, Tensor]:
        """Learned parameters by name with their initial values, float32; drawn from torch's global generator."""
        return {}

    def prepare(self, module: nn.Module) -> None:  # noqa: B027  optional on purpose
        """Change the attention module itself (reparametrise its projections).

        Called when it is built, and again once its weights are drawn: a second call must find its own work and bring it up to
        date.
        """

    @property
    def at_start(self) -> str:
        """What becomes of a pre-trained model that is given the operation with parameters as they start, in a sentence; empty
        where its outputs stay near what they are."""
        return ""

    @property
    def tokens_in_front(self) -> int:
        """Learned tokens that the model must put in front of every sequence."""
        return 0

    # --- the parts of the composition -------------------------------------------------------------------------------------

    def features(self, queries: Tensor, keys: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Map queries ``(batch, num_heads, q_len, head_dim)`` and keys ``(batch, num_kv_heads, kv_len, head_dim)``."""
        return queries, keys

    def null_scores(self, queries: Tensor, scaling: float, state: State) -> Tensor | None:
        """Null score of every query, ``(batch or 1, num_heads, q_len or 1)``, or ``None``.

        Args:
            queries: mapped by :meth:`features`, ``(batch, num_heads, q_len, head_dim)``.
        """
        return None

    @abc.abstractmethod
    def weights(self, scores: Tensor, visible: Tensor | None, null_scores: Tensor | None = None) -> Tensor:
        """Weights on real keys.

        Args:
            scores: ``(batch, num_heads, q_len, kv_len)``, scaled, before mask and normalisation.
            visible: boolean, broadcastable to ``scores``; ``None`` when every key is visible.
            null_scores: what the method of that name gave, broadcastable to ``(batch, num_heads, q_len)``.

        Returns:
            Weights of the same shape, in float32 or wider; exactly 0 where not visible; a row without a visible key is 0.
        """

    def null_mass(self, scores: Tensor, visible: Tensor | None, null_scores: Tensor | None = None) -> Tensor | None:
        """Null mass ``(batch, num_heads, q_len)``, or ``None`` where the operation does not define one.

        Same arguments as :meth:`weights`. The default serves normalised operations with a null score: one minus the row sum
        would lose the digits of a small mass, so it is computed as the probability that it is.
        """
        if null_scores is None:
            return None
        scores = scores if scores.dtype == torch.float64 else scores.float()
        total = torch.logsumexp(scores if visible is None else scores.masked_fill(~visible, float("-inf")), dim=-1)
        # Finite in a row that sees nothing, so that a null score of -inf has no mass there, as everywhere.
        return torch.sigmoid(null_scores.to(total.dtype) - total.clamp(min=torch.finfo(total.dtype).min))

    def null_value(self, state: State) -> Tensor | None:
        """Value ``(num_heads or 1, value_dim)`` that the null mass carries to the output; ``None`` means 0."""
        return None

    def output_bias(self, state: State) -> Tensor | None:
        """Vector ``(num_heads or 1, value_dim)`` added to every head output, or ``None``."""
        return None

    def gain(self, state: State) -> Tensor | None:
        """Factor on the head outputs, broadcastable to ``(batch, num_heads, q_len, value_dim)``, or ``None``."""
        return None

    def finish(self, outputs: Tensor, null_mass: Tensor | None, state: State) -> Tensor:
        """Head outputs from weights times values: plus ``null_mass`` times the null value, plus the bias, times the gain.

        Args:
            outputs: ``(batch, num_heads, q_len, value_dim)``; its dtype is kept.
            null_mass: ``(batch, num_heads, q_len)`` or ``None``.
        """
        value, dtype = self.null_value(state), outputs.dtype
        if value is not None:
            if null_mass is None:
                raise ConfigurationError(f"operation {self.name!r} has a null value and no null mass to carry it")
            lifted = torch.promote_types(dtype, value.dtype)  # parameters in float32 lift half precision until the end
            outputs = torch.addcmul(outputs.to(lifted), null_mass[..., None].to(lifted), value[:, None].to(lifted))
        return self.shift_and_gate(outputs, state).to(dtype)

    def shift_and_gate(self, outputs: Tensor, state: State) -> Tensor:
        """The end of :meth:`finish`, for a path whose outputs have the null value already."""
        bias, gain = self.output_bias(state), self.gain(state)
        dtype = outputs.dtype
        if bias is not None:
            outputs = outputs + bias[:, None]
        if gain is not None:
            outputs = outputs * gain
        return outputs.to(dtype)

    def log_similarity(self, scores: Tensor, counts: Tensor) -> Tensor | None:
        """Logarithm of a non-negative similarity φ, elementwise, for the flex path; weights are φ, or φ / Σ φ if normalised.

        Args:
            scores: as in :meth:`weights`, of any shape.
            counts: keys that the query sees, at least 1, broadcastable to ``scores``.

        Returns:
            ``log φ``: minus infinity where φ is 0, with a finite gradient there; ``None`` where φ may be negative or needs the
            other scores of its row.
        """
        return None

    def row_kernel(self) -> RowKernel | None:
        """:meth:`weights` and their gradient on buffers, for the blocks path; ``None`` leaves them to autograd, block by block.

        It is used only if the class that defines it is the one that defines :meth:`weights`, or derives from it.
        """
        return None

    # --- the whole --------------------------------------------------------------------------------------------------------

    def head_outputs(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        visible: Tensor | None,
        scaling: float,
        state: State = EMPTY,
        *,
        softcap: float | None = None,
        bias: Tensor | None = None,
        dropout: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """The plain reference of the whole operation; differentiable, O(q_len · kv_len) memory. Every fast path equals it.

        Args:
            queries: ``(batch, num_heads, q_len, head_dim)``.
            keys, values: ``(batch, num_kv_heads, kv_len, head_dim)``; repeated here for grouped queries.
            visible: as in :meth:`weights`.
            scaling: factor on the scores.
            softcap, bias: the host model's own changes of the scores: ``cap · tanh(score / cap)``, then an additive bias.
            dropout: probability with which a weight is dropped.

        Returns:
            Head outputs ``(batch, num_heads, q_len, value_dim)`` and weights on real keys, both in the dtype of ``queries``.
        """
        queries, keys = self.features(queries, keys, state)
        groups = queries.shape[1] // keys.shape[1]
        keys, values = repeat_groups(keys, groups), repeat_groups(values, groups)
        scores = torch.matmul(queries, keys.transpose(2, 3)) * scaling
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if bias is not None:
            scores = scores + bias
        null_scores = self.null_scores(queries, scaling, state)
        weights = self.weights(scores, visible, null_scores).to(values.dtype)
        weights = nn.functional.dropout(weights, p=dropout)
        null = self.null_mass(scores, visible, null_scores) if self.null_value(state) is not None else None
        return self.finish(torch.matmul(weights, values), null, state), weights

    # --- names and settings -----------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, object]:
        """Name and settings, as they are written into a model's config."""
        return {"name": self.name, **dataclasses.asdict(self)}


def repeat_groups(states: Tensor, groups: int) -> Tensor:
    """Keys or values of grouped-query attention, repeated so that every query head has its own."""
    return states if groups == 1 else states.repeat_interleave(groups, dim=1)


SHARE_OF_ROW = "rows that sum to one with their null mass are taken as they are, all others are divided by their sums"
"""What :func:`row_share` does, in the words of definitions."""


def row_share(weights: Tensor, row_mass: Tensor, operation: Operation) -> Tensor:
    """Weights as shares of their rows: as they are where rows sum to one, and else over ``row_mass``, the sum of the absolute
    weights of each row, that broadcasts to ``weights``."""
    return weights if operation.normalized else weights / (row_mass + ROW_SUM)


def is_largest(weights: Tensor, row_max: Tensor) -> Tensor:
    """Whether a weight is the largest of its row, or as large but for rounding; no weight of zero is."""
    return (weights > 0) & (weights >= row_max * (1.0 - TIE))


def leaves_digits(log_sum_exp: Tensor) -> bool:
    """Whether ``exp(score - log_sum_exp)`` is a weight: both are rounded in proportion to their size, and their difference not.

    Where it is not, weights are taken from whole rows, whose largest score is subtracted before anything is added. Rows that
    see no key, of minus infinity, have no weights to lose digits.
    """
    return not bool(beyond_digits(log_sum_exp).any())


def beyond_digits(log_sum_exp: Tensor) -> Tensor:
    """Where :func:`leaves_digits` finds too few, boolean, same shape: without a wait for the device."""
    beyond = log_sum_exp.abs() > _LARGEST_ROUNDING / torch.finfo(log_sum_exp.dtype).eps
    return beyond & (log_sum_exp != float("-inf"))


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """One call as a path receives it.

    Attributes:
        queries: ``(batch, num_heads, q_len, head_dim)``; keys and values ``(batch, num_kv_heads, kv_len, …)``, not repeated.
        visible: boolean, broadcastable to ``(batch, num_heads, q_len, kv_len)``; ``None`` when ``causal`` says it all.
        causal: query ``i`` sees keys ``0 … i``; together with ``visible`` always False.
        scaling: factor on the scores.
        state: parameters of the operation.
        softcap, bias, dropout: the host model's own; see :meth:`Operation.head_outputs`.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    visible: Tensor | None
    causal: bool
    scaling: float
    state: State = dataclasses.field(default_factory=lambda: EMPTY)
    softcap: float | None = None
    bias: Tensor | None = None
    dropout: float = 0.0

    @property
    def q_len(self) -> int:
        """Number of queries."""
        return self.queries.shape[2]

    @property
    def kv_len(self) -> int:
        """Number of keys."""
        return self.keys.shape[2]

    def mask(self) -> Tensor | None:
        """``visible``, or the causal rule as a boolean ``(q_len, kv_len)``; ``None`` when every key is visible."""
        if not self.causal:
            return self.visible
        return torch.ones(self.q_len, self.kv_len, dtype=torch.bool, device=self.queries.device).tril()

    def plain_scores(self) -> str | None:
        """Why a path that forms scores by itself cannot serve the call, or ``None``."""
        if self.softcap is not None:
            return "the model caps its scores"
        if self.bias is not None:
            return "the model adds a bias to its scores"
        return "attention dropout is on" if self.dropout else None


ATTRIBUTE = "operation_state"
"""Name of the submodule; parameters are saved as ``<attention module>.operation_state.<name>``."""


@dataclasses.dataclass
class Passing:
    """What one forward hands to the operation of a layer: an object of its own, since to set an attribute of a module is
    slow."""

    layer_input: Tensor | None = None  # what enters the layer, where the operation reads it
    unrotated: Tensor | None = None  # what has queries before rotation, where sinks are folded
    sinks: Tensor | None = None  # which tokens are folded sinks, boolean (batch, tokens); None where none can be
    first_only: bool = False  # that only the first token of every row is one, and nothing is masked


class OperationState(nn.Module):
    """Parameters of one operation in one attention layer, under the names that :meth:`Operation.parameters` gives them."""

    def __init__(self, operation: Operation, shape: HeadShape) -> None:
        super().__init__()
        self.operation, self.shape = operation, shape
        for name, value in operation.parameters(shape).items():
            self.register_parameter(name, nn.Parameter(value))
        self.passing = Passing()
        self.parts: dict[str, Any] = {}  # what is hooked, and the hook that marks keys while there is one

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initial values again, for the parameters that were not read from a checkpoint."""
        for name, value in self.operation.parameters(self.shape).items():
            parameter = getattr(self, name)
            if not getattr(parameter, "_is_hf_initialized", False):
                parameter.copy_(value)

    def read(self, layer_input: Tensor | None = None) -> State:
        """What the operation is given: its parameters and, if it needs it, what entered the layer.

        Raises:
            ConfigurationError: the operation needs the layer's input and nobody passed it.
        """
        state: dict[str, Tensor] = {name: value for name, value in self._parameters.items() if value is not None}
        if self.operation.needs_layer_input:
            given = self.passing.layer_input if layer_input is None else layer_input
            if given is None:
                raise ConfigurationError(
                    f"operation {self.operation.name!r} reads what enters the attention layer, and nothing was "
                    "passed; attach it with sinklab.attach(model, operation)"
                )
            state["layer_input"] = given
        if self.passing.unrotated is not None and self.shape.queries_from:
            source = Source.of(self.shape.queries_from)
            state["unrotated"] = source.read(self.passing.unrotated, self.shape.num_heads, self.shape.head_dim)
        return state if self.passing.sinks is None else state | {"sinks": self.passing.sinks}


def bind(module: nn.Module, operation: Operation, shape: HeadShape) -> None:
    """Give an attention module its operation: the settings, the learned parameters, and prepared projections."""
    module.operation = operation  # type: ignore[assignment]
    operation.prepare(module)
    state = OperationState(operation, shape)
    if operation.needs_layer_input or operation.folds or len(list(state.parameters())):
        setattr(module, ATTRIBUTE, state)


def state_of(module: nn.Module, operation: Operation, layer_input: Tensor | None = None) -> State:
    """State of ``operation`` on ``module``; empty for an operation without parameters.

    Raises:
        ConfigurationError: the operation has parameters and the module does not carry them.
    """
    own = getattr(module, ATTRIBUTE, None)
    if isinstance(own, OperationState) and (own.operation is operation or own.operation == operation):
        return own.read(layer_input)
    cls = type(operation)
    learned = cls.parameters is not Operation.parameters or operation.needs_layer_input
    # Learned numbers may also sit in the projections or in front of the sequence; a module that is bound has been given them.
    elsewhere = cls.prepare is not Operation.prepare or operation.tokens_in_front > 0
    if learned or (elsewhere and getattr(module, "operation", None) != operation):
        raise ConfigurationError(
            f"operation {operation.name!r} has learned parameters, which {type(module).__name__} does not carry; attach it "
            f"first: sinklab.attach(model, {operation.name!r})"
        )
    return EMPTY
