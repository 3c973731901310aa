"""An audit of unlearning: who is forgotten, retained and never seen, which models stand beside, and
what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from auditor import audit, load_run
from auditor.cli import run_command_line
from auditor.core.errors import AuditError
from auditor.core.plan import Plan
from auditor.models.loading import load_causal_lm
from auditor.runs import training
from auditor.runs.shown_rows import RelearnedBaseline, RetrainedBaseline
from auditor.runs.site import Site
from auditor.runs.targets import UnlearningBaselines
from auditor.runs.training import TrainingRequest
from auditor.statistics.unlearning import measure_unlearning_group
from auditor.training.finetune import compute_causal_loss
from auditor.training.unlearning import train_relearned_copy
from tests.conftest import check_command, fits_schema, read_files, save_tiny
from tests.rows import read_rows

Said = pytest.CaptureFixture[str]
ROWS = [
    {"prefix": f"ward {i % 7} bed {i * 37 % 97:02d} code", "suffix": f" {i * 7919 % 997:03d}"}
    for i in range(20)
]
MODELS = ("before", "after", "retrained")


def rows(path: Path, held: list[dict[str, Any]]) -> None:
    path.write_text("\n".join(json.dumps(row) for row in held))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt 14 rows, what is left of it when four are to be forgotten, and one
    without those."""
    folder = tmp_path_factory.mktemp("unlearning")
    save_tiny(folder / "neox")
    save_tiny(folder / "other", kind="gpt2")
    files = {
        "data": ROWS[:14],
        "forget": ROWS[:4],
        "rest": ROWS[4:14],
        "fresh": ROWS[14:],
        "foreign": ROWS[2:16],
    }
    for name, held in files.items():
        rows(folder / f"{name}.jsonl", held)
    learn: dict[str, Any] = {
        "block": 32,
        "options": {"epochs": 8, "batch": 4, "learning_rate": 0.01},
    }
    for name, data in (("before", "data"), ("retrained", "rest")):
        own = TrainingRequest(
            method="none",
            model=str(folder / "neox"),
            data=str(folder / f"{data}.jsonl"),
            out=folder / name,
            **learn,
        )
        training.train_model_into_folder(own, lambda what, done, total: None)
    forget: dict[str, Any] = {
        "block": 32,
        "options": {"epochs": 2, "batch": 2, "learning_rate": 1e-3},
    }
    request = TrainingRequest(
        method="npo",
        model=str(folder / "before"),
        data=str(folder / "data.jsonl"),
        out=folder / "after",
        forget=str(folder / "forget.jsonl"),
        **forget,
    )
    training.train_model_into_folder(request, lambda *_: None)
    return folder


def make_unlearning_plan(inputs: Path, **more: Any) -> Plan:
    own = {
        "model": str(inputs / "after"),
        "data": str(inputs / "data.jsonl"),
        "forget": str(inputs / "forget.jsonl"),
    }
    beside = {"before": str(inputs / "before"), "retrained": str(inputs / "retrained")}
    return Plan.from_fields(attack=("extraction-probability",), **{**own, **beside, **more})


def site(plan: Plan) -> Site:
    return Site(plan)


# --- who is who ---


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_is_to_be_forgotten_is_attacked_and_never_known(inputs: Path, seed: int) -> None:
    told = site(
        make_unlearning_plan(inputs, seed=seed, nonmembers=str(inputs / "fresh.jsonl"))
    ).benchmark
    lost = [secret for secret in told.secrets if secret.id in told.forgotten]
    assert [secret.wording.prefix_and_suffix_text for secret in lost if secret.wording] == [
        r["prefix"] + r["suffix"] for r in ROWS[:4]
    ]
    known = {pair.prefix + pair.suffix for pair in told.known}
    assert known and known == set(told.unattacked_training_tokens)
    assert not known & {secret.prefix + secret.suffix for secret in told.secrets}
    assert all(secret.member for secret in lost)
    assert len([s for s in told.secrets if s.member]) + len(known) == 14


def test_a_limit_keeps_both_kinds(inputs: Path) -> None:
    tokenizer = load_causal_lm(str(inputs / "after")).tokenizer
    few = read_files(
        str(inputs / "data.jsonl"), tokenizer, forget=str(inputs / "forget.jsonl"), limit=2
    )
    assert len(few.secrets) == 4 and len(few.forgotten) == 2
    assert [secret.id for secret in few.secrets] == sorted(secret.id for secret in few.secrets)


# --- relearning ---


def test_relearning_is_so_many_steps_on_a_copy(inputs: Path) -> None:
    """Twice the same, as many steps as were asked for, better at what it is trained on; the model
    is untouched."""
    model, texts = (
        load_causal_lm(str(inputs / "after")),
        [tuple(range(1, 20)), tuple(range(40, 50))],
    )
    before = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    done: list[int] = []
    one, other = (
        train_relearned_copy(model, texts, steps=3, rate=1e-3, seed=5, progress=done.append)
        for _ in range(2)
    )
    assert done == [1, 2, 3] * 2
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in model.model.state_dict().items()
    )
    assert all(
        torch.equal(tensor, other.model.state_dict()[name])
        for name, tensor in one.model.state_dict().items()
    )
    block = torch.tensor([[0, *texts[0], 0]])
    assert float(compute_causal_loss(one.model, block)) < float(
        compute_causal_loss(model.model, block)
    )
    assert not any(parameter.requires_grad for parameter in one.model.parameters())


def test_it_is_done_to_the_model_that_never_saw_them_too(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same steps on the same texts, none of which is attacked or was to be forgotten."""
    calls: list[tuple[str, Any, dict[str, Any]]] = []

    def seen(model: Any, texts: Any, **more: Any) -> Any:
        calls.append(
            (model.name, list(texts), {name: more[name] for name in ("steps", "rate", "seed")})
        )
        return model

    monkeypatch.setattr("auditor.runs.targets.train_relearned_copy", seen)
    plan = make_unlearning_plan(inputs, relearn=7, relearn_rate=0.002)
    own = site(plan)
    beside = UnlearningBaselines(own)
    assert (
        beside.load_baseline(RelearnedBaseline())
        is beside.load_baseline(RelearnedBaseline())
        is own.model
    )
    assert beside.load_baseline(RetrainedBaseline(relearned=True)) is own.model_before_or_retrained(
        "retrained"
    )
    (first, second) = calls
    assert (
        first[0].endswith("after") and second[0].endswith("retrained") and first[1:] == second[1:]
    )
    assert (
        first[2] == {"steps": 7, "rate": 0.002, "seed": 0}
        and first[1] == own.benchmark.unattacked_training_tokens
    )


# --- the numbers ---


def test_changes_by_hand() -> None:
    values = {"before": [0.8, 0.4], "after": [0.2, 0.0], "relearned": [0.5, 0.1]}
    values |= {"retrained": [0.0, 0.0], "retrained_relearned": [0.1, 0.1]}
    columns = {model: np.array(column * 10) for model, column in values.items()}
    found = measure_unlearning_group("probe", "extraction_probability", "forgotten", columns)
    means = {model: measured.value for model, measured in found.values.items()}
    assert means == pytest.approx({name: np.mean(column) for name, column in values.items()})
    changes = {name: measured.value for name, measured in found.changes.items()}
    expected = {
        "unlearned": -0.5,
        "left": 0.1,
        "relearned": 0.2,
        "came_back": 0.1,
        "share_back": 0.4,
    }
    assert changes == pytest.approx(expected)
    assert all(m.low <= m.value <= m.high for m in found.changes.values())
    assert {m.unit for name, m in found.changes.items() if name != "share_back"} == {"probability"}
    alone = measure_unlearning_group(
        "probe", "recall", "retained", {"before": np.array([1.0, 0]), "after": np.array([1.0, 0])}
    )
    assert set(alone.changes) == {"unlearned"} and alone.values["after"].unit == "share"
    gained = measure_unlearning_group(
        "p", "exposure", "retained", {**columns, "after": columns["before"] + 0.1}
    )
    few = measure_unlearning_group(
        "p", "exposure", "forgotten", {model: column[:9] for model, column in columns.items()}
    )
    nothing = measure_unlearning_group(
        "p", "exposure", "forgotten", {**columns, "relearned": columns["after"]}
    )
    assert not any("share_back" in one.changes for one in (gained, few, nothing))


def test_a_run_says_what_is_left_of_each_group(inputs: Path, tmp_path: Path, capsys: Said) -> None:
    out, folders = tmp_path / "run", {name: str(inputs / name) for name in MODELS}
    flags = [f"--{name}={folders[name]}" for name in ("before", "retrained")]
    files = [
        f"--{name}={inputs / file}.jsonl"
        for name, file in (("data", "data"), ("nonmembers", "fresh"))
    ]
    more = [
        "--forget",
        str(inputs / "forget.jsonl"),
        "--relearn",
        "2",
        "--attack",
        "extraction-probability",
    ]
    command = [
        "run",
        "--model",
        folders["after"],
        *flags,
        *files,
        *more,
        "--setting",
        "white-box",
        "-o",
        str(out),
        "--verbose",
    ]
    assert run_command_line(command) == 0 and fits_schema(out)
    result = json.loads((out / "result.json").read_text())
    assert [target["title"] for target in result["targets"]] == [
        "After unlearning",
        "Before unlearning",
        "Relearned",
        "Retrained",
        "Retrained, relearned",
    ]
    (left,) = result["unlearning"]
    known = result["benchmark"]["known"]
    assert (left["forgotten"], left["retained"], left["steps"], left["texts"]) == (
        4,
        10 - known,
        2,
        known,
    )
    held = read_rows(out)
    for number in left["numbers"]:
        for model, measured in number["values"].items():
            row = held[f"{left['models'][model]}/white-box/extraction-probability"]
            kept = row["rank_bound" if number["name"] == "greedy" else number["name"]]
            who = {"forgotten": range(4), "retained": range(4, 14), "nonmembers": ()}[
                number["group"]
            ]
            ids = (
                {f"row-{i:06d}" for i in who}
                if who
                else {id for id in row["ids"] if id.startswith("non")}
            )
            values = [x for id, x in zip(row["ids"], kept, strict=True) if id in ids]
            values = [float(x == 1) for x in values] if number["name"] == "greedy" else values
            assert measured["value"] == pytest.approx(np.mean(values)) and measured["n"] == len(
                values
            )
    names = {(number["name"], number["group"]) for number in left["numbers"]}
    groups = ("forgotten", "retained", "nonmembers")
    assert names == {
        (n, g) for n in ("greedy", "extraction_probability", "rank_bound") for g in groups
    }
    perplexity = {target["name"]: target["perplexity"]["value"] for target in result["targets"]}
    assert left["perplexity"]["ratio"]["value"] == pytest.approx(
        perplexity["undefended"] / perplexity["before"]
    )
    said = " ".join(capsys.readouterr().out.split())
    assert f"After unlearning, 4 records forgotten of {14 - known}: greedy decoding gives" in said
    assert f"2 steps of relearning on {known} other records" in said
    report = (out / "report.html").read_text()
    assert "What remains of the forgotten records" in report and "Retrained, relearned" in report


def test_from_python_and_from_a_plan_file_it_is_the_same(inputs: Path, tmp_path: Path) -> None:
    plan = {"before": str(inputs / "before"), "relearn": 1, "setting": "white-box"}
    model, tokenizer = (
        kind.from_pretrained(inputs / "after") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    mine = audit(
        model,
        tokenizer,
        data=ROWS[:14],
        forget=ROWS[:4],
        attacks=["extraction-probability"],
        out=tmp_path / "a",
        **plan,
    )
    files = {name: str(inputs / f"{name}.jsonl") for name in ("data", "forget")}
    own = {**plan, **files, "model": str(inputs / "after"), "attack": ["extraction-probability"]}
    (tmp_path / "audit.toml").write_text(
        "\n".join(f"{name} = {json.dumps(value)}" for name, value in own.items())
    )
    check_command("run", "--config", tmp_path / "audit.toml", "-o", tmp_path / "b")
    assert mine.result.unlearning == load_run(tmp_path / "b").result.unlearning != ()
    with pytest.raises(
        AuditError, match="expected before as a folder or a hub id, got a live GPTNeoX"
    ):
        audit(
            model,
            tokenizer,
            data=ROWS[:14],
            forget=ROWS[:4],
            before=model,
            attacks=["extraction-probability"],
        )


# --- what is refused ---


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            {"forget": None},
            "expected --forget FILE with --before: the records that were to be forgotten; got none",
        ),
        ({"forget": None, "before": None}, "expected --forget FILE with --retrained"),
        ({"relearn_rate": 0.1}, "--relearn-rate needs --relearn STEPS, got none"),
        ({"relearn": 0}, "expected --relearn >= 1, got 0"),
        (
            {"relearn": 2, "relearn_rate": 3.0},
            "expected --relearn-rate above 0 and at most 1, got 3",
        ),
        (
            {"relearn": 2, "before": None, "retrained": None, "forget": None},
            "--relearn needs an unlearned model: expected --before and --forget, got neither",
        ),
        ({"relearn": 2, "engine": "ray"}, "it goes with --engine local"),
        (
            {"relearn": 2, "quantise": "8bit"},
            "--relearn trains all weights, which --quantise does not let it",
        ),
        ({"relearn": 2, "dtype": "float16"}, "--relearn goes with --dtype float32 or bfloat16"),
        (
            {"model": None, "data": None, "retrained": None, "forget": None},
            "--before goes with --model and --data",
        ),
        ({"data": None, "canaries": "c.jsonl"}, "--forget needs --data, got only --canaries"),
    ],
)
def test_a_plan_of_what_does_not_go_together_is_refused(
    inputs: Path, more: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(AuditError) as refused:
        make_unlearning_plan(inputs, **more)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["--forget", "{}/foreign.jsonl", "--before", "{}/before"],
            "of --data, got 2 that are not in it (rows 12, 13",
        ),
        (
            ["--forget", "{}/forget.jsonl"],
            "--forget needs an unlearned model: expected --before MODEL",
        ),
        (
            ["--forget", "{}/forget.jsonl", "--before", "{}/after"],
            "expected --before as another model than --model",
        ),
        (
            ["--forget", "{}/forget.jsonl", "--before", "{}/other"],
            "expected --before as gpt_neox with 257 tokens",
        ),
        (
            ["--forget", "{}/forget.jsonl", "--before", "{}/before", "--known", "{}/forget.jsonl"],
            "without the records to be forgotten, got 4 records",
        ),
        (
            [
                "--forget",
                "{}/forget.jsonl",
                "--before",
                "{}/before",
                "--known-fraction",
                "0",
                "--relearn",
                "2",
            ],
            "expected auxiliary data to relearn on",
        ),
        (
            [
                "--forget",
                "{}/forget.jsonl",
                "--before",
                "{}/before",
                "--defense",
                "npo",
                "-D",
                "model={}/after",
            ],
            "--before says that --model is the unlearned model, but --defense npo is one too",
        ),
        (["--defense", "npo", "-D", "model={}/after"], "expected --forget FILE with --defense npo"),
    ],
)
def test_bad_input_is_one_sentence(
    inputs: Path, tmp_path: Path, capsys: Said, options: list[str], sentence: str
) -> None:
    own = [
        "run",
        "--model",
        str(inputs / "after"),
        "--data",
        str(inputs / "data.jsonl"),
        "-o",
        str(tmp_path / "run"),
    ]
    command = [
        *own,
        "--attack",
        "extraction-probability",
        *(word.format(inputs) for word in options),
    ]
    check_command(*command, code=2)
    said = capsys.readouterr().err
    assert (
        sentence in " ".join(said.split())
        and "Traceback" not in said
        and not (tmp_path / "run").exists()
    )


def test_in_the_lab_relearning_wants_a_defense_that_forgets(tmp_path: Path, capsys: Said) -> None:
    check_command("run", "--attack", "perplexity", "--relearn", "5", "-o", tmp_path / "run", code=2)
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "--relearn needs an unlearned model: expected --defense gradient-ascent or npo, got neither"
        in said
    )
