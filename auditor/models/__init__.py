"""What a language model can be asked; models made of several, or of records in context."""
