"""Corpora, one file each: where texts or tokens come from, with their identity. See CONTRIBUTING, "Add a corpus"."""
