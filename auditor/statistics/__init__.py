"""Numbers with intervals, and scores that distinguish members from non-members."""
