"""Judge finished runs by limits, compare runs, and compute how many secrets a gate needs."""
