"""Read-outs: numbers of one trained model; each is a function that is registered under its name."""
