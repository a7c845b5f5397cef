"""Models: our own configurable decoder, loading of any checkpoint, and the embedded checkpoints."""
