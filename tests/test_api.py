"""From Python: an audit as one call, of live models or of names, and finished runs as tables."""

from __future__ import annotations

import copy
import datetime
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import auditor
from auditor import audit, load_run
from auditor.api import _encode_rows
from auditor.attacks.likelihood_ranking import PerplexityRanking
from auditor.core.errors import AuditError
from auditor.models.base import LanguageModel
from auditor.plugins.attack import SamplingAttack
from auditor.plugins.defense import Defense, Scenario
from auditor.plugins.view import Batch, View
from tests.conftest import check_command, save_tiny

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "runs",
    "home",
    "again",
    "today",
]
ROWS = [
    {
        "prefix": f"{WORDS[i % 13]} {WORDS[(5 * i) % 13]} {i}",
        "suffix": f" {WORDS[(3 * i) % 13]} {i * 7}",
    }
    for i in range(24)
]
ASKED: dict[str, Any] = {
    "attacks": ["perplexity"],
    "samples": 3,
    "prefix_length": 4,
    "suffix_length": 3,
    "seed": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with its tokenizer, and records."""
    root = tmp_path_factory.mktemp("api")
    save_tiny(root / "model")
    (root / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return root


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))


def live(folder: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder / "model"), AutoTokenizer.from_pretrained(
        folder / "model"
    )


def numbers(run: auditor.FinishedRun) -> dict[tuple[Any, ...], float]:
    frame = run.to_frame().dropna(subset="value")
    keys = frame[["target", "setting", "attack", "measurement", "repeats"]].astype(str)
    return dict(zip(keys.itertuples(index=False, name=None), frame.value.tolist(), strict=True))


def test_live_objects_rows_and_names_come_to_the_same(folder: Path, tmp_path: Path) -> None:
    named = audit(
        str(folder / "model"), data=folder / "data.jsonl", out=tmp_path / "named", **ASKED
    )
    model, tokenizer = live(folder)
    defended = audit(
        model, tokenizer, data=ROWS, defenses=["uniform-mixing"], out=tmp_path / "live", **ASKED
    )
    table = audit(model, tokenizer, data=pd.DataFrame(ROWS), out=tmp_path / "table", **ASKED)
    undefended = {key: value for key, value in numbers(defended).items() if key[0] == "undefended"}
    assert numbers(named) and numbers(named) == numbers(table) == undefended
    assert {"undefended", "uniform-mixing"} == set(defended.to_frame().target)
    plan = defended.result.plan
    assert (plan["model"], plan["command"]) == (f"{type(model).__name__} in memory", "audit()")
    guesses = [(run.folder / "guesses.jsonl").read_text() for run in (named, table)]
    assert guesses[0] == guesses[1]


def test_the_command_line_comes_to_the_same(folder: Path, tmp_path: Path) -> None:
    command = [
        "run",
        "--model",
        str(folder / "model"),
        "--data",
        str(folder / "data.jsonl"),
        "--attack",
        "perplexity",
    ]
    command += [
        "--samples",
        "3",
        "--prefix-length",
        "4",
        "--suffix-length",
        "3",
        "--seed",
        "2",
        "-o",
        "cli",
    ]
    check_command(*command)
    model, tokenizer = live(folder)
    assert numbers(load_run("cli")) == numbers(
        audit(model, tokenizer, data=ROWS, out=tmp_path / "api", **ASKED)
    )


def test_a_live_model_is_left_as_it_was_and_training_goes_on(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = live(folder)
    model.train()
    frozen, free = list(model.parameters())[:2]
    frozen.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    first = audit(model, tokenizer, data=ROWS, out=tmp_path / "first", **ASKED)
    assert model.training and not frozen.requires_grad and free.requires_grad
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    free.data += 1
    second = audit(model, tokenizer, data=ROWS, out=tmp_path / "second", **ASKED)
    digests = [run.result.weights["model/in memory"] for run in (first, second)]
    assert len(set(digests)) == 2  # the record says that these are other weights


def test_tables_gate_and_report_of_a_finished_run(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = live(folder)
    run = audit(
        model,
        tokenizer,
        data=ROWS,
        attacks=[PerplexityRanking(samples=2)],
        out=tmp_path / "run",
        suffix_length=3,
        prefix_length=4,
    )
    assert run.result.findings[0].options["samples"] == 2
    again = load_run(tmp_path / "run")
    frame, secrets = again.to_frame(), again.secrets
    assert again.result == run.result and len(frame) and frame.value.dtype == "float64"
    # what a row is called
    own = [
        "kind",
        "target",
        "setting",
        "attack",
        "secret",
        "quantity",
        "token",
    ]
    assert not secrets.duplicated(own).any() and secrets.value.dtype == "float64"
    assert set(secrets.kind) == {"measured", "tokens"} and secrets.member.dtype == "boolean"
    hits = secrets[secrets.quantity == "hit"]
    assert hits.value.mean() == frame[frame.measurement == "recall"].value.iloc[0]
    assert not any(word in secrets.to_csv() for word in ("lazy", "jumps"))
    assert again.gate(["recall <= 1"]).exit_code == 0
    assert again.gate(["recall not worse than baseline by 0.5"], baseline=run).exit_code in (0, 4)
    page = again.report(tmp_path / "page.html")
    assert page.read_text().startswith("<!") and again.report(
        tmp_path / "r.md"
    ).read_text().startswith("#")
    assert "<table" in again._repr_html_() and "perplexity" in again._repr_html_()
    assert str(tmp_path / "run") in repr(again)
    assert "in memory: " in repr(again) and "Undefended" not in again._repr_html_()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"attacks": "perplexity"}, "expected a list of attacks, by name or as instances"),
        ({"data": 3}, "expected data as a path, a table or a list of dictionaries, got int"),
        ({"smaples": 3}, "unknown argument 'smaples'"),
        ({"seed": "x"}, "plan.seed"),
        ({"defenses": ["pmixed"]}, "needs -D ensemble=DIR"),
        ({"attacks": []}, "expected at least one attack"),
        ({"attacks": [3]}, "expected attacks by name or as instances, got 3"),
        (
            {"attacks": [PerplexityRanking(samples=2), PerplexityRanking(samples=3)]},
            "expected each attack once, got 'perplexity'",
        ),
        ({"device": "cuda:7"}, "expected no device with a live model"),
        ({"revision": "main"}, "expected no revision with a live model"),
        ({"base": "./base"}, "expected no base with a live model"),
        ({"base_url": "http://localhost:1/v1"}, "expected no base_url with a live model"),
        ({"max_tokens_total": 3}, "expected no max_tokens_total with a live model"),
        (
            {"data": pd.DataFrame([[1, 2]], columns=["text", "text"])},
            "expected data with each column once",
        ),
        ({"data": [{"text": "a", "image": b"\xff\xfe"}]}, "expected data as text and numbers"),
        (
            {"public": 7},
            "expected public as a folder, a hub id, a transformers model or a LanguageModel, got "
            "int",
        ),
    ],
)
def test_what_is_refused_leaves_nothing(
    folder: Path, tmp_path: Path, arguments: dict[str, Any], said: str
) -> None:
    model, tokenizer = live(folder)
    with pytest.raises(AuditError, match=said):
        audit(model, tokenizer, **{"data": ROWS, **ASKED, "out": tmp_path / "run", **arguments})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("make", [datasets.Dataset.from_list, pa.Table.from_pylist])
def test_whole_numbers_with_gaps_stay_whole_in_tables_of_other_libraries(make: Any) -> None:
    """pandas made 1.0 of 1, which a chat template writes, and one group of two large numbers."""
    call = {"name": "open", "arguments": {"door": 1, "code": None}}
    other = {"name": "open", "arguments": {"door": None, "code": 2**60 + 1}}
    rows = [
        {"messages": [{"role": "assistant", "tool_calls": [call]}], "ward": 2**60 + 1},
        {"messages": [{"role": "assistant", "tool_calls": [other]}], "ward": None},
    ]
    read = [json.loads(line) for line in _encode_rows("data", make(rows)).splitlines()]
    assert read == rows and "1.0" not in json.dumps(read)


@pytest.mark.parametrize("make", [list, pd.DataFrame])
def test_rows_in_memory_keep_their_values(make: Any) -> None:
    rows = [
        {"text": "a", "user": 7, "arguments": {"latitude": 52.52000659999999}},
        {"text": "b", "user": None, "arguments": {"day": datetime.date(2021, 1, 31)}},
    ]
    read = [json.loads(line) for line in _encode_rows("data", make(rows)).splitlines()]
    assert read[0]["arguments"] == {"latitude": 52.52000659999999}
    assert read[1]["arguments"] == {"day": "2021-01-31"} and read[1]["user"] is None
    whole = read[0]["user"]
    assert whole == 7 and (make is pd.DataFrame or isinstance(whole, int))


def test_an_adapter_and_its_base_are_not_two_models(folder: Path, tmp_path: Path) -> None:
    """PEFT puts the adapter into the base in place: as the public model it would be the tuned
    one."""
    base, tokenizer = live(folder)
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules="all-linear"))
    with pytest.raises(AuditError, match="shares weights with model"):
        audit(adapted, tokenizer, public=base, data=ROWS, out=tmp_path / "run", **ASKED)
    other, _ = live(folder)
    with pytest.raises(AuditError, match="reference as a separate model"):
        audit(
            adapted,
            tokenizer,
            public=other,
            reference=adapted,
            data=ROWS,
            out=tmp_path / "run",
            **ASKED,
        )
    run = audit(
        adapted, tokenizer, public=other, reference=other, data=ROWS, out=tmp_path / "run", **ASKED
    )
    assert {"model/in memory", "public/in memory", "reference/in memory"} <= set(run.result.weights)


def test_an_instances_options_are_its_own(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = live(folder)
    model.register_buffer("step", torch.tensor(0.0))  # a number, as some families keep
    asked = {**ASKED, "attacks": [PerplexityRanking(samples=2)], "samples": 3}
    run = audit(model, tokenizer, data=ROWS, out=tmp_path / "run", **asked)
    assert run.result.findings[0].options["samples"] == 2


@dataclass(frozen=True)
class MostOften(SamplingAttack):
    """Rank sampled suffixes by how often they came."""

    name = "most-often"
    power: Any = 1.0

    def candidate_scores(self, view: View, batch: Batch) -> list[Tensor]:
        return [candidates.counts.double() ** self.power for _, candidates in batch]


@dataclass(frozen=True)
class AsItIs(Defense):
    """Serve the target as it is, and say so."""

    name = "as-it-is"

    def protect(self, scenario: Scenario) -> LanguageModel:
        return scenario.target


class Counted(LanguageModel):
    """Which token follows which. silent: gives samples alone."""

    name = "counted"
    capabilities = frozenset({"draw", "distribution"})

    def __init__(self, tokenizer: Any, silent: bool = False, broken: bool = False) -> None:
        self.tokenizer, self.vocab_size, self.broken = tokenizer, len(tokenizer), broken
        counts = torch.full((self.vocab_size, self.vocab_size), 0.01)
        for row in ROWS:
            ids = torch.tensor(tokenizer(row["prefix"] + row["suffix"])["input_ids"])
            counts.index_put_((ids[:-1], ids[1:]), torch.ones(()), accumulate=True)
        self.table = (counts / counts.sum(-1, keepdim=True)).log()
        if silent:
            self.capabilities = frozenset({"draw"})

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        return self.table[contexts[:, -last:]] + self.broken


def test_objects_of_ones_own_classes_are_audited_and_recorded(folder: Path, tmp_path: Path) -> None:
    _, tokenizer = live(folder)
    asked = {**ASKED, "attacks": [MostOften(power=2.0), "perplexity"], "defenses": [AsItIs()]}
    run = audit(Counted(tokenizer), data=pd.DataFrame(ROWS), out=tmp_path / "run", **asked)
    found = {(one.target, one.attack) for one in run.result.findings if not one.not_applicable}
    assert found == set(product(("undefended", "as-it-is"), ("most-often", "perplexity")))
    objects = json.loads((tmp_path / "run" / "plan.json").read_text())["objects"]
    own = {name: f"{__name__}.{name}" for name in ("Counted", "MostOften", "AsItIs")}
    assert objects == {
        "model": own["Counted"],
        "data": "pandas.DataFrame",
        "attack most-often": own["MostOften"],
        "defense as-it-is": own["AsItIs"],
    }
    assert run.result.plan["attack_options"]["most-often"]["power"] == 2
    assert any(
        "cannot be resumed" in note and own["MostOften"] in note
        for note in run.result.benchmark.notes
    )


def test_objects_are_in_no_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {**ASKED, "attacks": [MostOften()], "samples": 3}
    audit(str(folder / "model"), data=folder / "data.jsonl", out=tmp_path / "run", **asked)
    (tmp_path / "run" / "result.json").unlink()
    check_command("run", "--resume", tmp_path / "run", code=2)
    assert "given in Python as objects: attack most-often" in capsys.readouterr().err


def test_an_instance_of_our_own_class_is_no_object(folder: Path, tmp_path: Path) -> None:
    asked = {**ASKED, "attacks": [PerplexityRanking(samples=2)]}
    run = audit(str(folder / "model"), data=folder / "data.jsonl", out=tmp_path / "run", **asked)
    assert run.result.plan["objects"] == {}


@dataclass(frozen=True)
class Namesake(MostOften):
    """Another attack that is called as one of ours is."""

    name = "perplexity"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"engine": "ray"},
            "expected everything by name with --engine ray.*got given in Python as objects: model",
        ),
        (
            {"attacks": [Namesake()]},
            "expected a name for the attack .*Namesake other than 'perplexity'",
        ),
        (
            {"attacks": [MostOften(power=print)]},
            "options of most-often that a record can hold.*power=<built-in",
        ),
        ({"tokenizer": 3}, "a tokenizer only with a live transformers model"),
        (
            {"model": "broken"},
            "expected counted to give consistent distributions.*do not add up to 1",
        ),
        (
            {"model": "silent", "defenses": ["uniform-mixing"]},
            "Counted in memory, which gives none",
        ),
        ({"defenses": ["pmixed"], "public": "own"}, "needs -D ensemble=DIR"),
    ],
)
def test_objects_that_cannot_be_audited_so_are_refused(
    folder: Path, tmp_path: Path, arguments: dict[str, Any], said: str
) -> None:
    _, tokenizer = live(folder)
    named = {"broken": Counted(tokenizer, broken=True), "silent": Counted(tokenizer, silent=True)}
    model = named.get(arguments.get("model", ""), Counted(tokenizer))
    more = {name: value for name, value in arguments.items() if name != "model"}
    more |= {name: Counted(tokenizer) for name in ("public",) if name in more}
    with pytest.raises(AuditError, match=said):
        audit(model, **{"data": ROWS, **ASKED, "out": tmp_path / "run", **more})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("rules", [[], "nowhere.toml"])
def test_a_gate_without_rules_is_refused(folder: Path, tmp_path: Path, rules: Any) -> None:
    model, tokenizer = live(folder)
    run = audit(model, tokenizer, data=ROWS, out=tmp_path / "run", **ASKED)
    with pytest.raises(AuditError):
        run.gate(rules)


def test_a_finished_run_is_read_without_torch(folder: Path, tmp_path: Path) -> None:
    model, tokenizer = live(folder)
    audit(model, tokenizer, data=ROWS, out=tmp_path / "run", **ASKED)
    code = f"""
import sys
class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torch", "transformers", "peft"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from auditor import load_run
run = load_run({str(tmp_path / "run")!r})
run.report(), run.secrets
print(len(run.to_frame()), run.gate(["recall <= 1"]).exit_code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1] == "0"


def test_the_page_says_what_runs(folder: Path) -> None:
    model, tokenizer = live(folder)
    page = (Path(__file__).parents[1] / "docs" / "how-to" / "python.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    names = {"model": model, "tokenizer": tokenizer, "records": ROWS[:16], "fresh": ROWS[16:]}
    lengths = {"prefix_length": 4, "suffix_length": 3}
    for block in blocks:
        code = block.replace("    samples=5,", f"    samples=5, **{lengths},")
        exec(compile(code, "docs/how-to/python.md", "exec"), names)
    assert (
        len(blocks) == 6
        and names["gain"].low <= names["gain"].value <= names["gain"].high
        and len(names["own"].to_frame())
        and names["found"].low <= names["found"].value
        and len(names["frame"])
        and len(names["secrets"])
        and Path("epoch-3.html").is_file()
    )


def test_asking_for_the_package_loads_nothing() -> None:
    code = (
        "import sys, auditor; print([m for m in ('torch', 'pandas', 'auditor.api') if m in "
        "sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )
    with pytest.raises(AttributeError):
        auditor.nothing  # noqa: B018
