"""`--attack membership` from the command line: a whole run, what is gated of it, and input that it
cannot take."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

from auditor.cli import run_command_line
from auditor.core.secret_randomness import make_keyed_generator
from auditor.core.secret_table import SecretTable
from auditor.models.shards import write_shard_record_list
from auditor.plugins.probe import Probe
from auditor.runs.site import Site
from tests.conftest import check_command, fits_schema, save_tiny, tiny

Said = pytest.CaptureFixture[str]
MEMBERS, OTHERS = (
    [f"code {make_keyed_generator(kind, i).integers(2**62):x} of {i}" for i in range(10)]
    for kind in ("members", "others")
)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    save_tiny(folder / "model")
    save_tiny(folder / "base", kind="gpt2")
    for name, texts in (("private", MEMBERS), ("fresh", OTHERS)):
        rows = (json.dumps({"prefix": text[:12], "suffix": text[12:]}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text("".join(rows))
    for i in range(4):
        save_tiny(folder / "refs" / f"r{i}")
        tiny(257, seed=i + 1).model.save_pretrained(folder / "refs" / f"r{i}")
        write_shard_record_list(
            folder / "refs" / f"r{i}",
            [t for j, t in enumerate([*MEMBERS, *OTHERS]) if (j + i // 2) % 2],
        )
        save_tiny(folder / "all" / f"r{i}")
        write_shard_record_list(folder / "all" / f"r{i}", [*MEMBERS, *OTHERS])
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def run(given: Path, out: str, *more: str, others: bool = True) -> int:
    data = [
        "--data",
        str(given / "private.jsonl"),
        *(["--nonmembers", str(given / "fresh.jsonl")] if others else []),
    ]
    model = [
        "--model",
        str(given / "model"),
        "--reference",
        str(given / "base"),
        "--known-fraction",
        "0",
    ]
    return run_command_line(
        ["run", *model, *data, "--attack", "membership", "--setting", "white-box", "-o", out, *more]
    )


def test_a_run_is_kept_gated_and_paired(given: Path, tmp_path: Path, capsys: Said) -> None:
    assert run(given, "runs/a", "-A", f"references={given / 'refs'}") == 0
    assert fits_schema(tmp_path / "runs" / "a")
    assert "membership AUC" in " ".join(capsys.readouterr().out.split())
    result = json.loads((tmp_path / "runs" / "a" / "result.json").read_text())
    assert any(name.startswith("reference r0/") for name in result["weights"])
    names = {m["name"] for m in result["findings"][0]["measurements"]}
    assert {"membership_auc", "blind_auc", "membership_auc_lira", "membership_auc_rmia"} <= names
    assert run(given, "runs/b", "-A", f"references={given / 'refs'}") == 0
    rules = ["--max", "membership_auc=0.999", "--max", "membership_auc=0.01"]
    assert (
        run_command_line(["gate", "runs/a", *rules[:2]]) in (0, 4)
        and run_command_line(["gate", "runs/a", *rules[2:]]) == 1
    )
    (tmp_path / "same.toml").write_text(
        'rules = ["membership_auc not worse than baseline by 0.01"]\n'
    )
    # 10 non-members: a difference of up to 0.26 could go unseen.
    check_command("gate", "runs/b", "--baseline", "runs/a", "--policy", "same.toml", code=4)
    check_command("gate", "runs/a", "--baseline", "runs/a", code=4)
    check_command("gate", "runs/a", "--baseline", "runs/a", "--max-increase", "membership_auc=0.3")
    check_command("report", "runs/a")
    assert (
        "How well each score separates members"
        in (tmp_path / "runs" / "a" / "report.html").read_text()
    )


def test_no_secrets_are_in_memory_while_the_report_is_written(
    given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []

    def look() -> None:
        gc.collect()
        kept.append([found for found in gc.get_objects() if type(found) in (SecretTable, Site)])

    before = {id(found) for found in gc.get_objects()}
    monkeypatch.setattr("auditor.commands.run._MANY", 0)
    monkeypatch.setattr("auditor.models.memory.release_unused_memory", look)
    assert run(given, "runs/freed") == 0
    (held,) = kept
    assert {id(found) for found in held} <= before


def test_a_number_that_the_kept_scores_do_not_give_fails_every_gate(
    given: Path, tmp_path: Path, capsys: Said
) -> None:
    assert run(given, "runs/a") == 0
    path = tmp_path / "runs" / "a" / "result.json"
    result = json.loads(path.read_text())
    main = result["findings"][0]["measurements"][0]
    main["value"] = main["low"] = 0.1
    path.write_text(json.dumps(result))
    capsys.readouterr()
    check_command("gate", "runs/a", "--max", "membership_auc=1", code=1)
    assert "membership_auc is 0.1, secrets.parquet makes it" in capsys.readouterr().out


def test_members_without_non_members_are_refused_before_a_model_is_asked(
    given: Path, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Probe] = []
    monkeypatch.setattr(
        "auditor.attacks.membership.Membership.observe_secrets", lambda self, *_: asked.append(self)
    )
    assert run(given, "runs/a", others=False) == 2
    (said,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert said == (
        "error: --attack membership needs at least 4 members and 4 non-members to distinguish, got "
        "10 and 0: give --nonmembers FILE, records like the data"
    )
    assert not asked and not (tmp_path / "runs" / "a").exists()


def test_references_that_saw_all_the_data_are_refused(
    given: Path, tmp_path: Path, capsys: Said
) -> None:
    assert run(given, "runs/a", "-A", f"references={given / 'all'}") == 2
    assert "r0 saw all 20" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "a").exists()


@pytest.mark.parametrize("asked", ["3", "65", "some", "-4"])
def test_the_lab_trains_a_number_of_references(asked: str, capsys: Said) -> None:
    from auditor.core.errors import AuditError
    from auditor.runs.loader import parse_reference_model_count

    with pytest.raises(
        AuditError, match=f"as a number of models to train, from 4 to 64, got '{asked}'"
    ):
        parse_reference_model_count(asked)


def test_a_reference_that_was_trained_on_the_records_is_refused(
    given: Path, tmp_path: Path, capsys: Said
) -> None:
    """As its own folder says; a score that needs no reference is measured all the same."""
    save_tiny(tmp_path / "seen", kind="gpt2")
    write_shard_record_list(tmp_path / "seen", MEMBERS[:3])
    assert run(given, "runs/a", "--reference", str(tmp_path / "seen")) == 2
    why = (
        "the reference has seen private data: its shard.json names 3 of the attacked records: "
        "give --reference MODEL"
    )
    assert why in capsys.readouterr().err and not (tmp_path / "runs" / "a").exists()
    own = ["-A", "membership.score=min_k_plus"]
    assert run(given, "runs/b", "--reference", str(tmp_path / "seen"), *own) == 0


def test_the_gate_and_the_record_go_by_the_strongest_score_and_by_copies(
    given: Path, tmp_path: Path
) -> None:
    """A model of the members' own words: every score tells them, and which one is strongest is no
    matter of options."""
    assert run(given, "runs/a") == 0
    (finding,) = json.loads((tmp_path / "runs" / "a" / "result.json").read_text())["findings"]
    found = {m["name"]: m for m in finding["measurements"]}
    named = [m for name, m in found.items() if name.startswith("membership_auc_")]
    best = max(named, key=lambda m: max(m["low"], 1 - m["high"]))
    assert finding["scores_tried"] == len(named) > 5
    assert (found["membership_auc"]["value"], found["membership_auc"]["low"]) == (
        best["value"],
        best["low"],
    )
    assert f"best of {len(named)} scores" in found["membership_auc"]["note"]
    assert finding["by_repeats"]["1"]["value"] == best["value"]
