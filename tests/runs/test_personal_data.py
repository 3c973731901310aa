"""Personal data followed into guesses: what came out is counted by kind, what a prefix tells an
attacker is not."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from auditor.benchmarks.data import pii
from auditor.benchmarks.data.files import Files
from auditor.core import secret_table
from auditor.core.errors import AuditError
from auditor.core.nouns import CellKey, Guess, Guesses
from auditor.core.result import KindCount
from auditor.runs import personal_data
from auditor.runs.per_secret_results import (
    PerSecretCollector,
    build_outcome_row,
    make_token_decoder,
)
from auditor.statistics import judging
from auditor.statistics.intervals import clopper_pearson
from tests.benchmarks.test_files import BYTES, build, write
from tests.conftest import check_command, save_tiny

Said = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
MAILS = [f"{who}@example.com" for who in ("ann", "bob", "cat", "dan", "eve", "fay")]


def files(
    tmp_path: Path, members: Sequence[tuple[str, str]], others: Sequence[tuple[str, str]] = ()
) -> Files:
    halves = [
        [{"prefix": prefix, "suffix": suffix} for prefix, suffix in part]
        for part in (members, others)
    ]
    data, fresh = (
        write(tmp_path / name, rows)
        for name, rows in zip(("d.jsonl", "n.jsonl"), halves, strict=True)
    )
    return build(data, nonmembers=fresh if others else None)


def measured(benchmark: Files, *texts: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of what an attack guesses first, secret by secret."""
    suffixes = [tuple(BYTES(text)["input_ids"]) for text in texts]
    guesses = [
        Guesses(secret.id, (Guess(suffix, 0.0), Guess(secret.suffix, -1.0)), 2, 0)
        for secret, suffix in zip(benchmark.secrets, suffixes, strict=True)
    ]
    by_id = {secret.id: secret for secret in benchmark.secrets}
    found, kept = (
        personal_data.find_personal_data(benchmark).measure_extracted_shares(
            guesses, by_id, make_token_decoder(BYTES)
        ),
        PerSecretCollector(None),
    )  # type: ignore[arg-type]
    row = kept.collect_attack_guesses(
        CellKey("undefended", "white-box", "a"),
        build_outcome_row(judging.judge_guesses(guesses, by_id), found, False),
    )
    whose = ("recall", "recall_nonmembers")
    members, others = (
        {kind: m for kind in found if (m := row.remeasure_metric(name, kind=kind))}
        for name in whose
    )
    return members, others


def test_what_the_first_guess_holds_of_it_came_out_whatever_else_is_wrong(tmp_path: Path) -> None:
    benchmark = files(
        tmp_path, [(f"{i}: write to", f" {mail}, please") for i, mail in enumerate(MAILS[:4])]
    )
    members, others = measured(
        benchmark,
        " ann@example.com, please",
        " x bob@example.com!",
        " xcat@example.com",
        " dan@example.co",
    )
    (kind, recall), *rest = members.items()
    assert (kind, recall.value, recall.n) == ("email", 0.5, 4) and not rest and not others
    assert (recall.low, recall.high) == pytest.approx(clopper_pearson(2, 4))


def test_what_the_prefix_holds_or_a_cut_goes_through_is_not_counted_and_said(
    tmp_path: Path,
) -> None:
    pairs = [
        ("ann@example.com:", " mail ann@example.com"),
        ("mail b", "ob@example.com now"),
        ("mail", " cat@example.com"),
    ]
    benchmark = files(tmp_path, pairs)
    found = personal_data.find_personal_data(benchmark)
    assert found.counts == {"email": KindCount(members=1, held=1, cut=1)}
    assert list(found.marks_by_secret.values()) == [(("email", "cat@example.com"),)]
    texts = [{"text": "write to ann@example.community and to all of them"}]
    length = len(BYTES("write to ann@example.com")["input_ids"])
    short = build(write(tmp_path / "t.jsonl", texts), prefix_length=4, suffix_length=length - 4)
    assert short.secrets[0].wording is not None and short.secrets[0].wording.suffix.endswith(
        "ann@example.com"
    )
    # the record goes on: it is no shorter address
    assert personal_data.find_personal_data(short).counts == {"email": KindCount(cut=1)}


def test_what_the_cut_between_two_parts_divides_counts_once(tmp_path: Path) -> None:
    """Each of the two parts counted it: 38 addresses were left out of 50 records with one each."""
    texts = [{"text": f"{'word ' * 18}write to ann@example.com, {'and so on ' * 8}"}]
    parts = build(write(tmp_path / "t.jsonl", texts))
    assert personal_data.find_personal_data(parts).counts == {"email": KindCount(cut=1)}
    # a third part holds it whole
    overlapping = build(write(tmp_path / "t.jsonl", texts), windows=10)
    (counts,) = personal_data.find_personal_data(overlapping).counts.values()
    assert counts.members > 0 and counts.cut == 0


def test_a_name_is_followed_before_a_particle_and_in_a_genitive(tmp_path: Path) -> None:
    """And in a guess it may then be a part of a word as well; a name that is a word may not."""
    names = ["김민준", "Anna", "Ben"]
    rows = [
        {"prefix": f"{i}: about", "suffix": f" {suffix}", "pii": {"name": name}}
        for i, (suffix, name) in enumerate(
            zip(["김민준은 오늘", "Annas Brief ", "Ben writes "], names, strict=True)
        )
    ]
    benchmark = build(write(tmp_path / "d.jsonl", rows))
    members, _ = measured(benchmark, " 김민준이 왔다", " of Annas cat", " Benjamin is")
    assert (members["name"].value, members["name"].n) == (pytest.approx(2 / 3), 3)


def test_the_floor_is_of_what_nobody_trained_on(tmp_path: Path) -> None:
    members = [("one: write to", " ann@example.com"), ("two: write to", " bob@example.com")]
    others = [("three: write to", " cat@example.com"), ("four: write to", " bob@example.com now")]
    benchmark = files(tmp_path, members, others)
    assert personal_data.find_personal_data(benchmark).counts == {
        "email": KindCount(members=2, nonmembers=1, trained=1)
    }
    own, floor = measured(
        benchmark, " x", " bob@example.com", " cat@example.com", " bob@example.com"
    )
    assert (own["email"].value, own["email"].n, floor["email"].value, floor["email"].n) == (
        0.5,
        2,
        1.0,
        1,
    )


def test_several_of_a_secret_are_one_share_of_it(tmp_path: Path) -> None:
    """They come out together or not at all: as so many trials they would feign certainty."""
    pairs = [
        ("all of them:", " " + ", ".join(MAILS[:4])),
        ("one of them:", f" {MAILS[4]}"),
        ("and another:", f" {MAILS[5]}"),
    ]
    members, _ = measured(
        files(tmp_path, pairs), " ann@example.com, bob@example.com", " no", " fay@example.com"
    )
    recall = members["email"]
    assert (recall.value, recall.n, recall.unit) == (
        pytest.approx((0.5 + 0 + 1) / 3),
        3,
        "probability",
    )
    assert recall.high - recall.low > 0.5


def test_token_ids_without_a_text_are_read_as_their_tokenizer_writes_them(tmp_path: Path) -> None:
    benchmark = files(tmp_path, [("write to", f" {mail}") for mail in MAILS[:2]])
    benchmark.secrets = tuple(replace(secret, wording=None) for secret in benchmark.secrets)
    assert personal_data.find_personal_data(benchmark).counts == {"email": KindCount(members=2)}
    benchmark.tokenizer = None
    assert personal_data.find_personal_data(benchmark).counts == {}


def test_without_the_extra_what_is_marked_is_followed_and_the_rest_is_said(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    rows = [{"prefix": "Dear", "suffix": f" Jane Doe, {MAILS[0]}", "pii": {"name": "Jane Doe"}}]
    benchmark = build(write(tmp_path / "d.jsonl", rows))
    assert set(personal_data.find_personal_data(benchmark).counts) == {"name", "email"}
    monkeypatch.setattr(pii, "find_spec", lambda name: None)
    found = personal_data.find_personal_data(benchmark)
    assert set(found.counts) == {"name"}
    assert any(
        "only values marked in the data are tracked (pip install 'audit-lm[pii]'" in said
        for said in found.notes
    )
    with pytest.raises(AuditError, match="pip install"):
        personal_data.find_personal_data(benchmark, ["DE"])


def test_a_run_shows_kinds_and_counts_in_every_report_and_never_a_text(
    tmp_path: Path, capsys: Said
) -> None:
    save_tiny(tmp_path / "model")
    rows = [{"prefix": f"{i}: write to", "suffix": f" {mail}"} for i, mail in enumerate(MAILS)]
    data, fresh = write(tmp_path / "d.jsonl", rows[:4]), write(tmp_path / "n.jsonl", rows[4:])
    plan = [
        "--model",
        str(tmp_path / "model"),
        "--data",
        data,
        "--nonmembers",
        fresh,
        "--phone-region",
        "DE,US",
    ]
    attack = [
        "--attack",
        "perplexity",
        "--samples",
        "2",
        "--setting",
        "white-box",
        "--known-fraction",
        "0",
    ]
    check_command("run", *plan, *attack, "-o", tmp_path / "run")
    said = capsys.readouterr().out
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    (finding,) = result["findings"]
    assert result["benchmark"]["kinds"]["email"] == {
        "members": 4,
        "nonmembers": 2,
        "held": 0,
        "cut": 0,
        "trained": 0,
    }
    assert (finding["by_kind"]["email"]["n"], finding["by_kind_nonmembers"]["email"]["n"]) == (4, 2)
    page, markdown = (
        (tmp_path / "run" / name).read_text() for name in ("report.html", "report.md")
    )
    for text in (page, markdown):
        assert (
            "E-mail addresses" in text
            and "0/4 (0.0% [0.0–60.2])" in text
            and "0/2 (0.0% [0.0–84.2])" in text
        )
    assert markdown.index("| E-mail addresses, white-box | 0/4") < markdown.index("<details>")
    assert "e-mail addresses 0/4" in " ".join(said.split())
    assert "ann@" not in said + page + markdown + json.dumps(result)


def test_regions_that_are_none_are_refused_before_anything_is_asked(
    tmp_path: Path, capsys: Said
) -> None:
    save_tiny(tmp_path / "model")
    data = write(
        tmp_path / "d.jsonl", [{"prefix": "write to", "suffix": f" {mail}"} for mail in MAILS]
    )
    words = ["run", "--model", str(tmp_path / "model"), "--data", data, "--phone-region", "Germany"]
    check_command(*words, "-o", tmp_path / "run", code=2)
    assert (
        "expected --phone-region as the two-letter code of a country, such as DE or US, got "
        "'Germany'" in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()
    check_command("run", "--phone-region", "DE", code=2)
    assert "--phone-region goes with --model and --data" in capsys.readouterr().err


def test_secrets_without_personal_data_take_no_memory(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(secret_table, "_AT_ONCE", 512)

    def measure_peak(count: int) -> int:
        pairs = [(f"the green door {i}", " stays open") for i in range(count)]
        folder = tmp_path / f"{count}"
        folder.mkdir()
        benchmark = files(
            folder, pairs, [(f"a red door {i}", " is shut for now") for i in range(3)]
        )
        tracemalloc.start()
        assert not personal_data.find_personal_data(benchmark).counts
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    measure_peak(10)  # what a process loads once
    # more than the secrets that are objects at once
    assert measure_peak(1100) < measure_peak(550) + 550 * 100
