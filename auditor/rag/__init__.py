"""What a retrieval system gives away of its documents: shown text, personal data, membership."""
