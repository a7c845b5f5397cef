"""The one attention function: what a call is, who may look at it, and the statistics it is reduced to."""
