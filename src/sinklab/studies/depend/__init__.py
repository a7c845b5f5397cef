"""sinklab depend: which scores depend on the sink tokens."""
