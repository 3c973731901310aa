"""Nouns, errors, files: what everybody stands on."""
