"""Fine-tuning, private or not."""
