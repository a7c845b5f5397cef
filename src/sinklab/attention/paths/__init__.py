"""Paths: the ways to compute an operation, from plain rows to fused kernels."""
