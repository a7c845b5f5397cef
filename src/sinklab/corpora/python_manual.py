"""The language reference of Python as the interpreter's own help has it: English prose without a download."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import platform
import random
import re
from collections.abc import Iterator
from typing import ClassVar

from sinklab.corpora.base import Identity, TextCorpus
from sinklab.errors import InputError
from sinklab.registry import corpora

__all__ = ["PythonManual"]

SHORTEST = 100
"""Characters of a paragraph."""


@corpora.register("python_manual")
class PythonManual(TextCorpus):
    """Prose for models that were made to talk: the paragraphs of ``help()`` on the language, without code and grammar.

    A passage starts at a paragraph, in an order drawn from the seed, and goes on through the manual to where it started. Lines
    are joined, and a paragraph that stands in several chapters is read once.

    Raises:
        InputError: this Python comes without the texts of its help.
    """

    topics: ClassVar[str] = "pydoc_data.topics"

    @classmethod
    def is_there(cls) -> bool:
        """Whether this Python comes with the texts of its help; some distributions leave them out."""
        return importlib.util.find_spec("pydoc_data") is not None and importlib.util.find_spec(cls.topics) is not None

    @property
    def identity(self) -> Identity:
        return Identity(
            source="language reference of Python, as its help has it",
            revision=f"{platform.python_implementation()}-{platform.python_version()}",
            licence="PSF-2.0; read in place, nothing is copied",
        )

    def passages(self, seed: int) -> Iterator[str]:
        starts = list(range(len(self._paragraphs)))
        random.Random(seed).shuffle(starts)
        for start in starts:
            yield "\n\n".join((*self._paragraphs[start:], *self._paragraphs[:start]))

    @functools.cached_property
    def _paragraphs(self) -> tuple[str, ...]:
        if not self.is_there():
            raise InputError("this Python comes without the texts of its help (pydoc_data); give a text file")
        texts: dict[str, str] = importlib.import_module(self.topics).topics
        blocks = (block for name in sorted(texts) for block in re.split(r"\n\s*\n", texts[name]))
        # Code, grammar and lists are indented; headings are short and end in no full stop.
        prose = (block for block in blocks if block[:1].isupper() and block.rstrip()[-1:] == "." and len(block) >= SHORTEST)
        return tuple(dict.fromkeys(" ".join(block.split()) for block in prose))
