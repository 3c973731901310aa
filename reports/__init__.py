"""From a run folder to what people read, names of strangers made harmless; `schema.json` is the
form of `result.json`.

A report is a pure function of the run folder.
"""
