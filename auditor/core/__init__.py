"""Define what every other package builds on: nouns (plan, secrets, results), errors and files."""
