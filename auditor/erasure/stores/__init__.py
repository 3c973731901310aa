"""Each file defines a kind of store that `audit erase` can examine."""
