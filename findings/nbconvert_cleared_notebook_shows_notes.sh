#!/usr/bin/env bash
# Guess: `jupyter nbconvert --clear-output` leaves nothing in a notebook of what its cells printed or showed.
# Library: nbconvert 7.17.2 (nbclient 0.11.0, ipywidgets 8.1.9, ipykernel 7.4.0; nbstripout 0.9.1 for comparison). Date: 2026-11-30.
# Seen: what was printed is gone. What a widget showed stays, word for word: a note in an HTML widget, the description of a progress
# bar, the notes of a list to choose from. It stands in the notebook's metadata, which no cell shows. nbstripout removes all four.
# Whoever publishes the notebook of a training or an audit, cleared in this way, publishes the private rows that it browsed.
# Why: clearing empties the outputs of cells; the state of widgets is kept for the notebook as a whole.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "nbconvert==7.17.2" "nbclient==0.11.0" "nbstripout==0.9.1" "ipywidgets==8.1.9" "ipykernel==7.4.0"
cd "$work"
export HOME="$work" JUPYTER_PLATFORM_DIRS=1 PATH="$work/venv/bin:$PATH"
python -W ignore - <<'PY'
import pathlib

from nbformat import write
from nbformat.v4 import new_code_cell, new_notebook

pathlib.Path("notes.txt").write_text("printed widget progress choice")
source = """
import ipywidgets
from IPython.display import display
printed, widget, progress, choice = [f"Quentin Zork, {word}" for word in open("notes.txt").read().split()]
print(printed)
display(ipywidgets.HTML(widget), ipywidgets.IntProgress(description=progress), ipywidgets.Select(options=[choice]))
"""
notebook = new_notebook(cells=[new_code_cell(source)])
notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
write(notebook, "notes.ipynb")
PY
jupyter-nbconvert --to notebook --execute notes.ipynb --output executed.ipynb 2> "$work/log"
cp executed.ipynb cleared.ipynb
cp executed.ipynb stripped.ipynb
jupyter-nbconvert --clear-output --inplace cleared.ipynb 2>> "$work/log"
nbstripout stripped.ipynb
changed=0
check() {
    words=$(grep -oE "Quentin Zork, (printed|widget|progress|choice)" "$1" | sed "s/.*, //" | sort -u | tr '\n' ' ' || true)
    echo "$1: ${words:-none}"
    if [ "$words" != "$2" ]; then changed=1; fi
}
check executed.ipynb "choice printed progress widget "
check cleared.ipynb "choice progress widget "
check stripped.ipynb ""
exit "$changed"
