"""sinklab fold: the sinks of a trained model made explicit: a score and a value for nothing in every head that rests on one."""
