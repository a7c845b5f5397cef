"""Summaries: the keys of ``summary.json`` and of the records that are made by one part of sinklab and read by another.

A module for each command. What each key means stands in docs/reference.md#results and in the documentation of the command; here is of
which type it is.
"""
