"""sinklab export: the policy of a comparison as flags, a configuration or a script for another engine."""
