"""Whatever is fed to a command that it cannot take is refused in one sentence, exit 2, with nothing
written.

In process. What only a loaded model can refuse is in the tests of models; most of this is refused
before there is one.
"""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from auditor.cli import run_command_line
from auditor.commands.advise import advise
from auditor.core.errors import AuditError
from auditor.studies.sweep import SWEEP

Said = pytest.CaptureFixture[str]
# stages and machine: what any command says before it refuses
_TOLD = re.compile(r" *[0-9.]+ s  |threads: ")


@pytest.fixture
def refuses(tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command that must be refused; returns its sentence. {t} in an argument is the test's
    own folder."""
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def asked(*arguments: str) -> str:
        before = sorted(path for path in tmp_path.rglob("*") if "cache" not in path.parts)
        capsys.readouterr()
        code = run_command_line([argument.replace("{t}", str(tmp_path)) for argument in arguments])
        told = capsys.readouterr()
        lines = [line for line in told.err.splitlines() if line.strip() and not _TOLD.match(line)]
        assert (code, len(lines), told.out) == (2, 1, ""), told.err[-2000:]
        assert lines[0].startswith("error: ") and "Traceback" not in told.err
        after = sorted(path for path in tmp_path.rglob("*") if "cache" not in path.parts)
        assert before == after
        return lines[0]

    return asked


# --- files of text ---

BYTES: dict[str, bytes] = {
    "empty": b"",
    "blank": b"\n \n",
    "binary": bytes(range(256)),
    "utf16": '{"text": "a"}'.encode("utf-16"),
    "latin": '{"text": "é"}'.encode("latin1"),
    "cut": b'{"text": "abc',
    "deep": b"[" * 100_000,
    "number": b"5",
    "nan": b"NaN",
    "list": b"[1, [2]]",
    "digits": b"9" * 5000,
    "wrong_column": b'{"body": "x"}\n',
    "nested": b'{"text": {"a": ["b"]}}\n',
    "surrogate": b'{"text": "\\ud83d"}\n',
    "bom": b'\xef\xbb\xbf{"body": "x"}\n',
}
# Lines are copied as they are; a plan that says nothing is the default one.
_TAKEN = {("insert", "surrogate"), ("plan", "empty"), ("plan", "blank")}
WITH_FILE: dict[str, list[str]] = {
    "train": ["train", "none", "--model", "{t}/none", "--data", "{t}/bad.jsonl", "-o", "{t}/x"],
    "utility": [
        "utility",
        "--model",
        "{t}/none",
        "--data",
        "{t}/bad.jsonl",
        "--kind",
        "causal",
        "-o",
        "{t}/x",
    ],
    "insert": ["canaries", "insert", "{t}/good.json", "{t}/bad.jsonl", "-o", "{t}/x.jsonl"],
    "manifest": ["canaries", "insert", "{t}/bad.jsonl", "{t}/good.jsonl", "-o", "{t}/x.jsonl"],
    "plan": ["run", "--config", "{t}/bad.jsonl", "-o", "{t}/x"],
    "policy": ["gate", "{t}", "--policy", "{t}/bad.jsonl"],
    "submission": ["score", "{t}/bad.jsonl", "--answers", "{t}/good.npy"],
    "answers": ["score", "{t}/good.csv", "--answers", "{t}/bad.jsonl"],
}


@pytest.fixture
def good(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_text('{"text": "abc"}\n')
    (tmp_path / "good.csv").write_text('Example ID,Suffix Guess\n0,"[1,2]"\n')
    np.save(tmp_path / "good.npy", np.ones((1, 2), np.uint16))
    entry = {"id": "c", "text": "ID 1", "space": 0, "count": 1}
    manifest = {
        "schema_version": 1,
        "seed": 0,
        "formats": [{"format": "ID {digits:1}"}],
        "canaries": [entry],
    }
    (tmp_path / "good.json").write_text(json.dumps(manifest))


@pytest.mark.usefixtures("good")
@pytest.mark.parametrize("content", BYTES)
@pytest.mark.parametrize("where", WITH_FILE)
def test_files_that_hold_something_else(
    where: str, content: str, tmp_path: Path, refuses: Any
) -> None:
    if (where, content) in _TAKEN:
        return
    (tmp_path / "bad.jsonl").write_bytes(BYTES[content])
    refuses(*WITH_FILE[where])


@pytest.mark.usefixtures("good")
@pytest.mark.parametrize("kind", ["missing", "folder", "under a file", "long name", "nul"])
@pytest.mark.parametrize("where", WITH_FILE)
def test_files_that_are_no_files(where: str, kind: str, tmp_path: Path, refuses: Any) -> None:
    names = {
        "under a file": "{t}/good.json/bad.jsonl",
        "long name": f"{{t}}/{'x' * 300}.jsonl",
        "nul": "{t}/\0.jsonl",
    }
    if kind == "folder":
        (tmp_path / "bad.jsonl").mkdir()
    refuses(
        *(
            argument.replace("{t}/bad.jsonl", names.get(kind, "{t}/bad.jsonl"))
            for argument in WITH_FILE[where]
        )
    )


@pytest.mark.parametrize("repeats", ["1000000000", "-1", "0", "1.5", "nan", "9" * 30])
def test_repeats_that_nobody_trains_on(repeats: str, tmp_path: Path, refuses: Any) -> None:
    (tmp_path / "bad.csv").write_text(f"text,repeats\nabc,{repeats}\n")
    refuses("train", "none", "--model", "{t}/none", "--data", "{t}/bad.csv", "-o", "{t}/x")


# --- arrays ---


def header(shape: str, dtype: str = "<u2", version: bytes = b"\x01\x00") -> bytes:
    told = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY" + version + struct.pack("<H" if version[0] == 1 else "<I", len(told)) + told


def saved(array: Any, **options: Any) -> bytes:
    import io

    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


ARRAYS: dict[str, bytes] = {
    "10^15 entries": header("(1000000000000000, 2)"),
    "10^30 entries": header(f"({10**30}, 2)"),
    "negative": header("(-1, 2)"),
    "version 2, too many": header("(10000000000, 2)", version=b"\x02\x00"),
    "version 9": header("(1, 2)", version=b"\x09\x00"),
    "shape is text": header("'ab'"),
    "shape is code": header("__import__('os')"),
    "deep": header("(" * 5000),
    "no type": header("(1, 2)", dtype="<q9"),
    "cut": saved(np.ones((100, 2), np.uint16))[:-10],
    "objects": saved(np.array([[1, None]], dtype=object), allow_pickle=True),
    "floats": saved(np.array([[1.0, np.nan]])),
    "complex": saved(np.ones((1, 2), complex)),
    "flags": saved(np.ones((1, 2), bool)),
    "text": saved(np.array([["a", "b"]])),
    "durations": saved(np.array([[1, 2]], dtype="m8[s]")),
    "dates": saved(np.array([["2020-01-01"]], dtype="M8[D]")),
    "records": saved(np.zeros((1,), dtype=[("a", "<u2"), ("b", "<u2")])),
    "scalar": saved(np.uint16(3)),
    "one row": saved(np.ones(3, np.uint16)),
    "three axes": saved(np.ones((1, 2, 3), np.uint16)),
    "no rows": saved(np.ones((0, 2), np.uint16)),
    "zip": b"PK\x03\x04" + b"\0" * 40,
}


@pytest.mark.usefixtures("good")
@pytest.mark.parametrize("array", ARRAYS)
def test_arrays_that_hold_something_else(array: str, tmp_path: Path, refuses: Any) -> None:
    (tmp_path / "bad.npy").write_bytes(ARRAYS[array])
    refuses("score", "{t}/good.csv", "--answers", "{t}/bad.npy")


@pytest.mark.usefixtures("good")
@pytest.mark.parametrize(
    "line",
    [
        "-1,[1]",
        "9,[1]",
        'x,"[1,2]"',
        '0,"[1.5,2]"',
        '0,"[1]"',
        "0,",
        "0",
        '0,"[-1,2]"',
        '0,"',
        f"{'9' * 5000},[1]",
    ],
)
def test_submissions_that_are_none(line: str, tmp_path: Path, refuses: Any) -> None:
    (tmp_path / "bad.csv").write_text(f"Example ID,Suffix Guess\n{line}\n")
    refuses("score", "{t}/bad.csv", "--answers", "{t}/good.npy")


# --- plans, policies ---

PLANS = [
    *(
        "attack = 'exact'\nseeds = [0, 1]",
        "attack = [1]",
        "attack = []",
        "attack = [['exact']]",
        "attack = {a = 1}",
    ),
    *(
        "defense = 3",
        "attack_options = 5",
        "attack_options = {exact = 5}",
        "attack_options = {exact = {samples = nan}}",
    ),
    *("attack_options = [1]\nseeds = [0, 1]", "attack_options = {ethicist = {alpha = nan}}"),
    *(
        "attack_options = {ethicist = {alpha = inf}}",
        "attack_options = {ethicist = {samples = [1]}}",
    ),
    *(
        "attack_options = {ethicist = {samples = 2.5}}",
        "attack_options = {ethicist = {samples = true}}",
    ),
    *(
        "attack_options = {ethicist = {tune_on = []}}",
        "attack_options = {ethicist = {tune_on = {}}}",
    ),
    *(
        "defense = ['pmixed']\ndefense_options = {pmixed = {epsilon = nan}}",
        "model = 5",
        "model = ['a']\ndata = 'b'",
    ),
    *(
        "seed = 'a'",
        "seed = 1.5",
        "seed = true",
        "seed = -1",
        "seeds = 5",
        "seeds = []",
        "seeds = ['a']",
    ),
    *(
        "seeds = [true]",
        "seeds = [-1, 0]",
        "seeds = [0, 0]",
        "seed = 0\nseeds = [1]",
        "limit = 0",
        "limit = '5'",
    ),
    *(
        "samples = nan",
        "samples = -1",
        "samples = 1000000000",
        "setting = 5",
        "setting = ['white-box']",
        "plugin = 5",
    ),
    *(
        "plugin = 'mine.py'",
        "plugin = [5]",
        "plugin = ['\\u0000']",
        "batch_size = 0",
        "batch_size = 'auto'",
    ),
    *(
        "known_fraction = 'nan'",
        "lab_recipe = 5",
        "lab_recipe = {batch = -1}",
        "lab_recipe = {batch = 0}",
    ),
    *(
        "lab_recipe = {hidden = 0}",
        "lab_recipe = {heads = 0}",
        "lab_recipe = {heads = 3}",
        "lab_recipe = {x = 1}",
    ),
    *(
        "lab_recipe = {public_rate = nan}",
        "lab_recipe = {public_rate = 'inf'}",
        "lab_recipe = {canaries = 5}",
    ),
    *("lab_recipe = {canaries = [['12', 1]]}", "lab_recipe = {canaries = [['123456', -1]]}"),
    *(
        "lab_recipe = {canaries = [['123456', 100000000]]}",
        "lab_recipe = {batch = 1.5}",
        "lab_recipe = {batch = true}",
    ),
    *(
        "lab_recipe = {repeats = [[1, 100000000, 0]]}",
        "lab_recipe = {layers = 100000000}",
        "lab_recipe = [1]",
    ),
    *(
        "sweep = 5",
        "[sweep]\nseed = [1, 2]",
        "[sweep]\n'lab_recipe.batch' = []",
        "[sweep]\n'lab_recipe.batch' = 5",
    ),
    *(
        "[sweep]\n'lab_recipe.batch' = [-1, 0]",
        "[sweep]\n'exact.x' = [1]",
        "[sweep]\nattack = [5, 6]",
    ),
    *(
        "[sweep]\nattack_options = [1, 2]",
        "[sweep]\n'.' = [1]",
        "[sweep]\n'ethicist.alpha' = [nan, 1.0]",
    ),
    *(
        "[sweep]\n'ethicist.samples' = [1, 'x']",
        "[sweep]\n'lab_recipe.batch' = [[1], [2]]",
        "variant = 5",
    ),
    *(
        "[[variant]]",
        "[[variant]]\nname = 5",
        "[[variant]]\nname = ['a']",
        "[[variant]]\nname = 'a'\nx = 1",
    ),
    *(
        "[[variant]]\nname = 'a'\n[[variant]]\nname = 'a'",
        "[[variant]]\nname = 'a'\nattack_options = 5",
    ),
    *(
        "[[variant]]\nname = 'a'\nattack = 5",
        "[[variant]]\nname = 'a'\nlab_recipe = 5",
        "= 1",
        "a = ",
        "x = 1",
    ),
    *("device = 'cuda'", "model_args = {a = 1}", "canaries = 5", "sizes = 'huge'", "command = 5"),
    *(
        "lab_recipe = 5\n[sweep]\n'lab_recipe.batch' = [1, 2]",
        "attack_options = 5\n[sweep]\n'ethicist.alpha' = [1.0, 2.0]",
    ),
    *(
        "attack_options = {ethicist = 5}\n[sweep]\n'ethicist.alpha' = [1.0, 2.0]",
        "attack = 5\nseeds = [1, 2]",
    ),
    *(
        "attack = [{a = 1}]\nseeds = [0, 1]",
        "defense = [[1]]\nseeds = [0, 1]",
        "plugin = {a = 1}\nseeds = [0, 1]",
    ),
    *("seed = 99999999999999999999", "lab_recipe = {seed = -1}"),
]


@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_plans_that_ask_for_nothing_there_is(plan: str, tmp_path: Path, refuses: Any) -> None:
    (tmp_path / "plan.toml").write_text(plan)
    refuses("run", "--config", "{t}/plan.toml", "-o", "{t}/x")


def test_a_flag_does_not_yield_to_a_grid_of_the_plan_file(tmp_path: Path, refuses: Any) -> None:
    (tmp_path / "plan.toml").write_text("[sweep]\nsamples = [1, 10]")
    refuses("run", "--config", "{t}/plan.toml", "--samples", "5", "-o", "{t}/x")


POLICIES = [
    *(
        "rules = 5",
        "rules = [5]",
        "rules = []",
        "rules = ['']",
        "rules = ['recall <= nan']",
        "rules = [['recall <= 1']]",
    ),
    *(
        "rule = 5",
        "rule = [5]",
        "[[rule]]",
        "[[rule]]\nmetric = 5\nmax = 1",
        "[[rule]]\nmetric = 'recall'",
    ),
    *(
        "[[rule]]\nmetric = 'recall'\nmax = 'x'",
        "[[rule]]\nmetric = 'recall'\nmax = [1]",
        "[[rule]]\nrule = 5",
    ),
    *(
        "[[rule]]\nmetric = 'recall'\nmax = 0.1\ncount = -1",
        "[[rule]]\nmetric = 'recall'\nmax = 0.1\ntarget = 5",
    ),
    *(
        "inconclusive = 5\nrules = ['recall <= 0.1']",
        "inconclusive = []\nrules = ['recall <= 0.1']",
        "x = 1",
    ),
    *(
        f"rules = ['recall(count={'9' * 5000}) <= 0.1']",
        f"[[rule]]\nmetric = 'recall'\nmax = 1{'0' * 400}",
    ),
]


@pytest.mark.parametrize("policy", POLICIES, ids=range(len(POLICIES)))
def test_policies_that_rule_nothing(policy: str, tmp_path: Path, refuses: Any) -> None:
    (tmp_path / "p.toml").write_text(policy)
    refuses("gate", "{t}", "--policy", "{t}/p.toml")


def test_a_policy_for_a_metric_that_nobody_has_is_refused_before_the_run(
    tmp_path: Path, refuses: Any
) -> None:
    (tmp_path / "p.toml").write_text("rules = ['recal <= 0.1']")
    (tmp_path / "d.jsonl").write_text('{"text": "a"}')
    said = refuses("run", "--model", "{t}/nowhere", "--data", "{t}/d.jsonl", "--gate", "{t}/p.toml")
    assert "unknown metric 'recal'; did you mean 'recall'?" in said


# --- options and sizes ---

OPTIONS = [
    *(["run", "-A", f"alpha={v}"] for v in ("nan", "inf", "-inf", "", "x", "1e400", "True")),
    *(["run", "-A", f"ethicist.learning_rate={v}"] for v in ("-1", "0")),
    *(["run", "-A", f"ethicist.{v}=-1"] for v in ("weight_decay", "warmup_steps")),
    *(["run", "-A", f"samples={v}"] for v in ("nan", "0", "-1", "1e3", "100000000", "9" * 5000)),
    *(
        ["run", "-A", v]
        for v in ("", "=", "=1", ".=1", "x.y=1", "alpha", "alphas=1", "ethicist.=1")
    ),
    *(
        ["run", "-d", "pmixed", "-D", f"{v}"]
        for v in ("epsilon=nan", "epsilon=0", "epsilon=-1", "delta=0", "q=nan")
    ),
    *(
        ["run", "-d", "pmixed", "-D", f"{v}"]
        for v in ("delta=1", "delta=nan", "alpha=1", "alpha=0", "q=2", "queries=-1")
    ),
    *(["run", "--batch-size", v] for v in ("0", "-1", "²", "1.5", "9" * 5000)),
    *(
        ["run", "--seeds", v]
        for v in ("", "-", "1-0", "0-999999999", "9" * 5000, "a", "0,,1", "0-9-9")
    ),
    *(
        ["run", "--sweep", v]
        for v in ("", "a", "=1", "seed=1,2", "lab_recipe.batch=1:2:1e-9", "lab_recipe.batch=-1,0")
    ),
    ["run", "--sweep", "lab_recipe.batch=1:9999:1", "--seeds", "0-99"],
    *(
        ["run", flag, "0"]
        for flag in ("--limit", "--samples", "--known-limit", "--prefix-length", "--suffix-length")
    ),
    *(
        ["run", flag, "x"]
        for flag in (
            "--setting",
            "--attack",
            "--defense",
            "--seed",
            "--limit",
            "--plugin",
            "--config",
        )
    ),
    *(
        ["gate", "--plan", v]
        for v in ("", "recall", "recall=nan:1", "recall=0.2:0.1", "recall=0.1:0.1000001")
    ),
    *(["gate", "--plan", "recall=0.1:0.2", "--power", v] for v in ("nan", "0", "1", "-1", "2")),
    *(["gate", "--plan", "recall=0.1:0.2", "--rules", v] for v in ("0", "-1", "9" * 400)),
    *(
        ["gate", "{t}", "--max", v]
        for v in ("", "recall", "recall=", "recall=nan", "=1", "recall(count=x)=1")
    ),
    *(
        ["canaries", "make", "-o", "{t}/m.json", "--counts", v]
        for v in ("", "0", "-1", "1,,2", "100000000", "9" * 5000)
    ),
    *(
        ["canaries", "make", "-o", "{t}/m.json", "--each", v]
        for v in ("0", "-1", "100000000", "9" * 30, "x")
    ),
    *(["canaries", "make", "-o", "{t}/m.json", "--controls", v] for v in ("-1", "100000000")),
    *(
        ["canaries", "make", "-o", "{t}/m.json", "--format", v]
        for v in (
            "",
            "{",
            "{}",
            "{a}",
            "{digits:0}",
            "{digits:1000000000}",
            "{digits!r:6}",
            "{digits:6:7}",
            "{words:٣}",
        )
    ),
    ["canaries", "make", "-o", "{t}/m.json", "--format", "{digits:900}" * 2],
    ["canaries", "make", "-o", "{t}/m.json", "--format", "{digits:1}"],
    ["utility", "--restarts", "0"],
    *(["utility", "--mask-share", v] for v in ("nan", "0", "1", "-1")),
    *(["utility", "--max-length", v] for v in ("0", "1", "-1")),
    *(["utility", flag, "x"] for flag in ("--kind", "--on", "--sweep", "--defense")),
    ["utility", "--reveal", "-1"],
    ["reproduce", "nobody"],
    ["reproduce", "ethicist", "--plan", "x"],
    ["reproduce", "ethicist", "--scale", "x"],
    ["reproduce", "ethicist", "--seeds", "x"],
]


@pytest.mark.parametrize("arguments", OPTIONS, ids=lambda words: " ".join(words)[:60])
def test_options_that_mean_nothing(arguments: list[str], refuses: Any) -> None:
    refuses(*arguments)


# --- places ---

WRITES: dict[str, list[str]] = {
    "make": ["canaries", "make", "-o", "{p}"],
    "insert": ["canaries", "insert", "{t}/good.json", "{t}/good.jsonl", "-o", "{p}.jsonl"],
    "curve": ["score", "{t}/good.csv", "--answers", "{t}/good.npy", "--curve", "{p}"],
    "plot": ["score", "{t}/good.csv", "--answers", "{t}/good.npy", "--plot", "{p}.svg"],
}


@pytest.mark.usefixtures("good")
@pytest.mark.parametrize(
    "place", ["{t}/good.json/x", "/proc/x/y", "/dev/null/x", f"{{t}}/{'x' * 300}"]
)
@pytest.mark.parametrize("what", WRITES)
def test_places_where_nothing_can_be_written(what: str, place: str, refuses: Any) -> None:
    refuses(*(argument.replace("{p}", place) for argument in WRITES[what]))


def test_advice_on_a_grid_names_its_runs(tmp_path: Path) -> None:
    """It asked for --max, "for a line of checkpoints", of any folder of runs."""
    (tmp_path / SWEEP).write_text("{}")
    with pytest.raises(AuditError, match=r"a folder of runs, not a run; .*/\* names them \(--max"):
        advise(tmp_path)
