"""Corpora, one file each: where texts or tokens come from, with their identity. See CONTRIBUTING, "Add a corpus"."""

from sinklab.corpora._resolve import resolve_corpus

__all__ = ["resolve_corpus"]
