#!/usr/bin/env bash
# Guess: remove() keeps a note in the file, as its docstring says ("remains in the file for audit purposes");
# doctor(vacuum=True) takes it out, at the latest together with a new index of words.
# Library: memvid-sdk 2.0.160. Date: 2026-11-30.
# Seen: doctor() reports "healed" and "vacuum completed", and of 6 removed notes among 60 all texts stay in the file, word for
# word, also with rebuild_lex_index and rebuild_time_index. stats() counts 60 frames, 54 of them active. A search finds none of
# the 6, but frame("mv2://frames/13") still returns the removed note's words as its tags. No other call was found that removes
# them: whoever must delete has to write the remaining notes to a new file, and the file is what is passed on.
# Exits 0 if that is still so, 1 if it changed. Nothing leaves the machine.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q --no-compile "memvid-sdk==2.0.160"
cd "$work"
MEMVID_TELEMETRY=0 HOME="$work" "$work/venv/bin/python" -W ignore - <<'PY' > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
import pathlib
import sys

import memvid_sdk

removed = list(range(3, 60, 10))


def count_texts(path):
    content = pathlib.Path(path).read_bytes()
    return sum(f"note {i:02d} of user 3 has hepatitis {i}".encode() in content for i in removed)


def remove_notes(path, **options):
    memory = memvid_sdk.create(path)
    frames = [memory.put(text=f"note {i:02d} of user {i % 10} has hepatitis {i} Zork{i:02d}x") for i in range(60)]
    memory.commit()
    for i in removed:
        memory.remove(frames[i])
    memory.commit()
    memory.close()
    before = count_texts(path)
    status = memvid_sdk.Memvid.doctor(path, vacuum=True, **options)["status"]
    memory = memvid_sdk.use("basic", path)
    stats = memory.stats()
    hits = memory.find("Zork13x")["total_hits"]
    tagged = "zork13x" in memory.frame("mv2://frames/13")["tags"]
    memory.close()
    seen = (before, count_texts(path), status, stats["frame_count"], stats["active_frame_count"], hits, tagged)
    print(f"seen {options}: removed texts before and after {seen[:2]}, {status}, frames {seen[3:5]}, hits {hits}, tags {tagged}")
    return seen


seen = [remove_notes("plain.mv2"), remove_notes("rebuilt.mv2", rebuild_lex_index=True, rebuild_time_index=True)]
sys.exit(seen != [(6, 6, "healed", 60, 54, 0, True)] * 2)
PY
grep "^seen" "$work/log"
