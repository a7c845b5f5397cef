"""The command ``pathways``: ways to do nothing, compared at equal compute and data, in one table."""
