"""sinklab sweep: a grid of training runs."""
