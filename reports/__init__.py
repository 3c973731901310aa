"""From a run folder to what people read; `schema.json` is the form of `result.json`.

A report is a pure function of the run folder.
"""
