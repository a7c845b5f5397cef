"""Claims: one file for each published statement about sinks; each defines one function that returns a Claim."""
