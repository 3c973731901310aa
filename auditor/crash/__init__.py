"""A private training loop of one's own, held against its claim."""
