"""Fine-tune and unlearn, privately or not, and plant gradient canaries."""
