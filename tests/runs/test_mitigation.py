"""`audit mitigate`: what is left out, that the same secrets are asked again, and that a refusal
leaves nothing."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from auditor.benchmarks.data.files import write_kept_data
from auditor.cli import run_command_line
from auditor.conclusions.outcomes import read_run_outcomes
from auditor.core.plan import Plan
from auditor.core.result import NO_TIME
from auditor.defenses.dropped_records import CopyCap, Dedup, DropRecords
from auditor.models.shards import read_shard_record_list, record_digests, write_shard_record_list
from auditor.plugins import registry
from auditor.runs.mitigation import (
    MitigationOptions,
    list_extracted_members,
    plan_mitigation,
)
from tests.conftest import check_command, refuses, save_tiny

Said = pytest.CaptureFixture[str]
DATA = [f"The code of door {i} is {i * i * 7 + 1000}." for i in range(8)]
COPIES = [1, 1, 1, 2, 2, 4, 12, 12]
TEXTS = [text for text, count in zip(DATA, COPIES, strict=True) for _ in range(count)]
TRAINED = ("-D", "epochs=12", "-D", "batch=2", "-D", "learning_rate=2e-2", "--block", "64")
# A user's own training: it copies a model, and keeps what it was given to read.
OWN = """import shutil, sys
shutil.copytree(sys.argv[1], sys.argv[3], dirs_exist_ok=True)
shutil.copy(sys.argv[2], sys.argv[3] + "/seen.jsonl")
"""


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, tuned/ with its recipe, run/: an audit of it in which something was extracted."""
    folder = tmp_path_factory.mktemp("mitigate")
    save_tiny(folder / "base")
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    others = [f"The code of gate {i} is {i * 31 + 2000}." for i in range(6)]
    (folder / "others.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in others)
    )
    (folder / "own.py").write_text(OWN)
    data = str(folder / "data.jsonl")
    check_command(
        "train",
        "none",
        "--model",
        folder / "base",
        "--data",
        data,
        *TRAINED,
        "-o",
        f"{folder}/tuned",
    )
    audit = [
        "run",
        "--model",
        f"{folder}/tuned",
        "--data",
        data,
        "--nonmembers",
        f"{folder}/others.jsonl",
    ]
    audit += [
        "--known-fraction",
        "0",
        "--prefix-length",
        "18",
        "--suffix-length",
        "6",
        "--setting",
        "white-box",
    ]
    audit += ["--attack", "perplexity", "-A", "samples=2", "--attack", "extraction-probability"]
    check_command(*audit, "-o", f"{folder}/run")
    return folder


@pytest.mark.parametrize("most", [1, 2, 5, 40])
def test_a_cap_keeps_the_first_copies_of_each_text(most: int) -> None:
    rng = np.random.default_rng(most)
    texts = [str(i) for i in rng.integers(0, 9, 60)]
    naive = [i for i, text in enumerate(texts) if texts[:i].count(text) < most]
    kept, told = CopyCap(most=most).choose_records(texts)
    assert kept == naive and f"{len(naive)} are left" in told
    left = Counter(texts[i] for i in kept)
    assert all(
        left[text] == CopyCap(most=most).count_remaining_copies(count)
        for text, count in Counter(texts).items()
    )


def test_dropped_records_go_with_all_their_copies(tmp_path: Path) -> None:
    kept, _ = DropRecords(times=4).choose_records(TEXTS)
    assert [TEXTS[i] for i in kept] == [text for text in TEXTS if TEXTS.count(text) < 4]
    assert [DropRecords(times=4).count_remaining_copies(count) for count in (1, 3, 4, 12)] == [
        1,
        3,
        0,
        0,
    ]
    write_shard_record_list(tmp_path / "a", DATA[6:7])
    listed = DropRecords(listed=str(tmp_path / "a"))
    assert [TEXTS[i] for i in listed.choose_records(TEXTS)[0]] == [
        text for text in TEXTS if text != DATA[6]
    ]
    # the same list elsewhere trains the same model, another one does not
    write_shard_record_list(tmp_path / "b", DATA[6:7])
    assert listed.options() == DropRecords(listed=str(tmp_path / "b")).options()
    write_shard_record_list(tmp_path / "b", DATA[5:7])
    assert (
        listed.options() != DropRecords(listed=str(tmp_path / "b")).options()
        and listed.count_remaining_copies(3) is None
    )
    with refuses("shard.json"):
        DropRecords(listed=str(tmp_path / "c")).options()


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        *(("a.jsonl", False), ("a.json", False), ("a.csv", False), ("a.parquet", False)),
        *(("a.jsonl", True), ("a.csv", True)),
    ],
)
@pytest.mark.parametrize("counted", [False, True])
def test_rows_stay_as_they_are_in_the_form_of_their_file(
    name: str, packed: bool, counted: bool, tmp_path: Path
) -> None:
    """Other columns too; a `repeats` column says how many copies are left."""
    frame = pd.DataFrame({"text": DATA, "id": [f"00{i}" for i in range(8)]})
    if counted:
        frame["repeats"] = COPIES
    else:
        frame = frame.loc[np.repeat(np.arange(8), COPIES)]
    path, to = tmp_path / name, tmp_path / f"to{Path(name).suffix}"
    write = {".jsonl": "to_json", ".json": "to_json", ".csv": "to_csv", ".parquet": "to_parquet"}[
        path.suffix
    ]
    more: dict[str, Any] = (
        {"index": False}
        if write != "to_json"
        else {"orient": "records", "lines": name == "a.jsonl"}
    )
    getattr(frame, write)(path, **more)
    if packed:
        whole = path.with_name(f"{name}.gz")
        whole.write_bytes(gzip.compress(path.read_bytes()))
        path = whole
    write_kept_data(CopyCap(most=2), str(path), to, text_column=None)
    read: Any = {".csv": lambda p: pd.read_csv(p, dtype=str), ".parquet": pd.read_parquet}.get(
        to.suffix, lambda p: pd.read_json(p, lines=name == "a.jsonl", dtype=False)
    )
    found = read(to)
    expected = [
        (text, f"00{i}")
        for i, text in enumerate(DATA)
        for _ in range(1 if counted else min(COPIES[i], 2))
    ]
    assert list(zip(found["text"], found["id"], strict=True)) == expected
    if counted:
        assert found["repeats"].astype(int).tolist() == [min(count, 2) for count in COPIES]
    assert to.stat().st_mode & 0o777 == 0o600


def test_nothing_to_leave_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DATA))
    with refuses("cap", "8"):
        write_kept_data(
            CopyCap(most=3), str(tmp_path / "a.jsonl"), tmp_path / "b.jsonl", text_column=None
        )
    with refuses("drop", "32"):
        write_kept_data(
            DropRecords(times=2), _repeated(tmp_path), tmp_path / "b.jsonl", text_column=None
        )
    assert not (tmp_path / "b.jsonl").exists()


def _repeated(folder: Path) -> str:
    (folder / "c.jsonl").write_text(
        "".join(json.dumps({"text": text, "repeats": 4}) + "\n" for text in DATA)
    )
    return str(folder / "c.jsonl")


def test_what_advice_names_is_done_and_audited_again(
    inputs: Path, tmp_path: Path, capsys: Said
) -> None:
    """By the recipe beside the model: same secrets, paired; the same command goes on, and another
    is refused."""
    out = tmp_path / "capped"
    command = ["mitigate", f"{inputs}/run", "--by", "cap:2", "-o", str(out)]
    check_command(*command)
    said = capsys.readouterr().out
    assert len(said.splitlines()) <= 25 and "12 records" not in said
    before, after = read_run_outcomes(inputs / "run"), read_run_outcomes(out)
    assert before.result.benchmark.digest == after.result.benchmark.digest and set(
        before.outcomes
    ) == set(after.outcomes)
    recipe = json.loads((out / "model" / "training.json").read_text())["recipe"]
    first = json.loads((inputs / "tuned" / "training.json").read_text())["recipe"]
    assert {name for name in recipe if recipe[name] != first[name]} == {"data"}
    assert len(rows(out / "data.jsonl")) == sum(min(count, 2) for count in COPIES)
    shown = (out / "before-after.md").read_text() + (out / "before-after.html").read_text()
    secret = DATA[7].split()[-1].rstrip(".")
    assert re.search(r"severity: +\w+ before, \w+ after", said) and "predicted" in said
    assert secret not in shown and secret not in said
    written = (out / "result.json").read_bytes()
    assert run_command_line(command) == 0 and (out / "result.json").read_bytes() == written
    check_command(*command[:3], "cap:1", "-o", out, code=2)
    assert "another mitigation" in capsys.readouterr().err
    check_command("compare", f"{inputs}/run", out)
    assert run_command_line(["gate", str(out), "--max", "recall=0.9"]) in (0, 4)


def test_what_was_extracted_is_dropped(inputs: Path, tmp_path: Path) -> None:
    found = list_extracted_members(read_run_outcomes(inputs / "run"))
    assert found
    check_command("mitigate", f"{inputs}/run", "--by", "drop", "-o", tmp_path / "out")
    gone = [TEXTS[int(id.split("-")[1])] for id in found]
    assert read_shard_record_list(tmp_path / "out" / "dropped") == record_digests(gone)
    assert {row["text"] for row in rows(tmp_path / "out" / "data.jsonl")} == set(TEXTS) - set(gone)


@pytest.mark.parametrize("how", ["a row more", "rows less"])
def test_other_records_than_were_attacked_are_refused_before_training(
    inputs: Path, tmp_path: Path, capsys: Said, how: str
) -> None:
    """Rows are numbers: the wrong ones were dropped, and a number too large was a crash."""
    data, out = inputs / "data.jsonl", tmp_path / "out"
    whole = data.read_text()
    more = json.dumps({"text": "A row that is new."}) + "\n" + whole
    data.write_text(more if how == "a row more" else "".join(whole.splitlines(True)[:3]))
    train = f"{sys.executable} {inputs}/own.py {inputs}/base {{data}} {{out}}"
    mitigate = ["mitigate", f"{inputs}/run", "--by", "drop", "--train", train, "-o", out]
    try:
        check_command(*mitigate, code=2)
    finally:
        data.write_text(whole)
    assert "the data has changed since" in capsys.readouterr().err and not out.exists()


def test_a_check_that_ran_out_of_time_is_refused_before_training(
    inputs: Path, tmp_path: Path
) -> None:
    """Its second audit asks all records, and could not be compared."""
    run = read_run_outcomes(inputs / "run")
    records = run.result.benchmark.records
    members = dataclasses.replace(records["members"], not_attacked={NO_TIME: 7})
    benchmark = dataclasses.replace(run.result.benchmark, records={**records, "members": members})
    part = dataclasses.replace(run, result=dataclasses.replace(run.result, benchmark=benchmark))
    with refuses("audit check --resume"):
        plan_mitigation(MitigationOptions(inputs / "run", "dedup", tmp_path / "out"), part)


def test_compressed_records_can_be_mitigated(inputs: Path, tmp_path: Path) -> None:
    packed = tmp_path / "data.jsonl.gz"
    packed.write_bytes(gzip.compress((inputs / "data.jsonl").read_bytes()))
    options = MitigationOptions(inputs / "run", "dedup", tmp_path / "out", data=str(packed))
    planned = plan_mitigation(options, read_run_outcomes(inputs / "run"))
    assert planned.training_records_file == str(packed)


def test_a_run_that_a_gate_stops_is_refused_before_training(
    inputs: Path, tmp_path: Path, capsys: Said
) -> None:
    """It was trained first, and then the second audit asked for --gate, which is no flag here."""
    run = read_run_outcomes(inputs / "run")
    plan = {**run.result.plan, "until": "decided"}
    changed = dataclasses.replace(run, result=dataclasses.replace(run.result, plan=plan))
    with refuses("a run that is repeated without a gate"):
        plan_mitigation(MitigationOptions(inputs / "run", "dedup", tmp_path / "out"), changed)


def test_a_command_of_ones_own_trains(inputs: Path, tmp_path: Path, capsys: Said) -> None:
    """It is given the rows that are left and a folder; where it fails nothing is audited, and the
    next try goes on."""
    out, script = tmp_path / "own", inputs / "own.py"
    mitigate = [
        "mitigate",
        f"{inputs}/run",
        "--by",
        "dedup",
        "-D",
        "exact=true",
        "-o",
        str(out),
        "--train",
    ]
    check_command(*mitigate, f"{sys.executable} -c 'raise SystemExit(3)' {{data}} {{out}}", code=2)
    assert "exit code 3" in capsys.readouterr().err and not out.exists()
    check_command(*mitigate, f"{sys.executable} -c pass {{data}} {{out}}", code=2)
    assert not out.exists()
    check_command(*mitigate, f"{sys.executable} {script} {inputs}/base {{data}} {{out}}")
    assert [row["text"] for row in rows(out / "model" / "seen.jsonl")] == DATA
    assert (
        read_run_outcomes(out).result.target("undefended").perplexity
        != read_run_outcomes(inputs / "run").result.target("undefended").perplexity
    )


def test_another_method_keeps_the_recipe(inputs: Path, tmp_path: Path, capsys: Said) -> None:
    """A private training: same base, data and epochs; what it promises is on the page."""
    out = tmp_path / "private"
    command = [
        "mitigate",
        f"{inputs}/run",
        "--by",
        "dp-sgd:8",
        "-D",
        "epochs=1",
        "-D",
        "noise=seeded",
        "-o",
        str(out),
    ]
    check_command(*command)
    configuration = json.loads((out / "model" / "training.json").read_text())["configuration"]
    assert configuration["method"] == "dp-sgd" and configuration["options"]["epsilon"] == 8.0
    assert (configuration["options"]["epochs"], configuration["options"]["batch"]) == (1, 2)
    assert "nominal" in capsys.readouterr().out


REFUSED: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "unknown": (["--by", "dedupe"], ("dedupe", "dedup")),
    "unlearning": (["--by", "npo"], ("npo",)),
    "plain": (["--by", "none"], ("none",)),
    "no value": (["--by", "cap:"], ("cap:",)),
    "no number": (["--by", "cap:two"], ("cap.most", "two")),
    "below": (["--by", "cap:0"], ("most", "0")),
    "takes none": (["--by", "early-stop:3"], ("early-stop:3",)),
    "option": (["--by", "cap:2", "-D", "least=3"], ("least",)),
    "placeholder": (["--by", "dedup", "--train", "train {data}"], ("--train", "{out}")),
    "quote": (["--by", "dedup", "--train", "train '{data} {out}"], ("--train",)),
    "method by command": (
        ["--by", "dp-sgd:8", "--train", "train {data} {out}"],
        ("--train", "dp-sgd"),
    ),
    "no program": (
        ["--by", "dedup", "-D", "exact=true", "--train", "no-such-program {data} {out}"],
        ("no-such-program",),
    ),
    "no file": (["--by", "dedup", "--data", "nowhere.jsonl"], ("nowhere.jsonl",)),
    "no copies": (["--by", "cap:12"], ("cap", "35")),
    "other data": (["--by", "dedup", "--data", "others.jsonl"], ("others.jsonl", "tuned")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_leave_nothing(
    case: str, inputs: Path, tmp_path: Path, capsys: Said, monkeypatch: Any
) -> None:
    monkeypatch.chdir(inputs)
    given, facts = REFUSED[case]
    check_command("mitigate", f"{inputs}/run", *given, "-o", tmp_path / "out", code=2)
    said = capsys.readouterr().err
    assert (
        all(fact in said for fact in facts)
        and said.count("error:") == 1
        and not (tmp_path / "out").exists()
    )


def test_a_folder_of_something_else_is_left_alone(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    check_command("mitigate", f"{inputs}/run", "--by", "cap:2", "-o", tmp_path, code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_model_without_a_recipe_needs_a_command(
    inputs: Path, tmp_path: Path, capsys: Said
) -> None:
    audit = [
        "run",
        "--model",
        f"{inputs}/base",
        "--data",
        f"{inputs}/data.jsonl",
        "--known-fraction",
        "0",
    ]
    audit += [
        "--prefix-length",
        "18",
        "--suffix-length",
        "6",
        "--attack",
        "extraction-probability",
        "-o",
    ]
    check_command(*audit, tmp_path / "run")
    check_command("mitigate", tmp_path / "run", "--by", "dedup", "-o", tmp_path / "out", code=2)
    assert "--train" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_the_lab_trains_by_its_own_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    tiny_lab = {
        "vocab_size": 300,
        "layers": 1,
        "hidden": 32,
        "heads": 2,
        "private_rank": 2,
        "batch": 8,
    }
    tiny_lab |= {"repeats": [[times, 2, 1] for times in (1, 4, 16)], "others": 0, "members": 3}
    tiny_lab |= {
        "nonmembers": 4,
        "public_records": 20,
        "public_epochs": 1,
        "private_epochs": 2,
        "private_batch": 5,
    }
    fields = "".join(f"{name} = {value}\n" for name, value in tiny_lab.items())
    (tmp_path / "plan.toml").write_text(
        f'attack = ["extraction-probability"]\n[lab_recipe]\n{fields}'
    )
    run, out = tmp_path / "run", tmp_path / "run-early-stop"
    check_command("run", "--config", tmp_path / "plan.toml", "-o", run)
    for by in ("early-stop", "cap:4"):
        check_command("mitigate", run, "--by", by)
    plan = Plan.from_json(read_run_outcomes(out).result.plan)
    assert (
        plan.target.mitigation["method"] == "early-stop" and plan.target.mitigation["epochs"] == 2
    )
    (lab,) = (tmp_path / "cache" / "lab").iterdir()
    assert len([path for path in lab.glob("cap-*") if path.is_dir()]) == 1
    assert (tmp_path / "run-cap-4" / "before-after.html").is_file()
    # a model that was mitigated already
    check_command("mitigate", out, "--by", "dedup", code=2)
    check_command("mitigate", run, "--by", "dedup", "--train", "x {data} {out}", code=2)
    assert "--train" in capsys.readouterr().err


def test_every_mitigation_is_listed_and_stands_among_the_defenses() -> None:
    found = registry.list_mitigations()
    assert {"dedup", "cap", "drop", "early-stop", "dp-sgd", "adp"} <= set(found)
    assert not {"none", "npo", "gradient-ascent", "pmixed"} & set(found)
    assert {kind.__module__.rpartition(".")[0] for kind in found.values()} == {"auditor.defenses"}
    assert Dedup.main and all(kind.main in {"", *vars(kind())} for kind in found.values())
