"""sinklab retrieval: a trigger that looks something up."""
