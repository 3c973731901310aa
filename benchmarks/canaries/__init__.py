"""Canaries: their texts, insertion and manifests."""
