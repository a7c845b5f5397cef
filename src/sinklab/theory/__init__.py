"""Theory as code: bounds, closed forms, exact constructions and certificates about sinks; see docs/theory.md."""
