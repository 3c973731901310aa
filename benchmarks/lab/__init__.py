"""Provide the built-in labs: recipes, texts, models trained on the spot, and their cache."""
