"""What reports, gates and the statistics of an audit import: nothing that takes long and that most
runs do not need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SLOW = (
    "matplotlib",
    "pandas",
    "scipy.optimize",
    "scipy.sparse",
    "scipy.special",
    "scipy.stats",
    "sklearn",
    "torch",
    "transformers",
)
PROGRAM = f"""
import sys
from pathlib import Path
import numpy as np
from auditor.core.nouns import CellKey
from auditor.gate import decide
from auditor.records import table
from auditor.reports import export, files, html, markdown
from auditor.runs import gate_inputs
from auditor.statistics import blind_classifier, copies_effect, exposure, rank_tests, strata
from auditor.statistics import distributions, intervals, ngram_scores

ids = [f"s{{i}}" for i in range(40)]
column = table.Column(table.MEASURED, CellKey("t", "claim", "a"), "q", ids, np.arange(40.0))
tokens = table.Column(table.TOKENS, CellKey("t", "", ""), "log_prob", ids, -np.arange(40.0))
table.write_secrets_table(Path(sys.argv[1]), [column], [tokens])
assert table.read_secrets_table(Path(sys.argv[1]), table.MEASURED)[0].values[39] == 39
assert table.read_suffix_token_log_probs(Path(sys.argv[1]))["t"]["s39"] == (-39.0,)
assert intervals.clopper_pearson(0, 59)[1] < 0.061 < intervals.clopper_pearson(59, 59)[0]
assert distributions.compute_normal_quantile(0.5) == 0
print(*sorted(set({SLOW!r}) & sys.modules.keys()))
part = np.arange(40) < 20
assert copies_effect.find_most_concentrated_part({{"first": part}}, part, 0.05).p < 1e-10
assert "scipy.stats" not in sys.modules
"""


def test_a_gate_without_markdown_imports_no_renderer_of_reports() -> None:
    program = "import sys, auditor.gate.decide, auditor.reports.decision; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not {"auditor.reports.markdown", "auditor.reports.blocks"} & {*done.stdout.split()}


def test_reports_and_gates_import_nothing_slow(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


UNADAPTED = """
import sys
from auditor.models import loading
from auditor.plugins import registry
from auditor.runs import run
registry.list_providers()
print(*sorted({"faker", "peft", "peft.tuners", "auditor.remote.model"} & sys.modules.keys()))
"""


def test_an_audit_of_files_imports_neither_peft_nor_faker_nor_a_client() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNADAPTED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


COLLECTED = """
import atexit, gc, sys
from auditor.cli import main
def search():
    print(*gc.get_threshold(), gc.get_freeze_count())
    for _ in range(2):
        gc.collect()
        print(*gc.get_threshold(), gc.get_freeze_count(), len(gc.callbacks))
atexit.register(search)
sys.argv = ["audit", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(
    ("arguments", "later"), [(["--version"], 2_000), (["report", "--help"], 200_000)]
)
def test_a_command_searches_what_it_imported_for_garbage_once_at_most(
    arguments: list[str], later: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COLLECTED, *arguments], capture_output=True, text=True, check=True
    )
    first, second, third = [[*map(int, line.split())] for line in done.stdout.splitlines()[-3:]]
    assert first[0] >= 1_000_000
    assert first[3] > 10_000  # what was imported is not searched again at the end
    assert second[:3] == third[:3] == [later, 10, 100]
    assert second[3] == third[3] >= first[3] and second[4] == third[4] == 0


LEFT = """
import atexit, os, sys, threading
from auditor.cli import main
leave = os._exit
def leave_at_once(code):
    os.write(1, b"at once")
    leave(code)
os._exit = leave_at_once
atexit.register(print, "registered")
if sys.argv.pop(1) == "thread":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
sys.argv[0] = "audit"
main()
"""


@pytest.mark.parametrize(("threads", "last"), [("main", "at once"), ("thread", "registered")])
@pytest.mark.parametrize(("flag", "code"), [("--version", 0), ("--nonsense", 2)])
def test_a_command_without_other_threads_leaves_at_once_after_what_is_registered(
    threads: str, last: str, flag: str, code: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEFT, threads, flag], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == last and "registered" in lines
    assert bool(done.stderr) == (code == 2)
