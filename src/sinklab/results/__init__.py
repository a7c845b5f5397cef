"""Results: one long table and a run record; needs neither torch nor transformers."""
