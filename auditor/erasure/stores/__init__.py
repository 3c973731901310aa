"""One file a kind of store: what `audit erase` can look into."""
