"""Auditing: what a model does with its sinks, measured; the commands audit, measure, cache and causes."""
