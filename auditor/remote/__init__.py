"""A model behind an API: what its server really does, and what asking it costs."""
