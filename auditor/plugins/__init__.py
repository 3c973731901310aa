"""What you may write, and what it is handed."""
