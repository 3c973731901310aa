"""Query language models, combinations of several models, and models with records in context."""
