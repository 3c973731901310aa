"""A model behind an API: the connection, what its server really does, and what asking it costs."""
