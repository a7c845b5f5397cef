"""Cache policies, one file each: what a bounded cache keeps. See :mod:`sinklab.streaming.policy` for the contract."""
