"""show: every head of a model on one text or picture, in one line of a notebook."""
