"""The one rule by which claims are judged, what it has found, and how many seeds would decide what is open."""
