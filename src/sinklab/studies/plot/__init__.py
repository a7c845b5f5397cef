"""sinklab plot: curves and maps of training runs."""
