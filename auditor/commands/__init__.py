"""Commands of `audit` that fill a file each; `auditor/cli.py` registers them. Each parses and calls
one function."""
