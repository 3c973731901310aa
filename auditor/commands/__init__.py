"""Define the commands of `audit`, one per file; `auditor/cli.py` registers them.

Each command parses its flags and calls one function.
"""
