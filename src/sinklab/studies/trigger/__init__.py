"""sinklab trigger: the task of Ran-Milo 2026, its models, constructions and bounds."""
