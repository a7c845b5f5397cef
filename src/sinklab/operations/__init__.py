"""Attention operations, one file each: how scores become weights. See CONTRIBUTING, "Add an operation"."""
