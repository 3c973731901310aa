"""Whether a deletion from a store removed the text and the vectors: layers, each with a control."""
