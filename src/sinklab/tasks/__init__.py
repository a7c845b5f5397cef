"""Tasks, one file each: texts with questions whose answers are known, to score a model under a cache policy."""
