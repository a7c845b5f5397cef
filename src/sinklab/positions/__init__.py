"""Position schemes, one file each: how a model knows where a token stands."""
