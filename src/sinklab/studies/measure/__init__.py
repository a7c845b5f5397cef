"""sinklab measure: some probes over one model and one corpus."""
