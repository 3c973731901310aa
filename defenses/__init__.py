"""Defenses: drop a file with a `Defense` subclass here and `audit list` shows it."""
