"""What an intervention is: a small object that edits attention or hidden states while a model runs; nothing is kept.

Two kinds, by what they get hold of:

- :class:`HeadIntervention`: one call of the attention function, cut down to the heads that it names. Three stages, in this
  order, each optional: the call before weights are formed (keys, values, visibility, scores), the weights of a block of rows,
  the head outputs.
- :class:`HiddenIntervention`: what enters the first layer, and what each layer puts out.

Interventions are given to :func:`sinklab.attend`; several compose, stage by stage and inside a stage in the order given.
"""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal, Self, TypeAlias

import torch
from torch import Tensor

from sinklab.attention.call import AttentionCall, LayerOutput
from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.registry import spelled

NEAR = 8
"""Queries behind a key that still see it, where it is hidden from all heads: else the next token becomes the sink."""

Heads: TypeAlias = Mapping[int | str, Sequence[int]]
"""Heads of some attention modules: the running number of a self-attention module, or a qualified name, to head numbers."""

Place: TypeAlias = int | Sequence[int] | Tensor | Literal["null"]
"""Which keys: a position in the document, several, a row of them a sample ``(batch, n)``, -1 for none, or the null score."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Intervention(abc.ABC):
    """Base of both kinds. A subclass is a frozen dataclass; its fields are its settings, checked in ``__post_init__``."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    example: ClassVar[dict[str, object]] = {}
    """Settings that change what a model computes; docs and contract tests use them."""
    neutral: ClassVar[dict[str, object]] = {}
    """Settings that make it the identity."""

    @property
    def changes_nothing(self) -> bool:
        """Whether the settings make it the identity; it is then never called, so that the model's bits stay as they are."""
        return False

    @property
    def per_sample(self) -> bool:
        """Whether what it does to a sample depends on that sample alone."""
        return True

    def of_samples(self, start: int, stop: int) -> Self:
        """The same for the samples ``start`` to ``stop`` alone: settings with a row a sample (``place``) are cut."""
        place = getattr(self, "place", None)
        if isinstance(place, Tensor) and place.ndim == 2:
            return dataclasses.replace(self, place=place[start:stop])  # type: ignore[call-arg]
        return self


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HeadIntervention(Intervention):
    """Edits calls of the attention function. Methods are shown the named heads alone and need not know which these are.

    Args:
        heads: which heads of which modules; ``None`` for all of every module.
    """

    heads: Heads | None = None

    @property
    def changes_nothing(self) -> bool:
        return self.heads is not None and not any(len(chosen) for chosen in self.heads.values())

    def edit_call(self, call: AttentionCall) -> AttentionCall:
        """A copy (:func:`dataclasses.replace`) with others in place of some of: queries, keys, values, bias, visibility, null
        score, null value."""
        return call

    def edit_weights(
        self, call: AttentionCall, weights: Tensor, null_mass: Tensor, start: int, stop: int
    ) -> tuple[Tensor, Tensor]:
        """Other weights for the queries ``start`` to ``stop``.

        Args:
            call: after :meth:`edit_call` of every intervention.
            weights: float32 or wider ``(batch, num_heads, stop - start, kv_len)``, signed where the operation is.
            null_mass: ``(batch, num_heads, stop - start)``, 0 where the operation defines none.
        """
        return weights, null_mass

    def edit_outputs(self, call: AttentionCall, outputs: Tensor) -> Tensor:
        """Other head outputs ``(batch, num_heads, q_len, value_dim)``; ``call.head_outputs`` still has those of the model."""
        return outputs


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KeyIntervention(HeadIntervention):
    """Edits what becomes of some keys.

    Args:
        place: positions in the document, a row of them for each sample, or ``"null"`` for the null score and its value.
    """

    example: ClassVar[dict[str, object]] = {"place": 0}
    neutral: ClassVar[dict[str, object]] = {"place": ()}

    place: Place = 0

    @property
    def changes_nothing(self) -> bool:
        return super().changes_nothing or names_nothing(self.place)

    def is_null(self, call: AttentionCall, wanted: str) -> bool:
        """Whether the place is the null score.

        Args:
            wanted: what is missing if the attention has none, and what to do, for the message.

        Raises:
            UnsupportedModelError: it is, and the attention has none.
        """
        if not isinstance(self.place, str):
            return False
        if call.sink_scores is None:
            raise UnsupportedModelError(f"{call.site.module}: its attention has no {wanted}")
        return True


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HiddenIntervention(Intervention):
    """Edits hidden states.

    Args:
        layers: numbers of the layers whose output is edited, -1 for what enters the first; ``None`` for all but -1.
    """

    layers: Sequence[int] | None = None

    @property
    def changes_nothing(self) -> bool:
        return self.layers is not None and not len(self.layers)

    @abc.abstractmethod
    def edit_hidden(self, output: LayerOutput) -> Tensor:
        """Other hidden states of the shape of ``output.hidden_states``; must not write into that tensor."""


def described(interventions: Sequence[Intervention]) -> str | None:
    """What changes something, as the column ``intervention`` has it: ``zero_value:heads={"0": [1]},place=0``, several with a
    semicolon between; ``None`` where nothing does. Settings that are tensors or ``None`` are left out.
    """
    texts = [spelled({"name": edit.name, **_plain_settings(edit)}) for edit in interventions if not edit.changes_nothing]
    return "; ".join(texts) or None


def _plain_settings(edit: Intervention) -> dict[str, object]:
    plain: dict[str, object] = {}
    for field in dataclasses.fields(edit):
        try:
            value = json.loads(json.dumps(getattr(edit, field.name), default=_listed))
        except TypeError:
            continue
        if value is not None:
            plain[field.name] = value
    return plain


def _listed(value: object) -> list[object]:
    """A sequence that JSON does not know, such as a range."""
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is left out")


def names_nothing(place: Place) -> bool:
    """Whether a place has no position in it."""
    return not isinstance(place, (int, str)) and torch.as_tensor(place).numel() == 0


def overrides(intervention: Intervention, method: str) -> bool:
    """Whether an intervention has its own version of an optional method of its kind."""
    return getattr(type(intervention), method) is not getattr(HeadIntervention, method)


def keys_at(call: AttentionCall, place: Place) -> Tensor:
    """Boolean ``(batch, kv_len)``: the keys of a call that stand at some positions of their documents.

    Raises:
        ConfigurationError: a place by sample for another number of samples.
    """
    return tokens_at(call.key_positions, place, call.site.module)


def tokens_at(positions: Tensor, place: Place, where: str) -> Tensor:
    """Boolean ``(batch, length)``: which tokens, at int64 ``positions`` ``(batch, length)``, stand at a place.

    A place by sample for another number of samples is refused; ``where`` is what the message begins with.
    """
    chosen = torch.as_tensor(place, dtype=torch.int64, device=positions.device)
    if chosen.ndim < 2:
        chosen = chosen.reshape(1, -1)
    elif chosen.shape[0] != positions.shape[0]:
        raise ConfigurationError(
            f"{where}: positions are given for {chosen.shape[0]} samples, and the batch has {positions.shape[0]}"
        )
    return (positions[:, :, None] == chosen[:, None, :]).any(-1)
