"""Reader: a model that reads a text under a policy, as much at a time as one likes; streams, losses and scores rest on it."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, NoReturn

from torch import Tensor
from transformers import Cache, PreTrainedModel

from sinklab.policies.base import Policy
from sinklab.streaming.telemetry import Telemetry

__all__ = ["Reader", "forget_media"]


def forget_media(model: PreTrainedModel) -> None:
    """A text without pictures begins: its positions are not those behind the pictures of the last generate().

    Qwen2-VL and its kin remember by how much these have moved positions, and add it to every token behind a cache.
    """
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None


class Reader(abc.ABC):
    """A model, a policy, and what has been read so far.

    Attributes:
        model: in the mode (training or not) in which it was given.
        policy: what a token may see of those before it.
    """

    def __init__(self, model: PreTrainedModel, policy: Policy) -> None:
        self.model, self.policy = model, policy

    @abc.abstractmethod
    def read(self, tokens: Tensor, attention_mask: Tensor | None = None, *, keep: int = 0) -> Tensor:
        """Logits for the token behind each of these, ``(batch, length or keep, vocab_size)``; no gradient.

        Args:
            tokens: int64 ``(batch, length)``; they go on where the last call ended; how a text is divided among calls does not
                matter.
            attention_mask: ``(batch, length)``, 1 for tokens and 0 for padding; of these tokens only.
            keep: logits of the last so many tokens; 0 for all.
        """

    def pass_over(self, tokens: Tensor) -> None:
        """Read tokens, ``(batch, length)`` without padding, whose logits nobody wants."""
        self.read(tokens, keep=1)

    @property
    @abc.abstractmethod
    def position(self) -> int:
        """Columns read so far, padding included."""

    @abc.abstractmethod
    def bytes_held(self) -> int:
        """Bytes of the keys and values that are kept between calls."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.model).__name__}; {self.telemetry()})"

    if not TYPE_CHECKING:  # or no name would be unknown to the type checker

        def __getattr__(self, name: str) -> NoReturn:
            """Only for what is not there: whoever asks for what a cache has was given a reader in its place."""
            instead = "; it is no cache. What reads with one has it as `.cache`, for generate()" if hasattr(Cache, name) else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{instead}", name=name, obj=self)

    def telemetry(self) -> Telemetry:
        """What is held, and what has gone, in figures.

        By default rows are taken to be without padding, and to hold what the policy lets them.
        """
        policy, seen = self.policy, self.position
        return Telemetry(
            policy=policy.describe(),
            seen=(seen,),
            held=(policy.max_held(seen),),
            capacity=policy.max_held(1 << 62) if policy.bounded else None,
            bytes=self.bytes_held(),
            rebases=0,
            highest_position=None,
        )

    @abc.abstractmethod
    def reset(self) -> None:
        """Begin a new text."""
