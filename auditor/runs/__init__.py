"""One audit: where it takes place, in which text form, its targets and cells, the findings that they become; mitigation."""
