"""sinklab quantize: what quantisation costs a model, what carries the cost, and what cures it."""
