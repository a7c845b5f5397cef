"""sinklab stream: text without end, on the terminal."""
