"""Sampling: from the logits of one step to the next token of every row, with nothing that grows from step to step."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from sinklab.errors import ConfigurationError, InputError
from sinklab.results.requirements import require_number, require_whole

__all__ = ["Sampler", "Sampling"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; the words mean what they mean in transformers' ``generate()``.

    Penalties for repetition are not offered: they look at every token so far, and a stream does not keep those.

    Attributes:
        temperature: 0 takes the likeliest token; otherwise logits are divided by it before one is drawn.
        top_k: draw from so many of the likeliest tokens.
        top_p: draw from the likeliest tokens that together have this probability, above 0 and at most 1.
        seed: of the draws, which are those of ``generate()`` after ``torch.manual_seed(seed)``.

    Raises:
        ConfigurationError: a value out of range, or one that would have no effect at temperature 0.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature)
        if self.top_k is not None:
            require_whole("top_k", self.top_k, 1)
        if self.top_p is not None:
            require_number("top_p", self.top_p)
        require_whole("seed", self.seed, 0)
        if not 0 <= self.temperature < float("inf"):
            raise ConfigurationError(f"temperature {self.temperature} must be 0 (the likeliest token) or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigurationError(f"top_p {self.top_p} must be above 0 and at most 1")
        given = next((name for name in ("top_k", "top_p", "seed") if getattr(self, name) not in (None, 0)), None)
        if self.temperature == 0 and given:
            raise ConfigurationError(
                f"{given} has no effect at temperature 0, which takes the likeliest token; give a temperature"
            )


class Sampler:
    """Chooses tokens as a :class:`Sampling` says; draws go on from call to call.

    Attributes:
        generator: source of the draws; its state is what must be kept to go on with the same ones.
    """

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self.sampling = sampling
        self.generator = torch.Generator(device).manual_seed(sampling.seed)
        self._warpers = LogitsProcessorList()
        # The order of generate(): which tokens top_p leaves depends on what came before it.
        if sampling.temperature not in (0, 1):
            self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k is not None:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p is not None and sampling.top_p < 1:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, logits: Tensor) -> Tensor:
        """The next token of every row, int64 ``(batch,)``, from logits ``(batch, vocab_size)``.

        Raises:
            InputError: logits that are NaN or infinite.
        """
        logits = logits.to(torch.float32)
        # NaN wins a maximum, and a row that is hidden altogether has none that is finite.
        if not bool(logits.amax(dim=-1).isfinite().all()):
            raise InputError(
                "the model's logits are NaN or infinite, so there is no next token; try dtype float32, or audit the checkpoint"
            )
        if self.sampling.temperature == 0:
            return logits.argmax(dim=-1)
        no_ids = torch.empty(len(logits), 0, dtype=torch.long, device=logits.device)  # none of these warpers looks at them
        scores = self._warpers(no_ids, logits)
        return torch.multinomial(scores.softmax(dim=-1), num_samples=1, generator=self.generator)[:, 0]
