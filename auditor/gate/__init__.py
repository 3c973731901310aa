"""Finished runs against limits and against each other."""
