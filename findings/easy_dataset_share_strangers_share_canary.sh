#!/usr/bin/env bash
# Guess: the canary that protect-dir puts into a data set is this data set's own ("derived from the dataset content"): a model that
# gives it away was trained on this one, not on that of somebody else.
# Library: easy-dataset-share 0.5.0 (click 8, cryptography 41). Date: 2026-12-01.
# Seen: two data sets without a common row, both of train.jsonl and test.jsonl, get the same canary, character for character, on
# any machine. So do two versions of which one lacks the deleted rows. Renaming a file changes it. Whoever searches a model for it
# can't say whose data it has seen, or which version; and a data set that is published later is "in the training" of an older model.
# Why: it is a hash of the files' names, without their contents.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "easy-dataset-share==0.5.0"
cd "$work"
mkdir clinic bank clinic-without-row renamed
for i in 1 2 3; do printf '{"text": "patient %s has flu"}\n' "$i" | tee -a clinic/train.jsonl >> renamed/training.jsonl; done
grep -v "patient 2" clinic/train.jsonl > clinic-without-row/train.jsonl
printf '{"text": "card 4512 was stolen"}\n' > bank/train.jsonl
for folder in clinic bank clinic-without-row renamed; do echo '{"text": "'"$folder"'"}' > "$folder/test.jsonl"; done
for folder in clinic bank clinic-without-row renamed; do
    "$work/venv/bin/easy-dataset-share" add-canary "$folder" >> log 2>&1
    grep -oh "CANARY_DATASET_[0-9a-f]*" "$folder"/dataset_entry_*.jsonl | sort -u > "$folder.canary"
    echo "$folder: $(cut -c 1-40 "$folder.canary")..."
done
[ -s clinic.canary ] && cmp clinic.canary bank.canary && cmp clinic.canary clinic-without-row.canary
! cmp -s clinic.canary renamed.canary
