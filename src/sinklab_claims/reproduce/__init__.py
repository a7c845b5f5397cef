"""The commands ``reproduce`` and ``claims``: trainings and measurements behind claims, kept in a store, and judged."""
