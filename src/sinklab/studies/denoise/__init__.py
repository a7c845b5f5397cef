"""``sinklab denoise``: where the sinks of a masked language model are while it fills in a text, and what they are worth."""
