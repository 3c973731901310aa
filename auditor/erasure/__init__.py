"""Examine whether a deletion from a store removed the text and the vectors, layer by layer."""
