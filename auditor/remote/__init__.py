"""Query a model behind an API: the connection, tests of its server, and the cost of queries."""
