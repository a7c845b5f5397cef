"""sinklab causes: what every head does with its sink, by editing it."""
