"""Fine-tuning and unlearning, private or not; canaries among gradients."""
