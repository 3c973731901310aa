"""Check the user's own private training loop against its privacy claim."""
