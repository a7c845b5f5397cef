"""Reproduction: from a published statement to the runs that test it, their numbers over seeds, and a verdict."""
