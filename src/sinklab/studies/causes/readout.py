"""What is read off a model's outputs: a loss at every position."""

from __future__ import annotations

import abc
from typing import ClassVar

import torch
from torch import Tensor, nn

from sinklab.errors import ConfigurationError, UnsupportedModelError
from sinklab.models.losses import LogitMap, LossKind, cross_entropies, loss_kind
from sinklab.studies.causes.samples import Samples

FAR = 60.0
"""Change of a log-sum-exp beyond which exponentials of changes are not summed as they are; float32 ends at 88."""


class TokenChanges:
    """Cross-entropies of given targets, and what edits change about them, from hidden states.

    Args:
        hidden: what entered the map ``logits`` in the unedited model, ``(samples, seq_len, width)``.
        targets: int64 ``(samples, seq_len)``; anything where nothing is ``scored`` (boolean), where results are 0.
    """

    def __init__(self, logits: LogitMap, hidden: Tensor, targets: Tensor, scored: Tensor) -> None:
        self._logits = logits
        self._scored = scored.to(hidden.device)
        self._hidden = self._rows(hidden)[0]
        chosen = targets.to(hidden.device)[self._scored]
        self._log_sum_exp = logits.log_sum_exp(self._hidden)
        self._target_rows = logits.weight[chosen].to(self._hidden.dtype)
        self.clean_loss = self._spread((self._log_sum_exp - logits.of(self._hidden, chosen))[None])[0]

    def changes(self, hidden: Tensor) -> Tensor:
        """Change of the loss, ``(edits, samples, seq_len)``.

        Args:
            hidden: ``(edits * samples, seq_len, width)``, one edit after the other.
        """
        edited = self._rows(hidden)
        moved = edited - self._hidden
        if self._logits.coarse:
            change = self._logits.log_sum_exp_changes(self._hidden, self._log_sum_exp, moved)
        if not self._logits.coarse or not bool((change.abs() < FAR).all()):
            change = torch.stack([self._logits.log_sum_exp(states) for states in edited]) - self._log_sum_exp
        return self._spread(change - torch.linalg.vecdot(moved, self._target_rows))

    def _rows(self, hidden: Tensor) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return hidden.reshape(-1, *self._scored.shape, hidden.shape[-1])[:, self._scored].to(dtype)

    def _spread(self, values: Tensor) -> Tensor:
        result = values.new_zeros(len(values), *self._scored.shape)
        result[:, self._scored] = values
        return result


class Readout(abc.ABC):
    """What is read off a model's outputs. Losses are float32 or wider ``(samples, seq_len)``."""

    unit: ClassVar[str] = "nats"
    """Of the loss."""

    @abc.abstractmethod
    def outputs(self, outputs: object, samples: Samples) -> Tensor:
        """The tensor of a model's output that is compared, samples along its first axis.

        Raises:
            UnsupportedModelError: the output has nothing of the kind.
        """

    @abc.abstractmethod
    def loss(self, outputs: Tensor, samples: Samples) -> Tensor:
        """Loss at every position; anything where no domain is given."""

    def drawn(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """A score ``(samples, seq_len)`` whose gradient, along a small change, has half its mean square as the distance that
        the change makes, KL(unedited ‖ changed): the log-likelihood of a class that is drawn from the outputs, which are
        logits."""
        logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).log_softmax(-1)
        noise = torch.rand(logits.shape, generator=generator).clamp_min_(1e-20).log_().neg_().log_().neg_().to(logits)
        return logits.gather(-1, (logits.detach() + noise).argmax(-1, keepdim=True))[..., 0]

    def compare(self, clean: Tensor, samples: Samples) -> PlainChanges:
        """Changes relative to the outputs of the unedited model, as :meth:`loss` says."""
        return PlainChanges(self, clean, samples)

    def compare_hidden(self, hidden: Tensor, logits: LogitMap, samples: Samples) -> TokenChanges | None:
        """The same from the hidden states ``(samples, seq_len, width)`` that a vocabulary projection makes logits of;
        ``None`` where the readout needs the logits themselves."""
        return None


class PlainChanges:
    """What edits change about the readout of some samples, by definition: the unedited loss ``(samples, seq_len)``, and of
    outputs of edits one after the other, ``(edits * samples, …)``, changes of the loss ``(edits, samples, seq_len)``."""

    def __init__(self, readout: Readout, clean: Tensor, samples: Samples) -> None:
        self._readout, self._samples = readout, samples
        self.clean_loss = readout.loss(clean, samples)

    def changes(self, outputs: Tensor) -> Tensor:
        """Of every edit."""
        edits = outputs.split(len(self._samples))
        return torch.stack([self._readout.loss(logits, self._samples) for logits in edits]) - self.clean_loss


class _Tokens(Readout):
    """Cross-entropy of one token a position, in nats."""

    @abc.abstractmethod
    def targets(self, samples: Samples) -> Tensor:
        """The tokens asked for, int64 ``(samples, seq_len)``; anything where no domain is given."""

    def outputs(self, outputs: object, samples: Samples) -> Tensor:
        logits = getattr(outputs, "logits", None)
        fits = isinstance(logits, Tensor) and logits.ndim == 3 and logits.shape[1] == samples.domains.shape[1]
        return _required(logits, fits, "a loss of tokens needs logits (samples, seq_len, vocab_size)", samples)

    def loss(self, outputs: Tensor, samples: Samples) -> Tensor:
        targets = self.targets(samples).to(outputs.device).masked_fill(samples.domains.to(outputs.device) < 0, 0)
        return cross_entropies(outputs, targets)

    def compare_hidden(self, hidden: Tensor, logits: LogitMap, samples: Samples) -> TokenChanges | None:
        return TokenChanges(logits, hidden, self.targets(samples), samples.domains >= 0)


class NextToken(_Tokens):
    """Cross-entropy of the next token, in nats; targets are the tokens ``(samples, seq_len)`` themselves."""

    def targets(self, samples: Samples) -> Tensor:
        return _given(self, samples, "the tokens themselves").roll(-1, dims=1)


class MaskedToken(_Tokens):
    """Cross-entropy of the token at the very position, for models that fill gaps, in nats. Targets are the original tokens
    ``(samples, seq_len)``; positions that are not masked have no domain
    (:func:`~sinklab.studies.causes.samples.masked_samples`)."""

    def targets(self, samples: Samples) -> Tensor:
        return _given(self, samples, "the tokens before they were masked")


class ClassLogits(Readout):
    """Cross-entropy of one class a sample, in nats; losses are ``(samples, 1)``, logits ``(samples, classes)``, targets int64
    ``(samples,)``."""

    def outputs(self, outputs: object, samples: Samples) -> Tensor:
        logits = getattr(outputs, "logits", None)
        fits = isinstance(logits, Tensor) and logits.ndim == 2 and samples.domains.shape[1] == 1
        needs = "a loss of classes needs logits (samples, classes) and one scored position a sample"
        return _required(logits, fits, needs, samples)

    def loss(self, outputs: Tensor, samples: Samples) -> Tensor:
        targets = _given(self, samples, "a class a sample").to(outputs.device).reshape(-1, 1)
        return cross_entropies(outputs[:, None], targets)

    def drawn(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        return super().drawn(outputs, generator)[:, None]


READOUTS: tuple[type[Readout], ...] = (NextToken, MaskedToken, ClassLogits)
"""Those of the library, which hold nothing: what is measured by one depends on its class alone."""


def readout_for(model: nn.Module) -> Readout:
    """The readout of the task that a model was made for: next token, masked token or class.

    Raises:
        UnsupportedModelError: a model of another task, or none; a loss of target tokens, of which a text alone has none.
    """
    readouts: dict[LossKind, type[Readout]] = {"next token": NextToken, "masked token": MaskedToken, "class": ClassLogits}
    kind = loss_kind(model)
    if kind in readouts:
        return readouts[kind]()
    name = type(model).__name__
    if kind is not None:
        raise UnsupportedModelError(
            f"the loss of a {name} is taken of a {kind}, and a text alone has none; give samples with the inputs of both sides "
            "and the targets, and the readout MaskedToken(), which takes the loss of the target at every position"
        )
    raise UnsupportedModelError(
        f"no loss is known for a {name}; the tasks known are next token, masked token, target token and classification. "
        "Load the model with its head, or give a readout of your own"
    )


def _required(found: object, fits: bool, needs: str, samples: Samples) -> Tensor:
    if not isinstance(found, Tensor) or not fits:
        given = tuple(found.shape) if isinstance(found, Tensor) else "none"
        raise UnsupportedModelError(
            f"{needs}, and the model gives {given} with domains {tuple(samples.domains.shape)}; give a readout"
        )
    return found


def _given(readout: Readout, samples: Samples, what: str) -> Tensor:
    if samples.targets is None:
        raise ConfigurationError(f"{type(readout).__name__} needs targets, and the samples have none; give {what}")
    return samples.targets
