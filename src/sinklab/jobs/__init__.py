"""Many runs: grids of settings and seeds, run in processes or on a Ray cluster, and gone on with."""
