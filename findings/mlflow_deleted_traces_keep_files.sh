#!/usr/bin/env bash
# Guess: a trace (what a model was asked and what it answered) is stored once, in the database, and delete_traces()
# removes it.
# Library: mlflow 3.17.2, tracking in a SQLite file, everything else as it comes. Date: 2026-11-28.
# Seen: of 40 traces a part that changes from run to run (12, 13 and 23 in three runs) is written a second time, to traces.json among the
# artifacts. delete_traces() reports 40 deleted, the database has none; the files stay, also after the experiment is
# deleted and `mlflow gc` has run. With MLFLOW_ENABLE_ASYNC_TRACE_LOGGING=false no such file is written.
# Why: the thread that exports a trace also writes the file unless its spans reached the database first.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "mlflow==3.17.2"
cat >"$work/trace.py" <<'PY'
import sys
from pathlib import Path

import mlflow

mlflow.set_tracking_uri("sqlite:///traces.db")
experiment = mlflow.set_experiment("questions").experiment_id


@mlflow.trace
def answer(question):
    return f"answer to {question}"


for i in range(40):
    answer(f"private question {i:02d}")
mlflow.flush_trace_async_logging()
traces = mlflow.search_traces(return_type="list")
trace_ids = [trace.info.trace_id for trace in traces]
n_deleted = mlflow.MlflowClient().delete_traces(experiment_id=experiment, trace_ids=trace_ids)
n_listed = len(mlflow.search_traces(return_type="list"))
mlflow.delete_experiment(experiment)
files = list(Path("mlruns").rglob("traces.json"))
n_files = sum("private question" in path.read_text() for path in files)
in_database = b"private question" in Path("traces.db").read_bytes()
print(f"{len(traces)} traces, {n_deleted} deleted, {n_listed} listed, in the database: {in_database}, files: {n_files}")
sys.exit(not (n_deleted == 40 and n_listed == 0))
PY
export MLFLOW_DISABLE_TELEMETRY=true DO_NOT_TRACK=true
declare -A n_files
for asynchronous in true false; do
    mkdir "$work/$asynchronous"
    cd "$work/$asynchronous"
    echo "MLFLOW_ENABLE_ASYNC_TRACE_LOGGING=$asynchronous"
    MLFLOW_ENABLE_ASYNC_TRACE_LOGGING=$asynchronous "$work/venv/bin/python" -W ignore ../trace.py 2>"$work/log"
    "$work/venv/bin/mlflow" gc --tracking-uri sqlite:///traces.db \
        --backend-store-uri sqlite:///traces.db 2>>"$work/log"
    n_files[$asynchronous]=$( (grep -rl "private question" mlruns || true) 2>/dev/null | wc -l)
    echo "files with a deleted question after gc: ${n_files[$asynchronous]}"
done
[ "${n_files[true]}" -gt 0 ] && [ "${n_files[false]}" -eq 0 ]
