"""Cache policies, one file each: what a bounded cache keeps. See :mod:`sinklab.policies.base` for the contract."""
