"""sinklab card: what a run found, as the section of a model card and as the metadata that the hub reads."""
