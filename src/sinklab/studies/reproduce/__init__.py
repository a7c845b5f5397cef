"""sinklab reproduce and claims: claims run, judged and kept."""
