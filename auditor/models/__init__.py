"""What a language model can be asked."""
