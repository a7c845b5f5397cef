"""Read-outs: one file for each set of numbers that is taken from a trained model."""
