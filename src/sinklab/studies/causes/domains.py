"""Texts for the causes of sinks: rows of some corpora as samples of a model that predicts next tokens, or masked ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from sinklab.corpora import resolve_corpus
from sinklab.corpora._reading import written_corpus
from sinklab.corpora.base import Corpus, hash_tokens
from sinklab.corpora.records import Records
from sinklab.errors import ConfigurationError, InputError, UnsupportedModelError, calling
from sinklab.models.drawing import AUTO, default_corpus
from sinklab.models.loading import LoadedModel
from sinklab.models.positions import learned_positions, require_positions, trained_length
from sinklab.studies.causes.readout import MaskedToken, NextToken, Readout, readout_for
from sinklab.studies.causes.samples import Samples, masked_samples, token_samples

TEXTS, LENGTH = 64, 256
"""Texts of a domain and their tokens, if the model was trained on as many. That something costs is shown by a few dozen; that
it costs nothing by some 250 at the least (:mod:`~sinklab.studies.causes.labels`), and by more where effects vary."""
LARGE, OF_LARGE = 5e7, (18, 64)
"""Parameters from which on a model is read fewer and shorter texts: an edit of a head costs it as much as a forward."""

FROM_PYTHON = (
    "from Python, find_causes(model, samples=..., readout=...) takes any inputs and what is to be read off the outputs"
)


@dataclasses.dataclass(frozen=True)
class Texts:
    """Samples with the readout that fits the model, and what the run record says of them."""

    samples: Samples
    readout: Readout
    record: list[dict[str, object]]

    @property
    def of_each(self) -> object:
        """Texts of each domain, as the option counts them; of inputs from Python, which need not be as many, all of them."""
        return self.record[0].get("texts", len(self.samples))


def default_texts(
    loaded: LoadedModel,
    domains: Sequence[str | Corpus],
    *,
    texts: int | None = None,
    seq_len: int | None = None,
    seed: int,
    bos: bool,
) -> Texts:
    """Texts of every domain, by default as many and as long as the size of the model, its training and its positions, say; a
    domain is called what its corpus is on tables and pages."""
    corpora = [default_corpus(loaded) if domain == AUTO else resolve_corpus(domain) for domain in domains]
    names = [
        corpus.name if domain in (corpus.name, AUTO) else corpus.label for domain, corpus in zip(domains, corpora, strict=True)
    ]
    if len(set(names)) < len(names):  # files of one name in two folders
        names = [domain if isinstance(domain, str) else domain.name for domain in domains]
    most = learned_positions(loaded.model) or trained_length(loaded.model) or LENGTH
    large = sum(parameter.numel() for parameter in loaded.model.parameters()) > LARGE
    number, length = OF_LARGE if large else (TEXTS, LENGTH)
    return texts_of(
        loaded, list(zip(names, corpora, strict=True)), texts=number if texts is None else texts,
        seq_len=min(length, most) if seq_len is None else seq_len, seed=seed, bos=bos,
    )  # fmt: skip


def texts_of(
    loaded: LoadedModel, corpora: Sequence[tuple[str, Corpus]], *, texts: int, seq_len: int, seed: int, bos: bool
) -> Texts:
    """As many texts of every corpus, each corpus a domain with a name.

    Models that predict the next token are scored at every position but the last. Of models of masked tokens 15 % of the tokens
    are replaced by the mask token, and scored there alone. Records are read whole (``seq_len`` at most) and padded to the
    longest.

    Raises:
        ConfigurationError: a corpus twice, a mask token that the tokenizer has not, or texts longer than the table of
            positions.
        InputError: a corpus that is too short, or that the model cannot read.
        UnsupportedModelError: a model without a loss of tokens.
    """
    names = [name for name, _ in corpora]
    if len(set(names)) < len(names) or not names:
        raise ConfigurationError(f"`domains` {','.join(names) or 'with nothing'}: name at least one corpus, and each once")
    try:
        readout = readout_for(loaded.model)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{error}; {FROM_PYTHON}") from error
    if not isinstance(readout, (NextToken, MaskedToken)):
        raise UnsupportedModelError(f"{type(loaded.model).__name__} is not a model of texts; {FROM_PYTHON}")
    mask: int | None = getattr(loaded.tokenizer, "mask_token_id", None)
    if isinstance(readout, MaskedToken) and mask is None:
        raise ConfigurationError(
            f"{type(loaded.model).__name__} predicts masked tokens, and its tokenizer has no mask token to hide them with; "
            f"{FROM_PYTHON}"
        )
    rows = []
    for _, corpus in corpora:
        with calling(samples="texts"):  # `samples` are here inputs of one's own, and the command line has no such option
            if isinstance(corpus, Records):
                rows.append(corpus.whole(loaded.encoder, seq_len=seq_len, samples=texts, seed=seed, bos=bos))
            else:
                sampled = corpus.sample(loaded.encoder, seq_len=seq_len, samples=texts, seed=seed, bos=bos)
                rows.append(sampled.tolist())
    tokens, padding = _padded(rows, [*loaded.encoder.special_ids, *range(loaded.encoder.vocab_size)])
    require_positions(loaded.model, tokens[0].shape[1])
    groups = list(zip(names, tokens, strict=True))
    record = [
        {
            "domain": name,
            "texts": texts,
            "settings": written_corpus(corpus),
            **dataclasses.asdict(corpus.identity),
            "token_sha256": hash_tokens(ids),
        }
        for (name, corpus), ids in zip(corpora, tokens, strict=True)
    ]
    if isinstance(readout, MaskedToken):
        assert mask is not None  # refused above
        return Texts(masked_samples(groups, mask, padding=padding, seed=seed), readout, record)
    return Texts(token_samples(groups, padding=padding), readout, record)


def _padded(rows: Sequence[list[list[int]]], ids: Sequence[int]) -> tuple[list[Tensor], int | None]:
    """Rows of every domain as int64 ``(texts, longest)``, and the id behind the end of the shorter ones."""
    longest = max(len(row) for texts in rows for row in texts)
    if all(len(row) == longest for texts in rows for row in texts):
        return [torch.tensor(texts) for texts in rows], None
    used = {token for texts in rows for row in texts for token in row}
    padding = next((token for token in ids if token not in used), None)
    if padding is None:
        raise InputError("records of different lengths need an id to pad with, and these hold every one of the vocabulary")
    return [torch.tensor([row + [padding] * (longest - len(row)) for row in texts]) for texts in rows], padding
