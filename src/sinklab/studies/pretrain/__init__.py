"""sinklab pretrain: one training run from a recipe."""
