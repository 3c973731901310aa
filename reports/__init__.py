"""Turn a run folder into reports for people; `schema.json` describes the fields of `result.json`.

A report depends only on the run folder. Names that other people chose, such as the names of models,
are cleaned before they are shown.
"""
