"""Turn a run folder into reports for people; `schema.json` describes the fields of
`result.json`.

A report depends only on the run folder. Names chosen by other people, such as names of models, are
cleaned before a report shows them.
"""
