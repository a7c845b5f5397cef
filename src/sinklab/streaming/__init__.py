"""Streaming: caches that stay bounded however long the text gets, and what a model loses under them."""
