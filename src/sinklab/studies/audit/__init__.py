"""sinklab audit: every probe, the sinks, a summary in words, a report."""
