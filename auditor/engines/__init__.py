"""Who does the work: this process, or a cluster's workers."""
