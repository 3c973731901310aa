"""What is concluded from a finished run: outcomes, claims, signals, differences. Knows no file
format."""
