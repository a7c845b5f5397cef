"""One file per engine; each has an ENGINE, and its name is how a user calls it."""
