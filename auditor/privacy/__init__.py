"""What may be promised, and `privacy.json`."""
