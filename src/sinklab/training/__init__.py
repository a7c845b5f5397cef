"""Pre-training: how our own models are trained, on Hugging Face's Trainer."""
