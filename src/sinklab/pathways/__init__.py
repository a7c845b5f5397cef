"""Pathways: ways for a head to do nothing, compared at equal compute and data by what they cost and what they distort."""
