"""`--forms`: each deployed form is a row, paired by secret with the audited model; what is refused;
the gate's rule."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from auditor.cli import run_command_line
from auditor.core.plan_parts import TargetPlan, name_deployed_form
from auditor.gate.policy import parse_gate_rule
from auditor.records.result_file import read_result
from auditor.runs.shown_rows import NamedForm, list_form_rows
from auditor.statistics.metrics import RECALL
from tests.conftest import check_command, fits_schema, save_tiny
from tests.remote.conftest import save

Said = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forms")
    save_tiny(folder / "model")
    shutil.copytree(folder / "model", folder / "deployed")
    save(folder / "other")
    for name in ("private", "fresh"):
        rows = [
            {"prefix": f"{name} {i:02d} has", "suffix": f" {i * 37 % 97:02d}"} for i in range(30)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def audit(inputs: Path, *more: str) -> int:
    data = [
        "--data",
        str(inputs / "private.jsonl"),
        "--nonmembers",
        str(inputs / "fresh.jsonl"),
        "--known-fraction",
        "0",
    ]
    attacks = [
        "--attack",
        "extraction-probability",
        "--attack",
        "membership",
        "-A",
        "membership.lowercase=false",
    ]
    options = ["-A", "membership.score=min_k_plus", "--setting", "white-box"]
    return run_command_line(
        ["run", "--model", str(inputs / "model"), *data, *attacks, *options, *more]
    )


def test_each_form_is_a_row_that_is_paired_with_the_full_model(
    inputs: Path, tmp_path: Path, capsys: Said
) -> None:
    run, forms = tmp_path / "run", "merged,int4,pruned:0.5,pruned:0.25"
    assert audit(inputs, "--forms", forms, "--model", str(inputs / "deployed"), "-o", str(run)) == 0
    result = read_result(run)
    assert fits_schema(run)
    titles = {target.name: target.title for target in result.targets}
    assert titles == {
        "undefended": f"{inputs.name}/model",
        "deployed": "deployed",
        "merged": "Merged",
        "int4": "4 bits",
        "pruned:0.5": "Pruned 0.5",
        "pruned:0.25": "Pruned 0.25",
    }
    cost = {target.name: target.perplexity.value for target in result.targets if target.perplexity}
    assert cost["deployed"] == cost["undefended"] == cost["merged"]
    assert len({cost["undefended"], cost["int4"], cost["pruned:0.5"], cost["pruned:0.25"]}) == 4
    page = (run / "report.html").read_text()
    assert "Deployed forms against the audited model" in page
    assert {"model/model.safetensors", "form deployed/model.safetensors"} <= result.weights.keys()
    (tmp_path / "policy.toml").write_text('rules = ["forms <= full + 0.2"]')
    (tmp_path / "less.toml").write_text('rules = ["forms <= full + -0.2"]')
    capsys.readouterr()
    check_command("gate", run, "--policy", tmp_path / "policy.toml")
    held = capsys.readouterr().out
    assert held.count("held  ") == 5 * 2 and "undefended, white-box" not in held
    check_command("gate", run, "--policy", tmp_path / "less.toml", code=1)
    check_command("gate", run, "--max", "extraction_probability=0.5")
    # the full model is judged too
    assert capsys.readouterr().out.count("extraction_probability 0") == 6


def test_a_rule_on_forms_fails_a_run_without_any(
    inputs: Path, tmp_path: Path, capsys: Said
) -> None:
    assert audit(inputs, "-o", str(tmp_path / "run")) == 0
    (tmp_path / "policy.toml").write_text('rules = ["forms <= full"]')
    capsys.readouterr()
    check_command("gate", tmp_path / "run", "--policy", tmp_path / "policy.toml", code=1)
    assert "this run has no forms" in capsys.readouterr().out


def test_the_rule_reads_as_it_is_written() -> None:
    rule = parse_gate_rule("forms <= full + 0.02")
    assert (rule.metric, rule.limit, rule.of_forms, rule.is_paired_difference) == (
        RECALL,
        0.02,
        True,
        True,
    )
    assert str(rule) == "forms <= full + 0.02" and parse_gate_rule("forms<=full").limit == 0


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("pruned:0.5", "pruned:0.5"),
        ("./out/merged-model/", "merged-model"),
        ("llama:out/q4.gguf", "q4.gguf"),
        ("served:http://127.0.0.1:8000/v1", "served:127.0.0.1:8000"),
    ],
)
def test_a_row_is_called_after_its_form(form: str, name: str) -> None:
    assert name_deployed_form(form) == name


FORMS = (
    "expected a form in --forms (fp4, gguf, int4, int8, merged, nf4, pruned) or a model (a folder, "
    "OWNER/NAME of the hub, PROVIDER:NAME), got "
)
REFUSED = {
    "pruned:2": "expected share in (0, 1), got 2",
    "int8:3": "--forms int8 takes no value, got 'int8:3'",
    "int8,int8": "with a name that no other target has, got 'int8' twice",
    "gguf:q2_k": "got 'q2_k': make the file with llama.cpp and give --forms llama:FILE.gguf",
    "int3": FORMS + "'int3'",
    "prune:0.5": FORMS + "'prune:0.5'",
    "no/such/model": "no/such/model",
    "llama:no.gguf": "'no.gguf': no such file",
    "served:127.0.0.1": "expected --base-url as http://HOST:PORT/v1",
    ",": FORMS + "''",
}


@pytest.mark.parametrize("forms", REFUSED)
def test_what_is_no_form_is_refused_before_anything_is_asked(
    forms: str, inputs: Path, capsys: Said
) -> None:
    assert audit(inputs, "--forms", forms, "-o", str(inputs / "refused")) == 2
    assert REFUSED[forms] in " ".join(capsys.readouterr().err.split())
    assert not (inputs / "refused").exists()


@pytest.mark.parametrize("form", ["deployed", "./deployed", "hf:gpt2", "owner/gpt2"])
def test_a_form_may_name_a_model(form: str, inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(inputs)
    (row,) = list_form_rows(TargetPlan(model="model", forms=(form,)), [])
    assert row.defense == NamedForm(form)


def test_a_model_of_other_tokens_is_no_form_and_the_lab_takes_none(
    inputs: Path, capsys: Said
) -> None:
    assert audit(inputs, "--forms", str(inputs / "other"), "-o", str(inputs / "refused")) == 2
    assert "expected --forms to share the target's vocabulary of 257" in capsys.readouterr().err
    check_command("run", "--forms", inputs / "model", "--estimate", code=2)
    assert "which names a model, got the lab" in capsys.readouterr().err
