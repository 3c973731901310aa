"""The life of a canary in process: make, insert, train anywhere, score, audit, gate; and what is
refused on the way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from auditor.conclusions.contrasts import WeightedMetric, measure_seed_contrast
from auditor.core.secret_randomness import make_keyed_generator
from auditor.records.table import read_dataframe
from auditor.studies import sweep
from auditor.training.finetune import make_untrained_gpt_neox, train_packed_blocks
from tests.conftest import check_command
from tests.generation.test_tries import bpe

pytestmark = pytest.mark.drawn  # a page without its plots says nothing of exposure

Said = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data.jsonl, canaries.json, trained.jsonl with the canaries in it, and a model trained on
    that."""
    folder = tmp_path_factory.mktemp("inputs")
    rows = [{"text": f"record {i}: my code is {i * 7919 % 1000}"} for i in range(20)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = [
        "make",
        "-o",
        f"{folder}/canaries.json",
        "--format",
        "My ID is {digits:3}",
        "--counts",
        "1,12",
        "--seed",
        "0",
    ]
    check_command("canaries", *made, "--each", "2", "--controls", "2")
    data = [f"{folder}/canaries.json", f"{folder}/data.jsonl", "-o", f"{folder}/trained.jsonl"]
    check_command("canaries", "insert", *data)
    texts = [
        json.loads(line)["text"] for line in (folder / "trained.jsonl").read_text().splitlines()
    ]
    assert len(texts) == 20 + 2 * 13
    tokenizer = bpe(150)
    model = make_untrained_gpt_neox(
        vocab_size=407, layers=1, hidden=32, heads=2, positions=96, end=0, seed=0
    )
    sequences = [tuple(ids) for ids in tokenizer(texts)["input_ids"]]
    train_packed_blocks(
        model,
        sequences,
        epochs=25,
        rate=1e-2,
        batch=8,
        block=24,
        end=0,
        order=make_keyed_generator("test"),
    )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def finished(inputs: Path) -> Path:
    out = inputs / "run"
    asked = [
        "--model",
        f"{inputs}/model",
        "--canaries",
        f"{inputs}/canaries.json",
        "--attack",
        "exposure",
    ]
    more = ["--defense", "uniform-mixing", "-A", "references=50", "-o", str(out)]
    check_command("run", *asked, *more)
    return out


def scored(capsys: Said, *arguments: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    check_command("canaries", "score", *arguments, "--json")
    scores: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return scores


def test_often_inserted_canaries_come_out_and_controls_do_not(inputs: Path, capsys: Said) -> None:
    (score,) = scored(capsys, f"{inputs}/canaries.json", f"{inputs}/model", "-A", "references=50")
    bits = {row["id"]: row["values"]["exposure_bits"] for row in score["rows"]}
    assert min(bits["canary-0012-000"], bits["canary-0012-001"]) > 8
    assert max(bits["control-0000-000"], bits["control-0000-001"]) < 8
    assert [row["count"] for row in score["rows"]] == [1, 1, 12, 12, 0, 0]


def test_canaries_are_scored_behind_what_training_json_says(
    inputs: Path, tmp_path: Path, capsys: Said
) -> None:
    shutil.copytree(inputs / "model", tmp_path / "model")
    record = {"configuration": {"method": "none"}, "finished": True}
    record["tokens_before_each_record"] = [5]
    (tmp_path / "model" / "training.json").write_text(json.dumps(record))
    asked = [f"{inputs}/canaries.json", f"{tmp_path}/model", "-A", "references=50"]
    (score,) = scored(capsys, *asked)
    assert score["notes"][0].endswith(", as training.json says")


def test_a_run_says_the_same_as_the_score(inputs: Path, finished: Path, capsys: Said) -> None:
    (alone,) = scored(
        capsys, f"{inputs}/canaries.json", f"{inputs}/model", "-A", "exposure.references=50"
    )
    undefended, mixed = scored(capsys, f"{inputs}/canaries.json", str(finished))
    assert undefended["rows"] == alone["rows"] and mixed["rows"] != alone["rows"]
    assert undefended["title"] == "Exposure on Undefended, white-box"


def test_a_run_has_no_scores_of_another_manifest_with_the_same_ids(
    inputs: Path, finished: Path, tmp_path: Path, capsys: Said
) -> None:
    made = ["--format", "My ID is {digits:3}", "--counts", "1,12", "--each", "2", "--controls", "2"]
    check_command("canaries", "make", *made, "--seed", "1", "-o", f"{tmp_path}/other.json")
    ids = [
        [entry["id"] for entry in json.loads(path.read_text())["canaries"]]
        for path in (inputs / "canaries.json", tmp_path / "other.json")
    ]
    assert ids[0] == ids[1]
    check_command("canaries", "score", f"{tmp_path}/other.json", finished, code=2)
    assert "the run measured others" in capsys.readouterr().err
    for option in (["--seed", "3"], ["--dtype", "bfloat16"]):  # they had no effect
        check_command("canaries", "score", f"{inputs}/canaries.json", finished, *option, code=2)
        assert "go with a model" in capsys.readouterr().err


def test_controls_are_not_the_canaries_of_another_data_set(tmp_path: Path) -> None:
    # One seed for all: the eight controls were canaries that the other manifest inserts.
    made = {"theirs": [], "ours": ["--counts", "1,4", "--each", "4", "--controls", "8"]}
    texts: dict[str, set[str]] = {}
    for name, options in made.items():
        options += ["--format", "My ID is {digits:15}", "-o", f"{tmp_path}/{name}.json"]
        check_command("canaries", "make", *options)
        canaries = json.loads((tmp_path / f"{name}.json").read_text())["canaries"]
        texts[name] = {
            entry["text"] for entry in canaries if (entry["count"] == 0) == (name == "ours")
        }
    assert len(texts["ours"]) == 8 and not texts["ours"] & texts["theirs"]


def test_ids_and_numbers_only(inputs: Path, finished: Path, capsys: Said) -> None:
    texts = [
        entry["text"] for entry in json.loads((inputs / "canaries.json").read_text())["canaries"]
    ]
    capsys.readouterr()
    check_command("canaries", "score", f"{inputs}/canaries.json", finished)
    shown = capsys.readouterr().out + "".join(
        (finished / name).read_text() for name in ("report.html", "report.md", "result.json")
    )
    shown += read_dataframe(finished, {}).to_csv()
    assert "canary-0012-000" in shown
    assert not any(text in shown for text in texts)


def test_the_run_has_a_figure_and_can_be_gated(finished: Path, capsys: Said) -> None:
    page = (finished / "report.html").read_text()
    assert "Exposure by insertions, white-box" in page and "never inserted, on average" in page
    assert "Exposure of the canaries and its null" in page
    assert "2 never (controls), 2 inserted once, 2 inserted 12 times" in (
        finished / "report.md"
    ).read_text().replace("\\", "")
    # more than log2 of the space's size: 9.97 bits
    check_command("gate", finished, "--max", "exposure(count=12)=10", "--target", "undefended")
    check_command(
        "gate", finished, "--max", "exposure(count=12)=0.2", "--target", "undefended", code=1
    )
    check_command(
        "gate", finished, "--max", "exposure(count=1)=5", "--target", "undefended", code=4
    )
    capsys.readouterr()
    check_command("gate", finished, "--max", "exposure(count=3)=5", code=1)
    assert "repeat counts: 1, 12" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ["canaries", "make", "-o", "{w}/x.json", "--counts", "0"],
            "expected counts of at least 1, got 0",
        ),
        (
            ["canaries", "make", "-o", "{w}/x.json", "--counts", "a"],
            "expected --counts as whole numbers",
        ),
        (
            ["canaries", "make", "-o", "{w}/x.json", "--format", "ID"],
            "a slot that several texts fit",
        ),
        (["canaries", "make", "-o", "{w}/x.json", "--list", "names"], "expected --list NAME=FILE"),
        (
            ["canaries", "make", "-o", "{w}/x.json", "--list", "names={w}/none"],
            "cannot read the words",
        ),
        (["canaries", "make", "-o", "{w}/canaries.json"], "exists"),
        (
            ["canaries", "insert", "{w}/data.jsonl", "{w}/data.jsonl", "-o", "{w}/x.jsonl"],
            "cannot read the manifest",
        ),
        (
            [
                "canaries",
                "insert",
                "{w}/canaries.json",
                "{w}/data.jsonl",
                "-o",
                "{w}/x.jsonl",
                "--column",
                "body",
            ],
            "'body'",
        ),
        (["canaries", "score", "{w}/none.json", "{w}/model"], "cannot read the manifest"),
        (["canaries", "score", "{w}/canaries.json", "{w}/nothing-here"], "no such folder"),
        (
            ["canaries", "score", "{w}/canaries.json", "{w}/model", "-A", "node=3"],
            "did you mean 'nodes'",
        ),
        (
            ["run", "--canaries", "{w}/canaries.json", "--attack", "exposure"],
            "--canaries goes with --model",
        ),
        (
            [
                "run",
                "--model",
                "{w}/model",
                "--canaries",
                "{w}/canaries.json",
                "--attack",
                "ethicist",
            ],
            "give --data",
        ),
        (
            [
                "run",
                "--model",
                "{w}/model",
                "--canaries",
                "{w}/canaries.json",
                "--attack",
                "exposure",
                "--limit",
                "3",
            ],
            "--limit needs --data",
        ),
    ],
)
def test_bad_input_is_refused_in_one_sentence(
    arguments: list[str], why: str, inputs: Path, capsys: Said
) -> None:
    capsys.readouterr()
    before = sorted(inputs.iterdir())
    check_command(*[argument.replace("{w}", str(inputs)) for argument in arguments], code=2)
    told = capsys.readouterr().err
    assert why in told and "Traceback" not in told
    assert sorted(inputs.iterdir()) == before


def test_a_run_on_other_canaries_is_refused(
    inputs: Path, finished: Path, capsys: Said, tmp_path: Path
) -> None:
    check_command("canaries", "make", "-o", f"{tmp_path}/other.json", "--counts", "3")
    check_command("canaries", "score", f"{tmp_path}/other.json", finished, code=2)
    assert "the run measured others" in capsys.readouterr().err


def test_a_sweep_shows_exposure_and_claims_may_speak_of_a_count(
    inputs: Path, tmp_path: Path
) -> None:
    asked = [
        "--model",
        f"{inputs}/model",
        "--canaries",
        f"{inputs}/canaries.json",
        "--attack",
        "exposure",
    ]
    check_command(
        "run",
        *asked,
        "--setting",
        "white-box",
        "-A",
        "references=20",
        "--seeds",
        "0,1",
        "-o",
        tmp_path,
    )
    (place,) = sweep.read_study_points(tmp_path)
    (cell,) = place.cells
    grows = [
        WeightedMetric(sign, f"exposure(count={count})", cell)
        for sign, count in ((1.0, 12), (-1.0, 1))
    ]
    assert measure_seed_contrast("grows", grows).value > 0
    assert "Exposure of canaries, mean bits" in (tmp_path / "sweep.md").read_text()
