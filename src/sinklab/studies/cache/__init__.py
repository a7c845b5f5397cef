"""sinklab cache: loss, speed and memory under cache policies, and which one to use."""
