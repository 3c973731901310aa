"""Nouns (plan, secrets, findings, results), errors, files: what everybody stands on."""
