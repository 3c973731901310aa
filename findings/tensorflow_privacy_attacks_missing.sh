#!/usr/bin/env bash
# Guess: the wheel of tensorflow-privacy holds its membership inference attacks, under `privacy.privacy_tests` as its
# source does, or under the older `privacy.membership_inference_attack`.
# Library: tensorflow-privacy 0.9.0. Date: 2026-11-28.
# Seen: every module of the older folder only forwards to `privacy.privacy_tests.membership_inference_attack`, and the
# wheel has no file of that folder: no attack can be imported from an installed package.
# Exits 0 if that is still so, 1 if it changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --no-deps --target "$folder" "tensorflow-privacy==0.9.0"
python3 - "$folder" <<'PY'
import ast
import sys
from pathlib import Path

root = Path(sys.argv[1])
older = root / "tensorflow_privacy/privacy/membership_inference_attack"
wanted = set()
for path in sorted(older.glob("*.py")):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and "privacy_tests" in node.module:
            wanted.add(node.module)
missing = {name for name in wanted if not list(root.glob(name.replace(".", "/") + "*"))}
print("forwarders in the wheel:", len(list(older.glob("*.py"))))
print("modules they forward to:", len(wanted), "of which missing:", len(missing))
sys.exit(not wanted or missing != wanted)
PY
