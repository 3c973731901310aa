"""One audit: where it takes place, its text form, its targets and cells, the findings they become;
mitigation."""
