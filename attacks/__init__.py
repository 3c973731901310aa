"""Attacks: drop a file with an `Attack` subclass here and `audit list` shows it."""
