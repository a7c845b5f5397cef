"""Probes, one file each: what is measured. See CONTRIBUTING, "Add a probe"."""
