"""Records read from files: tables, conversations, prepared rows, cuts, personal data."""
