"""sinklab backcopy: the models of Guo et al. 2024."""
