"""Recipes, one file each: functions that return the configuration of a pre-training run."""
