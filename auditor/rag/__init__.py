"""Measure the documents, personal data and membership that a retrieval system gives away."""
