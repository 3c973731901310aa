"""What a defense costs."""
