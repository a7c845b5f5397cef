"""Summaries: the keys of ``summary.json`` and of the records that are made by one part of sinklab and read by another.

A module for each command. What each key means stands in docs/results.md and in the documentation of the command; here is of
which type it is.
"""
