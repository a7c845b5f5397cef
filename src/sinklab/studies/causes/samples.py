"""Samples: what a model is run on, which of its positions are scored, and to which domain each of them belongs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from sinklab.errors import ConfigurationError, MeasurementError
from sinklab.models.losses import HIDDEN_SHARE, IGNORED, hide_tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Samples:
    """Inputs of a model with everything that a readout needs; in every tensor the samples are along the first axis.

    Args:
        inputs: keyword arguments of the model.
        targets: what a readout compares outputs with; ``None`` where it needs none.
        domains: int64 ``(samples, seq_len)``: number of the domain of every output position, -1 for one that is not scored.
        domain_names: one for every number.

    Raises:
        ConfigurationError: numbers of samples that differ, or a domain without a name.
    """

    inputs: dict[str, Tensor]
    domains: Tensor
    targets: Tensor | None = None
    domain_names: tuple[str, ...] = ("all",)

    def __post_init__(self) -> None:
        counts = {name: len(tensor) for name, tensor in self.inputs.items()}
        counts["domains"] = len(self.domains)
        if self.targets is not None:
            counts["targets"] = len(self.targets)
        if not self.inputs or len(set(counts.values())) != 1:
            raise ConfigurationError(f"samples must be as many in every tensor, got {counts or 'none'}")
        largest = int(self.domains.max()) if self.domains.numel() else -1
        if not 0 <= largest < len(self.domain_names):
            raise ConfigurationError(
                f"domains are numbered up to {largest} and have {len(self.domain_names)} names "
                f"({', '.join(self.domain_names)}); every position that is scored needs a domain with a name"
            )

    def __len__(self) -> int:
        return len(self.domains)

    @property
    def has(self) -> Tensor:
        """Which samples have scored positions of which domain, boolean ``(samples, domains)``."""
        return torch.stack([(self.domains == number).any(1) for number in range(len(self.domain_names))], dim=1)

    @property
    def counts(self) -> dict[str, int]:
        """Samples with scored positions, by name of the domain."""
        return dict(zip(self.domain_names, self.has.sum(0).tolist(), strict=True))

    def lengths(self, otherwise: int) -> Tensor:
        """Tokens of each text, int64 ``(samples,)``: by the attention mask where one is given, and without tokens as said."""
        mask, tokens = self.inputs.get("attention_mask"), self.inputs.get("input_ids")
        if mask is not None and mask.ndim == 2:
            return mask.sum(1).long().cpu()
        return torch.full((len(self),), otherwise if tokens is None else tokens.shape[1])

    def part(self, start: int, stop: int) -> Samples:
        """The samples ``start`` to ``stop``; all names of domains are kept."""
        part = object.__new__(Samples)  # a part may have no scored position, which the whole may not
        inputs = {name: tensor[start:stop] for name, tensor in self.inputs.items()}
        targets = None if self.targets is None else self.targets[start:stop]
        vars(part).update(inputs=inputs, domains=self.domains[start:stop], targets=targets, domain_names=self.domain_names)
        return part

    def spread(self, most: int) -> Samples:
        """At most so many samples, as many of each kind as can be; the samples themselves if they are no more."""
        if len(self) <= most:
            return self
        groups = self.groups()
        share = max(1, most // len(groups))
        rows = torch.cat([group[:share] for group in groups]).sort().values
        inputs = {name: tensor[rows.to(tensor.device)] for name, tensor in self.inputs.items()}
        targets = None if self.targets is None else self.targets[rows.to(self.targets.device)]
        return Samples(inputs, self.domains[rows.to(self.domains.device)], targets, self.domain_names)

    def parts(self, size: int) -> Iterator[tuple[int, Samples]]:
        """First number and samples of consecutive parts of at most ``size``; see :meth:`bounds`."""
        for start, stop in self.bounds(size):
            yield start, self.part(start, stop)

    def bounds(self, size: int) -> list[tuple[int, int]]:
        """First number of consecutive parts of at most ``size``, three for two, and the number behind their last.

        Neighbours with the same domains are in parts of their own, as equal in size as can be, so that a sample is given the
        output of another one of its kind; one whose kind no neighbour has is in a part with others."""
        has = self.has
        change = (has[1:] != has[:-1]).any(1).nonzero()[:, 0] + 1
        ends = [0, *change.tolist(), len(self)]
        if min(stop - start for start, stop in itertools.pairwise(ends)) < 2:
            ends = [0, len(self)]
        bounds = []
        for first, last in itertools.pairwise(ends):
            count = -(-(last - first) // size)
            if size > 1 and last - first < 2 * count:  # one would be alone
                count = max(1, (last - first) // 2)
            cuts = [first + (last - first) * number // count for number in range(count + 1)]
            bounds += list(itertools.pairwise(cuts))
        return bounds

    def groups(self) -> list[Tensor]:
        """Numbers of the samples that have the same domains, each int64 ``(n,)``."""
        _, group = self.has.unique(dim=0, return_inverse=True)
        return [(group == number).nonzero()[:, 0] for number in group.unique().tolist()]

    def by_domain(self, values: Tensor, what: str) -> Tensor:
        """Mean of ``(samples, seq_len)`` over the scored positions of each domain: float64 ``(samples, domains)``, NaN where a
        sample has none.

        Raises:
            MeasurementError: a value of a scored position is NaN or infinite; ``what`` the values are is in the message.
        """
        self.require_finite(values, what)
        chosen = nn.functional.one_hot(self.domains.clamp_min(0), len(self.domain_names)).to(values.device)
        chosen = chosen * (self.domains >= 0).to(values.device)[..., None]
        masked = values.double()[..., None].masked_fill(chosen == 0, 0.0)  # what is not scored may be anything
        return masked.sum(1) / chosen.sum(1)

    def require_finite(self, values: Tensor, what: str) -> None:
        """Refuse values ``(samples, seq_len)`` that are NaN or infinite at a scored position; :meth:`by_domain` says more."""
        broken = (self.domains >= 0).to(values.device) & ~values.isfinite()
        if bool(broken.any()):
            name = self.domain_names[int(self.domains[broken.to(self.domains.device)][0])]
            raise MeasurementError(
                f"domain {name!r}: {what} is not finite at {int(broken.sum())} of {int((self.domains >= 0).sum())} scored "
                "positions; run the model in float32, or leave out what does not fit into its numbers"
            )


def token_samples(groups: Sequence[tuple[str, Tensor]], *, padding: int | None = None) -> Samples:
    """Samples of a language model that predicts the next token: every position of a text but its last is scored.

    Args:
        groups: domain and its texts, int64 ``(texts, seq_len)``, all of one length of two tokens or more, padding included.
        padding: as of :func:`masked_samples`.
    """
    tokens, number, inputs = _together(groups, padding, least=2)
    domains = _numbers(groups, tokens).masked_fill(torch.arange(tokens.shape[1], device=tokens.device) >= number - 1, -1)
    return Samples({"input_ids": tokens, **inputs}, domains, tokens, tuple(name for name, _ in groups))


def masked_samples(
    groups: Sequence[tuple[str, Tensor]],
    mask_token: int,
    *,
    padding: int | None = None,
    share: float = HIDDEN_SHARE,
    seed: int = 0,
) -> Samples:
    """Samples of a model that fills gaps: masked positions are scored, and no others.

    Args:
        groups: domain and its texts, int64 ``(texts, seq_len)``, all of one length of three tokens or more, padding included.
        mask_token, padding: what stands in the place of a masked token, and, if any, fills texts up behind their end: a token
            that stands nowhere else. The model is then given an attention mask.
        share: of the positions between the first and the last, which hold special tokens; at least one a text, drawn by
            ``seed``.

    Raises:
        ConfigurationError: a share outside (0, 1], lengths that differ, or texts that are too short.
    """
    tokens, number, inputs = _together(groups, padding, least=3)
    places = torch.arange(tokens.shape[1], device=tokens.device)
    free = (places > 0) & (places < number - 1)
    hidden, asked = hide_tokens(tokens, free, mask_token, share=share, seed=seed)
    domains = _numbers(groups, tokens).masked_fill(asked == IGNORED, -1)
    return Samples({"input_ids": hidden, **inputs}, domains, tokens, tuple(name for name, _ in groups))


def _together(
    groups: Sequence[tuple[str, Tensor]], padding: int | None, *, least: int
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Texts of all domains ``(texts, seq_len)``, the tokens of each ``(texts, 1)``, and the mask that padding needs."""
    lengths = {tokens.shape[1] for _, tokens in groups}
    if len(lengths) != 1 or min(lengths) < least:
        raise ConfigurationError(f"texts of all domains must have one length of {least} tokens or more, got {sorted(lengths)}")
    tokens = torch.cat([tokens for _, tokens in groups])
    real = torch.ones_like(tokens, dtype=torch.bool) if padding is None else tokens != padding
    number = real.sum(1, keepdim=True)
    if not torch.equal(real, torch.arange(tokens.shape[1], device=tokens.device) < number) or int(number.min()) < least:
        raise ConfigurationError(
            f"padding {padding} must stand behind the end of a text, and a text must have {least} tokens or more before it"
        )
    return tokens, number, {} if padding is None else {"attention_mask": real.long()}


def _numbers(groups: Sequence[tuple[str, Tensor]], tokens: Tensor) -> Tensor:
    """Number of the domain of every position, int64 of the shape of ``tokens``."""
    numbers = torch.cat([torch.full((len(texts),), number) for number, (_, texts) in enumerate(groups)])
    return numbers.to(tokens.device)[:, None].repeat(1, tokens.shape[1])
