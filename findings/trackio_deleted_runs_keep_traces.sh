#!/usr/bin/env bash
# Guess: delete() of a run, "metrics, config, [...] traces", and delete_project() remove the conversations and the pages that
# the run logged.
# Library: trackio 0.43.0, everything local. Date: 2026-11-29.
# Seen: the database has none of them, and delete() returns True; but each trace, the whole conversation, was written a second
# time, to traces/PROJECT/RUN/*.jsonl, and pages and pictures lie in media/PROJECT/RUN: both stay after delete(). After
# delete_project(), which reports that the project is deleted, the traces still stay, media do not.
# Exits 0 if that is still so, 1 if it changed. Nothing leaves the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "trackio==0.43.0"
mkdir "$work/logs"
cd "$work"
HOME="$work" TRACKIO_DIR="$work/logs" "$work/venv/bin/python" -W ignore - <<'PY' 2> "$work/log"
import contextlib
import pathlib
import sys

import trackio

logs = pathlib.Path("logs")


def find_name():
    files = [path for path in logs.rglob("*") if path.is_file() and b"Quentin Zork" in path.read_bytes()]
    return sorted({path.relative_to(logs).parts[0] for path in files})


with contextlib.redirect_stdout(sys.stderr):
    trackio.init(project="notes", name="run")
    trackio.log({"page": trackio.Html("<p>Quentin Zork has lymphoma</p>")})
    trackio.log({"talk": trackio.Trace(messages=[{"role": "user", "content": "I am Quentin Zork"}])})
    trackio.finish()
    before = find_name()
    (run,) = trackio.Api().runs("notes")
    deleted = run.delete()
    after_run = find_name()
    project_deleted = trackio.delete_project("notes", force=True)
    after_project = find_name()
print(f"name in {before}; delete() returns {deleted}, name in {after_run}")
print(f"delete_project() returns {project_deleted}, name in {after_project}")
found = [before, after_run, after_project]
sys.exit(not (deleted and project_deleted and found == [["media", "notes.db", "traces"], ["media", "traces"], ["traces"]]))
PY
