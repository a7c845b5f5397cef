"""Studies: what each command does, a folder each; above all that measures, below the command line."""
