"""Draw conclusions from a finished run: outcomes, claims, signals, differences. Knows no file
format."""
