"""Read records from files, cut the records, and find their personal data."""
