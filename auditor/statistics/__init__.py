"""Numbers with intervals, and scores that tell members."""
