"""One audit: its plan, where it takes place, its targets and cells, and the findings that they become."""
