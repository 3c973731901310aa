"""Make canaries, insert them into data, and list them in manifests."""
