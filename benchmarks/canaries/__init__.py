"""Canaries: what they are made of, how they are inserted, and their manifests."""
