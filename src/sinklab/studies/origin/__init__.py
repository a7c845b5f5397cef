"""sinklab origin: where a sink is born: block, sublayer, channels, neurons, weights; and what goes when these are silenced."""
