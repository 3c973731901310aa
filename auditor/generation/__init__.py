"""Generate candidate suffixes by advancing decoding rows of a model."""
