"""Candidates, by walking rows of a model."""
