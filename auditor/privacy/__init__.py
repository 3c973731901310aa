"""Compute the privacy that may be promised, and read and write `privacy.json`."""
