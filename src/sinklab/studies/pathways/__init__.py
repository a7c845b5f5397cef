"""sinklab pathways: the ways in which a head can do nothing, side by side."""
