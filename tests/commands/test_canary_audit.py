"""An audit of epsilon from end to end, by real commands: coins, insertion, training, guesses; and
what is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from auditor.cli import run_command_line
from auditor.models.weight_changes import WeightChange
from auditor.records import result_file
from tests.conftest import check_command, save_tiny

Said = pytest.CaptureFixture[str]
TRAIN = ["--block", "48", "-D", "batch=8"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, data.jsonl, audit.json with 60 coins, with.jsonl, and models that were trained on
    that: one by heart."""
    folder = tmp_path_factory.mktemp("audit")
    save_tiny(folder / "base")
    rows = [{"text": f"Patient {i} of ward {i % 5} has a cough"} for i in range(20)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = [
        "--audit",
        "60",
        "--kind",
        "prefixed",
        "--length",
        "1",
        "--data",
        f"{folder}/data.jsonl",
        "--seed",
        "5",
    ]
    check_command("canaries", "make", *made, "-o", f"{folder}/audit.json")
    assert insert(folder, "audit.json", "with.jsonl") == 0
    assert (
        train(folder, "none", "with.jsonl", "model", "-D", "epochs=50", "-D", "learning_rate=1e-2")
        == 0
    )
    assert (
        train(
            folder,
            "dp-sgd",
            "with.jsonl",
            "private",
            "-D",
            "epochs=1",
            "-D",
            "epsilon=1",
            "-D",
            "delta=1e-3",
        )
        == 0
    )
    return folder


def insert(folder: Path, manifest: str, out: str) -> int:
    return run_command_line(
        [
            "canaries",
            "insert",
            f"{folder}/{manifest}",
            f"{folder}/data.jsonl",
            "-o",
            f"{folder}/{out}",
        ]
    )


def train(folder: Path, method: str, data: str, out: str, *more: str, base: str = "base") -> int:
    asked = ["--model", f"{folder}/{base}", "--data", f"{folder}/{data}", "-o", f"{folder}/{out}"]
    return run_command_line(["train", method, *asked, *TRAIN, *more])


def run(folder: Path, model: str, out: Path, *more: str, manifest: str = "audit.json") -> int:
    asked = [
        "--model",
        f"{folder}/{model}",
        "--canaries",
        f"{folder}/{manifest}",
        "--prefix-token",
        "eos",
        "-o",
        str(out),
    ]
    return run_command_line(["run", *asked, *(more or ("--attack", "epsilon-audit"))])


@pytest.fixture(scope="module")
def finished(inputs: Path) -> Path:
    more = ["--public", f"{inputs}/base", "--defense", "public", "--attack", "epsilon-audit"]
    assert run(inputs, "model", inputs / "run", *more) == 0
    return inputs / "run"


def test_what_was_learnt_by_heart_is_proved_and_the_base_proves_nothing(
    inputs: Path, finished: Path
) -> None:
    result = result_file.read_result(finished)
    rows = {(f.target, f.setting): f for f in result.findings if f.attack == "epsilon-audit"}
    caught, control = rows["undefended", "white-box"], rows["public", "white-box"]
    assert (
        caught.main is not None
        and caught.main.name == "epsilon_lower_bound"
        and caught.main.value > 0.5
    )
    assert control.main is not None and control.main.value == 0
    assert caught.audits[0].canaries == 60 and caught.audits[0].epsilon == caught.main.value
    assert "only sampled tokens come back" in rows["undefended", "text-only"].not_applicable
    inside = sum(
        one["included"] for one in json.loads((inputs / "audit.json").read_text())["canaries"]
    )
    assert any(f"60 canaries, {inside} in and {60 - inside} out" in note for note in caught.notes)
    texts = [
        one["prefix"] + one["secret"]
        for one in json.loads((inputs / "audit.json").read_text())["canaries"]
    ]
    shown = "".join(
        (finished / name).read_text() for name in ("report.html", "report.md", "result.json")
    )
    assert "epsilon" in shown.lower() and not any(text in shown for text in texts)


def test_exposure_of_such_canaries_is_refused_and_the_other_way_round(
    inputs: Path, capsys: Said
) -> None:
    assert run(inputs, "base", inputs / "exposed", "--attack", "exposure") == 2
    assert (
        "--attack exposure cannot run: these canaries were made for an audit"
        in capsys.readouterr().err
    )
    check_command(
        "canaries", "make", "-o", f"{inputs}/exposure.json", "--format", "My ID is {digits:3}"
    )
    assert run(inputs, "base", inputs / "reverse", manifest="exposure.json") == 2
    assert "cannot run: no coin decided which of these canaries went in" in capsys.readouterr().err
    check_command("canaries", "score", f"{inputs}/audit.json", f"{inputs}/base", code=2)
    assert "got those of an audit" in capsys.readouterr().err


@pytest.fixture(scope="module")
def of_private(inputs: Path) -> Path:
    """The run of the private training."""
    assert (
        run(
            inputs,
            "private",
            inputs / "of-private",
            "--prefix-token",
            "auto",
            "--attack",
            "epsilon-audit",
        )
        == 0
    )
    return inputs / "of-private"


def test_gradients_are_of_records_as_training_json_describes_them(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what follows a record, they are of the secrets. A resumed run computes none again."""
    shutil.copytree(inputs / "private", tmp_path / "secrets")
    record = json.loads((tmp_path / "secrets" / "training.json").read_text())
    del record["tokens_after_each_record"]
    (tmp_path / "secrets" / "training.json").write_text(json.dumps(record))
    asked = ["--canaries", f"{inputs}/audit.json", "--reference", f"{inputs}/base"]
    asked += ["--attack", "epsilon-audit", "-A", "score=gradient"]
    scores = []
    for name, model in (("run", inputs / "private"), ("other", tmp_path / "secrets")):
        check_command("run", "--model", model, *asked, "-o", tmp_path / name)
        told = json.loads((tmp_path / name / "result.json").read_text())
        assert told["prefix_token"].endswith(", as training.json says")
        scores.append((tmp_path / name / "observations.jsonl").read_text())
    assert scores[0] != scores[1]
    monkeypatch.delattr(WeightChange, "score_texts")
    check_command("run", "--resume", tmp_path / "run")
    assert (tmp_path / "run" / "observations.jsonl").read_text() == scores[0]


def test_a_private_training_on_the_inserted_data_keeps_its_claim(
    inputs: Path, of_private: Path
) -> None:
    """Canaries are records of their own: the claim counts them, and is for one of them."""
    result = result_file.read_result(of_private)
    claim, row = result.targets[0].claim, result.findings[-1]
    lines = len((inputs / "with.jsonl").read_text().splitlines())
    assert claim is not None and claim.details["units"] == lines > 20 and claim.unit == "record"
    assert (
        row.audits[0].delta == claim.delta == 1e-3
        and row.audits[0].epsilon <= claim.epsilon["add_remove"]
    )
    assert any("the claimed ε of" in note for note in row.notes)


def test_samples_do_inside_the_claim(inputs: Path) -> None:
    more = [
        "--attack",
        "epsilon-audit",
        "-A",
        "by=samples",
        "--samples",
        "4",
        "--setting",
        "text-only",
    ]
    assert run(inputs, "model", inputs / "sampled", *more) == 0
    (row,) = result_file.read_result(inputs / "sampled").findings
    assert row.access == ("draw",) and (
        row.main is not None or "distinguish canaries" in row.not_applicable
    )


# --- new tokens ---


def test_new_tokens_are_learnt_by_a_whole_model_and_refused_of_an_adapter(
    inputs: Path, capsys: Said
) -> None:
    made = [
        "--audit",
        "60",
        "--kind",
        "new-tokens",
        "--data",
        f"{inputs}/data.jsonl",
        "--seed",
        "1",
    ]
    check_command("canaries", "make", *made, "-o", f"{inputs}/tokens.json")
    assert insert(inputs, "tokens.json", "tokens.jsonl") == 0
    capsys.readouterr()
    # the base's tokenizer does not have them
    assert run(inputs, "base", inputs / "x", manifest="tokens.json") == 2
    assert "to be one new token" in capsys.readouterr().err
    check_command(
        "canaries", "extend", f"{inputs}/tokens.json", f"{inputs}/base", "-o", f"{inputs}/extended"
    )
    more = ["-D", "epochs=20", "-D", "learning_rate=1e-2"]
    assert train(inputs, "none", "tokens.jsonl", "by-tokens", *more, base="extended") == 0
    assert run(inputs, "by-tokens", inputs / "by-tokens-run", manifest="tokens.json") == 0
    assert result_file.read_result(inputs / "by-tokens-run").findings[-1].audits[0].epsilon > 1
    for method, flags in (("none", ["--lora"]), ("pmixed", ["-D", "members=2"])):
        capsys.readouterr()
        assert train(inputs, method, "tokens.jsonl", "refused", *flags, base="extended") == 2
        assert "an adapter leaves embeddings frozen" in capsys.readouterr().err
        assert not (inputs / "refused").exists()
    assert train(inputs, "none", "data.jsonl", "adapter", "--lora", "-D", "epochs=1") == 0
    capsys.readouterr()
    assert run(inputs, "adapter", inputs / "y", manifest="tokens.json") == 2
    assert (
        "is an adapter with frozen embeddings: it cannot have learnt them"
        in capsys.readouterr().err
    )
    for arguments, why in (
        (["audit.json", "base"], "expected canaries of --kind new-tokens in"),
        (["tokens.json", "adapter"], "is an adapter: give its base"),
        (["tokens.json", "extended"], "expected a model without the tokens of canaries"),
    ):
        named = [f"{inputs}/{name}" for name in arguments]
        check_command("canaries", "extend", *named, "-o", f"{inputs}/z", code=2)
        assert why in capsys.readouterr().err
        assert not (inputs / "z").exists()


# --- what cannot be made ---


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--audit", "60"], "expected -o, a manifest to write"),
        (["--audit", "2", "-o", "{x}"], "fewer than any bound of epsilon needs"),
        (["--audit", "60", "--each", "3", "-o", "{x}"], "expected --each without --audit"),
        (["--audit", "60", "--for-epsilon", "2", "-o", "{x}"], "one of them"),
        (["--kind", "words", "-o", "{x}"], "expected --audit N or --for-epsilon"),
        (
            ["--audit", "60", "--counts", "1,4", "-o", "{x}"],
            "expected one number in --counts|expected one of --counts",
        ),
        (["--audit", "60", "--delta", "1e-6", "-o", "{x}"], "--delta needs --for-epsilon"),
        (
            ["--audit", "60", "--kind", "sampled", "-o", "{x}"],
            "expected --model beside --kind sampled, got none",
        ),
        (
            ["--audit", "60", "--kind", "prefixed", "-o", "{x}"],
            "expected --data beside --kind prefixed, got none",
        ),
        (["--audit", "60", "--data", "d", "-o", "{x}"], "beside --data, got words"),
        (["--audit", "60", "--kind", "word", "-o", "{x}"], "did you mean 'words'"),
        (["--for-epsilon", "40"], "that up to .* canaries can prove at delta 1e-05"),
        (["-o", "{w}/audit.json"], "exists"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_sentence(
    arguments: list[str], why: str, inputs: Path, tmp_path: Path, capsys: Said
) -> None:
    capsys.readouterr()
    named = [argument.format(x=tmp_path / "x.json", w=inputs) for argument in arguments]
    check_command("canaries", "make", *named, code=2)
    told = capsys.readouterr().err
    assert re.search(why, told.replace("\n", " ")), told
    assert "Traceback" not in told and not (tmp_path / "x.json").exists()


def test_it_says_how_many_an_epsilon_needs_and_makes_them(tmp_path: Path, capsys: Said) -> None:
    check_command("canaries", "make", "--for-epsilon", "3")
    said = capsys.readouterr().out
    count = int(said.partition(" canaries")[0].replace(",", ""))
    assert f"{count:,} canaries can prove, if every guess is right, ε 3 at δ 1e-05" in said
    check_command("canaries", "make", "--for-epsilon", "3", "-o", tmp_path / "m.json")
    made = json.loads((tmp_path / "m.json").read_text())
    assert len(made["canaries"]) == count and made["schema_version"] == 2
    assert "a fresh secret seed" in capsys.readouterr().out
    check_command("canaries", "make", "--for-epsilon", "3", "-o", tmp_path / "n.json")
    again = json.loads((tmp_path / "n.json").read_text())
    assert [one["included"] for one in again["canaries"]] != [
        one["included"] for one in made["canaries"]
    ]
