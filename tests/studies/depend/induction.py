"""A reader by construction: it copies what followed the longest earlier match of the last tokens, where that is visible."""

from __future__ import annotations

import torch

from sinklab.streaming.base import Reader


class InductionReader(Reader):
    """Retrieval without error from what the policy shows; a uniform guess from anything else."""

    vocab_size = 300

    def __init__(self, model, policy, *, needs_sink: bool = False, **_options: object) -> None:
        super().__init__(model, policy)
        self.needs_sink = needs_sink
        self.tokens = self.mask = None

    def read(self, tokens, attention_mask=None, *, keep=0):
        mask = torch.ones_like(tokens) if attention_mask is None else attention_mask
        self.tokens = tokens if self.tokens is None else torch.cat([self.tokens, tokens], dim=1)
        self.mask = mask if self.mask is None else torch.cat([self.mask, mask], dim=1)
        length = self.tokens.shape[1]
        columns = range(length - (keep or tokens.shape[1]), length)
        texts = [
            row[: column + 1][seen[: column + 1] > 0]
            for row, seen in zip(self.tokens, self.mask, strict=True)
            for column in columns
        ]
        logits = [self._logits(text) if len(text) else torch.zeros(self.vocab_size) for text in texts]
        return torch.stack(logits).unflatten(0, (len(tokens), -1))

    def _logits(self, row):
        logits = torch.zeros(self.vocab_size)
        query = len(row) - 1
        visible = self.policy.visible(torch.tensor(query), torch.arange(len(row))).tolist()
        if self.needs_sink and not visible[0]:
            # A guess that differs from text to text, so that ties are not all broken alike.
            return torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(int(row.sum()) + query))
        ids, best, longest = row.tolist(), None, 1
        for key in range(query - 1, 0, -1):
            match = 0
            while match < key and visible[key - match] and ids[key - match] == ids[query - match]:
                match += 1
            if match > longest and visible[key + 1]:
                best, longest = ids[key + 1], match
        if best is None:
            return torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(int(row.sum()) + query))
        logits[best] = 20.0
        return logits

    @property
    def position(self):
        return 0 if self.tokens is None else self.tokens.shape[1]

    def bytes_held(self):
        return 0

    def reset(self):
        self.tokens = self.mask = None
