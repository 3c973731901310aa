"""The command in process, on a GPT-2 that learnt prefix/suffix records by heart: what a user can
do, and do wrong.

Pairs of columns, PMixED with a budget, several
places to interrupt a run, and the refusals.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from auditor.cli import run_command_line
from auditor.commands import console
from auditor.conclusions import secret_details
from auditor.core.nouns import CellKey, Guesses, Observation
from auditor.models.loading import load_causal_lm
from auditor.records.folder import RunFolder
from auditor.records.journal import GUESSES, OBSERVATIONS, CellJournal
from auditor.records.table import TABLE
from auditor.runs import machine
from tests.conftest import check_command, fits_schema

Said = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
PLANTED = "quokkaberry"  # part of every record, and of nothing else
POSITIONS, VOCABULARY = 64, 270


def records(count: int, offset: int = 0) -> list[dict[str, str]]:
    """Pairs of two shapes, so that batches are cut by shape too."""
    return [
        {
            "prefix": f"ward {i % 7} bed {i * 37 % 97:02d} code" + (" blue" if i % 3 == 0 else ""),
            "suffix": f" {i * 7919 % 997:03d} {PLANTED}",
        }
        for i in range(offset, offset + count)
    ]


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def gpt2(vocab_size: int, seed: int = 0, positions: int = POSITIONS) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    no_dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape: dict[str, Any] = {"n_embd": 48, "n_layer": 2, "n_head": 2, "n_positions": positions}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=vocab_size, eos_token_id=0, bos_token_id=0, **shape, **no_dropout)
    )


def lora(*layers: str) -> LoraConfig:
    """Members that say something else than the public model, without training: B is random too."""
    return LoraConfig(
        r=2,
        target_modules=list(layers),
        task_type="CAUSAL_LM",
        fan_in_fan_out=True,
        init_lora_weights=False,
    )


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def learn(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> None:
    """Until the suffixes are known by heart; prefixes are not asked for."""
    texts = [tokenizer(row["prefix"] + row["suffix"])["input_ids"] for row in rows]
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    labels = ids.clone()
    for label, text, row in zip(labels, texts, rows, strict=True):
        label[: len(tokenizer(row["prefix"])["input_ids"])] = -100
        label[len(text) :] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(150):
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.2


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model, public, two LoRA members, data.jsonl, fresh.jsonl."""
    folder = tmp_path_factory.mktemp("inputs")
    rows = records(30)
    texts = [row["prefix"] + row["suffix"] for row in rows]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<end>"],
        show_progress=False,
        initial_alphabet=alphabet,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    model = gpt2(len(fast))
    save(model, fast, folder / "public")
    learn(model, fast, rows)
    save(model, fast, folder / "model")
    for member in range(2):
        base = GPT2LMHeadModel.from_pretrained(folder / "public")
        torch.manual_seed(member)
        adapted = get_peft_model(base, lora("c_attn", "c_fc"))
        adapted.save_pretrained(str(folder / "ensemble" / f"member-{member}"))
    write(folder / "data.jsonl", rows)
    write(folder / "fresh.jsonl", records(6, offset=400))
    return folder


ETHICIST = [
    "--attack",
    "ethicist",
    *(f"-Aethicist.{o}" for o in ("prompt_length=3", "epochs=2", "warmup_steps=1")),
]


def command(inputs: Path, out: Path, *more: str) -> list[str]:
    model = () if "--model" in more else ("--model", str(inputs / "model"))
    return [
        "run",
        *model,
        "--data",
        str(inputs / "data.jsonl"),
        "-A",
        "samples=4",
        "-o",
        str(out),
        *more,
    ]


def pmixed(inputs: Path, *more: str) -> list[str]:
    ensemble = f"ensemble={inputs / 'ensemble'}"
    return [
        "--public",
        str(inputs / "public"),
        "--defense",
        "pmixed",
        "-D",
        ensemble,
        "-D",
        "q=0.5",
        *more,
    ]


def everything(inputs: Path, out: Path, *more: str) -> list[str]:
    """Two attacks, PMixED with a budget that ends in the middle of a row, both settings,
    non-members."""
    attacks = [*ETHICIST, "--attack", "perplexity", "--nonmembers", str(inputs / "fresh.jsonl")]
    budget = ["-D", "pmixed.queries=500", "-D", "pmixed.on_exhaustion=public"]
    return command(inputs, out, *attacks, *pmixed(inputs, *budget), *more)


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def finding(folder: Path, target: str, setting: str, attack: str) -> dict[str, Any]:
    row = (target, setting, attack)
    return next(
        f for f in result(folder)["findings"] if (f["target"], f["setting"], f["attack"]) == row
    )


def value(row: dict[str, Any], name: str) -> float:
    return next(float(m["value"]) for m in row["measurements"] if m["name"] == name)


def guesses(folder: Path) -> dict[tuple[str, str], Guesses]:
    held = RunFolder.reopen(folder)
    cells = {
        json.loads(line)["cell"] for line in (folder / "guesses.jsonl").read_text().splitlines()
    }
    return {
        (cell, secret): found
        for cell in cells
        for secret, found in held.guesses.finished_secrets(CellKey.parse_cell_key(cell)).items()
    }


def assert_same_guesses(found: Path, expected: Path) -> None:
    """Secret by secret: tokens and counts equal, scores within 1e-5."""
    mine, theirs = guesses(found), guesses(expected)
    assert set(mine) == set(theirs) and mine
    for key, one in mine.items():
        other = theirs[key]
        assert (one.samples, one.drawn) == (other.samples, other.drawn)
        by_suffix = {g.suffix: g for g in other.ranked}
        assert {g.suffix: g.count for g in one.ranked} == {
            g.suffix: g.count for g in other.ranked
        }, key
        for guess in one.ranked:
            assert guess.score == pytest.approx(by_suffix[guess.suffix].score, abs=1e-5)


@pytest.fixture(scope="module")
def full(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "full"
    check_command(*everything(inputs, out, "--defense", "uniform-mixing", "-D", "weight=0.05"))
    return out


@pytest.fixture(scope="module")
def budgeted(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "budgeted"
    check_command(*everything(inputs, out))
    return out


# --- a run and what it leaves ---


def test_a_run_measures_every_target_setting_and_attack(full: Path) -> None:
    cells = {(f["target"], f["setting"], f["attack"]) for f in result(full)["findings"]}
    shown = {
        (t, s, a)
        for t in ("undefended", "pmixed", "uniform-mixing")
        for s in ("text-only", "white-box")
        for a in ATTACKS
    }
    controls = ("ensemble-unmixed", "public")
    assert cells == shown | {
        (control, "white-box", attack) for control in controls for attack in ATTACKS
    }
    assert {t["name"] for t in result(full)["targets"] if t["companion"]} == set(controls)
    assert all(
        (full / name).stat().st_size
        for name in ("result.json", "report.md", "report.html", "guesses.jsonl")
    )
    leaked = finding(full, "undefended", "white-box", "perplexity")
    assert value(leaked, "recall") > 0.4
    assert value(leaked, "recall") > value(leaked, "recall_nonmembers")
    assert (
        value(finding(full, "uniform-mixing", "white-box", "perplexity"), "recall_difference") < 0
    )
    assert finding(full, "uniform-mixing", "text-only", "perplexity")["not_applicable"].startswith(
        "needs log-prob"
    )


ATTACKS = ("ethicist", "perplexity")


def test_what_no_control_isolates_is_told_in_one_step(
    full: Path, inputs: Path, tmp_path: Path
) -> None:
    """Without the control of the members' recipe; then with it, and once where it is the undefended
    model itself."""

    def steps(folder: Path) -> list[tuple[list[str], str, str, bool]]:
        chain = finding(folder, "pmixed", "white-box", "perplexity")["chain"]
        assert chain["whole"]["value"] == pytest.approx(
            sum(
                s["difference"]["value"]
                for s in chain["steps"]
                if s["difference"] and s["after"] != "public"
            )
        )
        return [
            (list(s["causes"]), s["before"], s["after"], s["difference"] is None)
            for s in chain["steps"]
        ]

    rest = [
        (["mixing"], "ensemble-unmixed", "pmixed", False),
        (["no private data"], "pmixed", "public", False),
    ]
    assert steps(full) == [
        (["training configuration", "splitting"], "undefended", "ensemble-unmixed", False),
        *rest,
    ]
    report = (full / "report.md").read_text()
    assert "not separated without 'One adapter, all data' (audit train pmixed" in report
    # controls are attacked in the worst case
    assert finding(full, "pmixed", "text-only", "ethicist")["chain"] is None
    likelier = {t["name"]: t["likelihood"] for t in result(full)["targets"]}
    assert [s["after"] for s in likelier["pmixed"]["steps"]] == [
        "ensemble-unmixed",
        "pmixed",
        "public",
    ]
    assert likelier["undefended"] is None and likelier["ensemble-unmixed"] is None
    assert "how much more likely members' true tokens are than non-members'" in report
    shutil.copytree(inputs / "ensemble", tmp_path / "ensemble")
    shutil.copytree(inputs / "ensemble" / "member-0", tmp_path / "ensemble" / "whole")
    given = [
        "--public",
        str(inputs / "public"),
        "--defense",
        "pmixed",
        "-D",
        f"ensemble={tmp_path / 'ensemble'}",
    ]
    for name, model, expected in (
        ("whole", inputs / "model", (["splitting"], "one-adapter", "ensemble-unmixed", False)),
        (
            "same",
            tmp_path / "ensemble" / "whole",
            (["splitting"], "undefended", "ensemble-unmixed", False),
        ),
    ):
        more = [
            *given,
            "--limit",
            "6",
            "--setting",
            "white-box",
            "--attack",
            "perplexity",
            "--model",
            str(model),
        ]
        check_command(*command(inputs, tmp_path / name, *more))
        first, *others = steps(tmp_path / name)
        assert others == [expected, *rest]
        assert first[1:] == (
            ("undefended", "one-adapter", False) if name == "whole" else (*["undefended"] * 2, True)
        )
    assert "| training configuration |" not in (tmp_path / "same" / "report.md").read_text()


def test_results_fit_the_published_schema(full: Path, budgeted: Path, measured: Path) -> None:
    assert all(map(fits_schema, (full, budgeted, measured)))


def test_runs_are_exported(full: Path, tmp_path: Path, said: Said) -> None:
    written = {kind: str(tmp_path / f"out.{kind}") for kind in ("csv", "parquet", "latex")}
    secrets = ["--secrets", str(tmp_path / "secrets.csv")]
    check_command(
        "export",
        full,
        *(word for k, path in written.items() for word in (f"--{k}", path)),
        *secrets,
    )
    table = pandas.read_csv(written["csv"])
    recall = table[(table["measurement"] == "recall") & table["repeats"].isna()]
    row = recall[(recall["target"] == "undefended") & (recall["setting"] == "white-box")].set_index(
        "attack"
    )["value"]
    assert row["perplexity"] == value(
        finding(full, "undefended", "white-box", "perplexity"), "recall"
    )
    by_secret = pandas.read_csv(tmp_path / "secrets.csv")
    mine = by_secret[
        by_secret["member"]
        & by_secret["attack"].eq("perplexity")
        & by_secret["target"].eq("undefended")
    ]
    assert mine["recall"].mean() == pytest.approx(row["perplexity"]) and len(mine) == 24
    assert PLANTED not in said.readouterr().out and all(
        PLANTED not in p.read_text("latin-1") for p in tmp_path.iterdir()
    )


def test_nothing_known_is_attacked_and_nobody_is_counted_twice(full: Path, inputs: Path) -> None:
    counted = result(full)["benchmark"]
    assert (counted["members"], counted["known"], counted["nonmembers"]) == (24, 6, 6)
    secrets = [secret for cell, secret in guesses(full) if cell == "undefended/white-box/ethicist"]
    assert len(secrets) == 30 and sum(s.startswith("nonmember") for s in secrets) == 6


def test_reports_are_rendered_again_byte_for_byte(full: Path, tmp_path: Path, said: Said) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(full, copy)
    (copy / "plan.json").unlink()  # the result alone is enough, wherever the folder lies
    for name in ("report.md", "report.html"):
        (copy / name).write_text("gone")
    check_command("report", copy)
    # but for its folder, which the next command names
    rendered = (copy / "report.md").read_text().replace(str(copy), str(full))
    assert rendered == (full / "report.md").read_text()
    assert "gone" not in (copy / "report.html").read_text()[:10]
    assert str(copy / "report.html") in said.readouterr().out


@pytest.fixture
def said(capsys: Said) -> Said:
    return capsys


@pytest.mark.parametrize(
    ("limit", "more", "code"),
    [
        ("recall=1", (), 0),
        ("recall=0.01", ("--target", "undefended", "--attack", "perplexity"), 1),
        ("recall_nonmembers=0.1", ("--target", "undefended"), 4),  # 0 of 6: nobody can tell
        ("exposure=3", (), 1),
        (
            "recall=1",
            ("--setting", "text-only", "--attack", "perplexity"),
            1,
        ),  # only a row that is not applicable
    ],
)
def test_gate_exit_codes(full: Path, limit: str, more: tuple[str, ...], code: int) -> None:
    check_command("gate", full, "--max", limit, *more, code=code)


def test_the_gate_refuses_a_name_that_nothing_has(full: Path, said: Said) -> None:
    """A misspelt setting or attack is wrong usage like a misspelt target, not a broken limit."""
    for flag, name in (
        ("--target", "undefendet"),
        ("--setting", "worts"),
        ("--attack", "etichist"),
    ):
        check_command("gate", full, "--max", "recall=1", flag, name, code=2)
        assert name in said.readouterr().err


def test_a_run_is_gated_against_itself_and_another(
    full: Path, tmp_path: Path, said: Said, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "step.md"))
    policy = tmp_path / "leakage.toml"
    policy.write_text(
        'rules = ["recall not worse than baseline by 0.9"]\n[[rule]]\nmetric = "recall"\nmax = 1\n'
    )
    junit, more = (
        tmp_path / "gate.xml",
        ["--baseline", str(full), "--markdown", str(tmp_path / "gate.md")],
    )
    check_command("gate", full, "--policy", policy, *more, "--junit", junit)
    assert "gate held" in said.readouterr().out
    assert (tmp_path / "step.md").read_text() == (tmp_path / "gate.md").read_text() != ""
    check_command("gate", full, "--max", "recall_nonmembers=0.1", "--target", "undefended", code=4)
    assert (tmp_path / "step.md").read_text().count("## Leakage gate") == 2  # a summary is added to
    for reading, code in (("pass", 0), ("fail", 1)):
        more = ["--inconclusive", reading, "--target", "undefended", "--junit", str(junit)]
        check_command("gate", full, "--max", "recall_nonmembers=0.1", *more, code=code)
        assert ("<failure" in junit.read_text()) == bool(code)
    # 24 secrets cannot show 2 points
    check_command("gate", full, "--baseline", full, code=4)
    assert "recall not worse than baseline by 0.02" in (tmp_path / "step.md").read_text()


def test_flags_of_a_plan_without_one_are_refused(full: Path, said: Said) -> None:
    check_command("gate", full, "--max", "recall=1", "--power", "0.9", code=2)
    assert "--power and --rules go with --plan" in said.readouterr().err


def test_a_baseline_of_other_settings_is_refused(
    full: Path, budgeted: Path, tmp_path: Path, said: Said
) -> None:
    other = tmp_path / "other"
    shutil.copytree(budgeted, other)
    changed = json.loads((other / "result.json").read_text())
    changed["family"], changed["findings"][0]["options"]["samples"] = "llama with 9 tokens", 99
    (other / "result.json").write_text(json.dumps(changed))
    for command in (
        ["gate", str(full), "--baseline", str(other)],
        ["compare", str(other), str(full)],
    ):
        check_command(*command, code=2)
        message = " ".join(said.readouterr().err.split())
        assert (
            "model family" in message
            and "1 other difference" in message
            and "Traceback" not in message
        )
    (other / TABLE).unlink()
    check_command("gate", full, "--baseline", other, code=2)
    assert "contains no secrets.parquet" in said.readouterr().err
    (other / TABLE).write_text('{"a/b/c": {"hit": 3}}')
    check_command("gate", full, "--baseline", other, code=2)
    check_command("gate", full, "--max", "recall=1", "--baseline", tmp_path / "none", code=2)


def test_runs_side_by_side(full: Path, budgeted: Path, tmp_path: Path, said: Said) -> None:
    names = [str(tmp_path / f"c.{kind}") for kind in ("md", "html", "csv")]
    written = [
        part
        for flag, name in zip(("--markdown", "--html", "--csv"), names, strict=True)
        for part in (flag, name)
    ]
    check_command("compare", full, budgeted, *written)
    assert "undefended, white-box, attack perplexity" in " ".join(said.readouterr().out.split())
    assert all(
        PLANTED not in Path(name).read_text() and "full" in Path(name).read_text() for name in names
    )
    check_command("compare", full, code=2)


def test_a_run_and_its_gate_in_one_step(
    full: Path, inputs: Path, tmp_path: Path, said: Said
) -> None:
    policy, base, out = tmp_path / "leakage.toml", tmp_path / "base", tmp_path / "run"
    policy.write_text('rules = ["recall not worse than baseline by 0.9", "recall <= 0.01"]')
    audit = ["--attack", "perplexity", "--setting", "white-box"]
    check_command(*command(inputs, base, *audit))
    check_command(
        *command(inputs, out, *audit, "--gate", str(policy), "--baseline", str(base)), code=1
    )
    assert (out / "report.html").exists()  # the report is written, whatever the gate says
    assert "1 held, 1 failed" in said.readouterr().out
    assert (
        "<failure" in (out / "gate.xml").read_text()
        and "## Leakage gate failed" in (out / "gate.md").read_text()
    )
    assert "### Since base\n" in (out / "report.md").read_text()
    stripped = tmp_path / "stripped"  # what a CI keeps of a baseline
    stripped.mkdir()
    for name in ("result.json", TABLE):
        shutil.copy(base / name, stripped)
    comment = tmp_path / "comment.md"
    check_command("report", out, "--baseline", stripped, "--markdown", comment)
    assert (
        comment.read_text() == (out / "report.md").read_text()
        and "0 of 1 configuration leaks more" in comment.read_text()
    )
    said.readouterr()
    check_command("report", out, "--baseline", full, code=2)
    assert "is no match" in said.readouterr().err
    assert comment.read_text() == (out / "report.md").read_text()
    lone = tmp_path / "lone.toml"
    lone.write_text("ruls = []")
    for flags in (
        ["--gate", str(policy)],
        ["--gate", str(lone)],
        ["--baseline", str(tmp_path / "nowhere")],
    ):
        check_command(*command(inputs, tmp_path / "refused", *audit, *flags), code=2)
        assert not (tmp_path / "refused").exists(), flags
    scopes = {
        'attack = "perplexiti"': "did you mean 'perplexity'",
        'target = "pmixed"': "unknown target 'pmixed'",
        'setting = "text-only"': "unknown setting 'text-only'",
        'target = "ensemble-unmixed"\nsetting = "text-only"': "a configuration this run does not "
        "have",
    }
    defended = [*pmixed(inputs), "--attack", "perplexity"]
    for scope, message in scopes.items():
        lone.write_text(f'[[rule]]\nrule = "recall <= 1"\n{scope}\n')
        more = defended if "ensemble" in scope else audit
        check_command(*command(inputs, tmp_path / "refused", *more, "--gate", str(lone)), code=2)
        assert message in said.readouterr().err
        assert not (tmp_path / "refused").exists(), scope
    check_command(
        *command(
            inputs,
            tmp_path / "grid",
            *audit,
            "--gate",
            str(policy),
            "--baseline",
            str(base),
            "--seeds",
            "0,1",
        ),
        code=2,
    )


def test_a_report_shows_what_changed_since_another_run(
    full: Path, budgeted: Path, inputs: Path, tmp_path: Path, said: Said
) -> None:
    again, fresh = tmp_path / "again", tmp_path / "fresh"
    shutil.copytree(full, again)
    assert "Since the last run" not in (full / "report.html").read_text()
    check_command("report", again, "--baseline", budgeted)
    page = (again / "report.html").read_text()
    assert "Since the last run" in page and re.search(
        "0 of [0-9]+ configurations? leaks? more", page
    )
    assert run_command_line(["report", str(again)]) == 0  # the folder alone again
    page = (again / "report.html").read_text().replace(str(again), str(full))
    assert page == (full / "report.html").read_text()
    zlib = command(inputs, fresh, "--attack", "zlib", "--setting", "white-box")
    assert run_command_line([*zlib, "--baseline", str(full)]) == 2  # no non-members: other secrets
    assert "is no match for" in said.readouterr().err and (fresh / "report.html").exists()


def test_a_run_keeps_what_its_page_shows_secret_by_secret(full: Path, inputs: Path) -> None:
    found = secret_details.read_secret_details(full)
    members = [secret for secret in found.secrets if secret.member]
    assert (len(members), len(found.secrets)) == (24, 30)
    model = load_causal_lm(str(inputs / "model"))
    rows = {
        row["prefix"] + row["suffix"]: row
        for row in map(json.loads, (inputs / "data.jsonl").read_text().splitlines())
    }
    texts = list(rows)
    for secret in members[
        :6
    ]:  # the true suffix under the target, token by token, as one forward pass gives it
        row = rows[texts[int(secret.id.removeprefix("row-"))]]
        ids = [
            model.tokenizer(text)["input_ids"]
            for text in (row["prefix"], row["prefix"] + row["suffix"])
        ]
        with torch.no_grad():
            distribution = model.model(torch.tensor([ids[1]])).logits[0].log_softmax(-1)
        split = len(ids[1]) - int(secret.length or 0)
        expected = [float(distribution[i - 1, ids[1][i]]) for i in range(split, len(ids[1]))]
        assert found.tokens["undefended"][secret.id] == pytest.approx(expected, abs=2e-4)
    # a companion is no model to mend
    assert set(found.tokens) == {
        "undefended",
        "pmixed",
        "uniform-mixing",
    }
    assert all(
        set(distribution) == {secret.id for secret in members}
        for distribution in found.tokens.values()
    )
    row = found.values_by_cell["undefended", "white-box", "ethicist"]
    assert (
        row.score_is_probability
        and not found.values_by_cell["undefended", "white-box", "perplexity"].score_is_probability
    )
    assert row.is_judged
    prefix_token = dict(zip(row.ids, row.columns["lead"], strict=True))
    assert all(
        (prefix_token[s.id] == s.length) == hit
        for s, hit in zip(found.secrets, row.hit, strict=True)
        if s.member
    )


def test_results_by_a_column_of_the_users(inputs: Path, tmp_path: Path, said: Said) -> None:
    rows = [
        {**row, "department": ["cardiology", "=1+1", "<b>x</b>"][i % 3]}
        for i, row in enumerate(records(30))
    ]
    data, out = write(tmp_path / "data.jsonl", rows), tmp_path / "run"
    audit = [
        "run",
        "--model",
        str(inputs / "model"),
        "--data",
        str(data),
        "--attack",
        "perplexity",
        "-A",
        "samples=4",
    ]
    check_command(*audit, "--setting", "white-box", "--group-column", "department", "-o", out)
    page = (out / "report.html").read_text()
    assert (
        "Recall by department" in page
        and "cardiology" in page
        and "<b>x" not in page
        and "&lt;b&gt;x" in page
    )
    assert {secret.group for secret in secret_details.read_secret_details(out).secrets} == {
        "cardiology",
        "=1+1",
        "<b>x</b>",
    }
    check_command(*audit, "--group-column", "ward", "-o", tmp_path / "none", code=2)
    assert "expected one column --group-column 'ward'" in said.readouterr().err
    check_command("run", "--group-column", "department", code=2)


def test_a_plan_needs_no_run(full: Path, tmp_path: Path, said: Said) -> None:
    check_command("gate", "--plan", "recall=0:0.05")
    out = said.readouterr().out
    assert re.search(r"\n +59 +80 \(80\)  hold recall <= 0.05 if it is 0\n", out)
    assert out.endswith("baseline by 0.05 if nothing gets worse (0 change)\n"), out
    policy = tmp_path / "p.toml"
    policy.write_text('rules = ["recall <= 0.05", "recall not worse than baseline by 0.1"]')
    check_command("gate", "--plan", policy)
    out = said.readouterr().out
    assert re.search(r"\n +59 +80 \(80\)  hold recall <= 0.05 if it is 0\n", out)
    assert "not listed, but one of the 2 rules: recall not worse than baseline by 0.1 (" in out
    summary = (
        r"\n434 secrets are enough for each of these ([0-9]) cases, on 1 of 2 rules "
        r"\(.* at 5% for the 2 rules of a gate together\)"
    )
    listed = re.search(summary, out)
    assert listed and int(listed[1]) == len(
        re.findall(r"^ +[0-9,]+ +[0-9,]+ \([0-9,]+\)  (?:hold|fail) ", out, re.M)
    )
    policy.write_text('rules = ["recall not worse than baseline by 0.1"]')
    check_command("gate", "--plan", policy, code=2)
    assert "expected a policy with a limit on a share" in said.readouterr().err
    for wrong in (
        ["--plan", "recall=1"],
        ["--plan", "recall=0:1", str(full)],
        ["--plan", "recall=0:1", "--power", "2"],
        [],
    ):
        check_command("gate", *wrong, code=2)


def test_no_text_of_the_data_leaves_private_files(
    full: Path, inputs: Path, tmp_path: Path, said: Said
) -> None:
    out = tmp_path / "run"
    check_command(*command(inputs, out, "--attack", "zlib"))
    check_command("report", out)
    assert run_command_line(["gate", str(out), "--max", "recall=0.5"]) in (0, 1, 4)
    seen = said.readouterr()
    assert seen.out and PLANTED not in seen.out + seen.err
    tokenizer = PreTrainedTokenizerFast.from_pretrained(inputs / "model")
    # the last tokens of every suffix
    ids = ", ".join(map(str, tokenizer(f" {PLANTED}")["input_ids"]))
    assert ids in (out / "guesses.jsonl").read_text()  # else the next assertions could not fail
    for path in [*full.rglob("*"), *out.rglob("*")]:
        if path.is_dir():
            continue
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        if path.name not in ("guesses.jsonl", "texts.jsonl") and path.suffix != ".pt":
            text = " ".join(path.read_text("latin-1").split())  # a picture, too
            assert PLANTED not in text and ids not in text, path
    assert stat.S_IMODE(out.stat().st_mode) == 0o700


# --- the same guesses, however they were come by ---


def test_guesses_do_not_depend_on_the_batch_size(
    budgeted: Path, inputs: Path, tmp_path: Path
) -> None:
    """Of all secrets and targets by sevens; one by one, which takes long, of a few secrets of the
    model itself."""
    check_command(*everything(inputs, tmp_path / "run", "--batch-size", "7"))
    assert_same_guesses(tmp_path / "run", budgeted)
    few = [*ETHICIST, "--attack", "perplexity", "--setting", "white-box", "--limit", "3"]
    for size in ("1", "16"):
        check_command(*command(inputs, tmp_path / size, *few, "--batch-size", size))
    assert_same_guesses(tmp_path / "1", tmp_path / "16")


@pytest.mark.parametrize("cut", [1, 8])  # random moments of every command: tests/faults
def test_an_interrupted_run_resumes_to_the_same_end(
    budgeted: Path, inputs: Path, tmp_path: Path, monkeypatch: Patch, said: Said, cut: int
) -> None:
    """Ctrl-C instead of the cut-th write: what was written before stays, and a torn last line does
    no harm."""
    out, append, calls = tmp_path / "run", CellJournal.append, [0]

    def interrupted(self: Any, cell: str, batch: list[Guesses]) -> None:
        calls[0] += self.path.name == GUESSES
        if calls[0] == cut:
            raise KeyboardInterrupt
        append(self, cell, batch)

    monkeypatch.setattr(CellJournal, "append", interrupted)
    check_command(*everything(inputs, out), code=130)
    assert "Continue with: audit run --resume" in " ".join(said.readouterr().err.split())
    assert not (out / "result.json").exists()
    before = guesses(out) if cut > 1 else {}
    assert len(before) == sum(n for n in sizes(budgeted)[: cut - 1])
    if cut > 1:
        whole = (out / "guesses.jsonl").read_bytes()
        # the machine died in the middle of the last line
        (out / "guesses.jsonl").write_bytes(whole[:-7])
    monkeypatch.setattr(CellJournal, "append", append)
    check_command("run", "--resume", out)
    assert_same_guesses(out, budgeted)
    lines = (out / "guesses.jsonl").read_text().splitlines()
    assert len(lines) == len(guesses(budgeted))  # nobody was attacked twice
    for mine, theirs in zip(result(out)["targets"], result(budgeted)["targets"], strict=True):
        assert mine["claim"] == theirs["claim"]
    for one, other in zip(result(out)["findings"], result(budgeted)["findings"], strict=True):
        for mine, theirs in zip(one["measurements"], other["measurements"], strict=True):
            assert [mine[key] for key in ("name", "n", "unit")] == [
                theirs[key] for key in ("name", "n", "unit")
            ]
            for end in ("value", "low", "high"):  # scores agree to 1e-5, whatever a batch held
                assert mine[end] == pytest.approx(theirs[end], rel=1e-5)


def sizes(folder: Path) -> list[int]:
    """How many guesses each write of a run held: up to 16 of one cell."""
    cells: dict[str, int] = {}
    for line in (folder / "guesses.jsonl").read_text().splitlines():
        cell = json.loads(line)["cell"]
        cells[cell] = cells.get(cell, 0) + 1
    return [min(16, count - start) for count in cells.values() for start in range(0, count, 16)]


def test_a_budget_stops_or_is_answered_publicly(
    inputs: Path, tmp_path: Path, budgeted: Path
) -> None:
    stop = ["--setting", "text-only", "-D", "queries=500"]
    check_command(*command(inputs, tmp_path / "stop", *ETHICIST, *pmixed(inputs, *stop)))
    answered = [s for cell, s in guesses(tmp_path / "stop") if cell == "pmixed/text-only/ethicist"]
    everyone = [
        s for cell, s in guesses(tmp_path / "stop") if cell == "undefended/text-only/ethicist"
    ]
    claim = result(tmp_path / "stop")["targets"][1]["claim"]
    drawn = sum(
        g.drawn
        for (cell, _), g in guesses(tmp_path / "stop").items()
        if cell == "pmixed/text-only/ethicist"
    )
    assert 0 < len(answered) < len(everyone) == 24
    assert answered == everyone[: len(answered)] or set(answered) < set(everyone)
    assert claim["queries"] == 500 and claim["spent_queries"] == drawn <= 500
    notes = " ".join(finding(tmp_path / "stop", "pmixed", "text-only", "ethicist")["notes"])
    assert f"covered {len(answered)} of 24 secrets" in notes
    # Publicly: everybody gets an answer, the whole budget is spent, and the claim covers no more
    # than that.
    everybody = [s for cell, s in guesses(budgeted) if cell == "pmixed/text-only/ethicist"]
    assert len(everybody) == 30
    claim = result(budgeted)["targets"][1]["claim"]
    assert claim["queries"] == claim["spent_queries"] == 500


def test_a_stopped_budget_is_neither_spent_twice_nor_forgotten(
    inputs: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Killed inside the claim and resumed: the same secrets are covered, by the same tokens, at the
    same price."""
    flags = [*ETHICIST, *pmixed(inputs, "--setting", "text-only", "-D", "queries=500")]
    check_command(*command(inputs, tmp_path / "whole", *flags))
    calls, append = [0], CellJournal.append

    def interrupted(self: Any, cell: CellKey, batch: list[Any]) -> None:
        wanted = self.path.name == GUESSES and cell.target == "pmixed"
        calls[0] += wanted
        if wanted and calls[0] == 1:
            append(self, cell, batch[:2])  # two secrets are on disk when it dies
            raise KeyboardInterrupt
        append(self, cell, batch)

    monkeypatch.setattr(CellJournal, "append", interrupted)
    out = tmp_path / "cut"
    check_command(*command(inputs, out, *flags), code=130)
    assert sum(cell.startswith("pmixed") for cell, _ in guesses(out)) == 2
    check_command("run", "--resume", out)
    assert_same_guesses(out, tmp_path / "whole")
    claims = [result(folder)["targets"][1]["claim"] for folder in (out, tmp_path / "whole")]
    assert claims[0] == claims[1] and 0 < claims[0]["spent_queries"] <= 500
    drawn = [g.drawn for (cell, _), g in guesses(out).items() if cell.startswith("pmixed")]
    assert claims[0]["spent_queries"] == sum(drawn)
    page = re.sub("<[^>]+>", " ", (out / "report.html").read_text())
    assert f"Tokens drawn: {sum(drawn)} of 500 covered" in " ".join(page.split())


def test_without_a_budget_the_claim_covers_what_is_drawn(inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    check_command(*command(inputs, out, *ETHICIST, *pmixed(inputs, "--setting", "text-only")))
    claim = result(out)["targets"][1]["claim"]
    drawn = sum(
        g.drawn for (cell, _), g in guesses(out).items() if cell == "pmixed/text-only/ethicist"
    )
    assert claim["queries"] == claim["spent_queries"] == drawn > 0
    assert 7.5 < claim["epsilon"]["zero_out"] <= 8 and claim["spent_epsilon"] == claim["epsilon"]


def test_fewer_are_attacked_behind_an_ensemble_and_its_claim_covers_those(
    inputs: Path, tmp_path: Path
) -> None:
    out, attacks = tmp_path / "run", [*ETHICIST, "--attack", "extraction-probability"]
    check_command(*command(inputs, out, *attacks, *pmixed(inputs, "--ensemble-limit", "6")))
    everyone = {s for cell, s in guesses(out) if cell == "undefended/white-box/ethicist"}
    some = {s for cell, s in guesses(out) if cell == "pmixed/white-box/ethicist"}
    assert (
        some < everyone
        and {s for cell, s in guesses(out) if cell == "ensemble-unmixed/white-box/ethicist"} == some
    )
    assert {s for cell, s in guesses(out) if cell == "pmixed/text-only/ethicist"} == some
    members = result(out)["benchmark"]["members"]
    for attack in ("ethicist", "extraction-probability"):
        row = finding(out, "pmixed", "white-box", attack)
        assert row["measurements"][0]["n"] == 6
        assert f"6 of {members} members attacked, evenly spaced (--ensemble-limit)" in row["notes"]
    # Differences are taken on those who were attacked on both sides, and the claim pays for those
    # and no others.
    row = finding(out, "pmixed", "white-box", "ethicist")
    assert {m["n"] for m in row["measurements"] if m["name"] == "recall_difference"} == {6}
    drawn = sum(
        g.drawn for (cell, _), g in guesses(out).items() if cell == "pmixed/text-only/ethicist"
    )
    assert result(out)["targets"][1]["claim"]["queries"] == drawn > 0


def test_the_worst_case_tunes_its_prompt_though_the_claim_row_had_nothing_to_tune_on(
    inputs: Path, tmp_path: Path
) -> None:
    """Without --public the claim row has no soft prompt; that must not become the worst-case row's
    prompt."""
    check_command(*command(inputs, tmp_path / "both", *ETHICIST))
    check_command(*command(inputs, tmp_path / "white-box", *ETHICIST, "--setting", "white-box"))
    alone, beside = (
        finding(tmp_path / name, "undefended", "white-box", "ethicist")
        for name in ("white-box", "both")
    )
    assert any("tuned on the target" in note for note in alone["notes"])
    assert beside["notes"] == alone["notes"]
    assert beside["measurements"] == alone["measurements"]


def test_a_tree_search_is_a_run_like_any_other(inputs: Path, tmp_path: Path) -> None:
    """Not applicable inside the claim, certificates in the notes, rows as cost; all of it survives
    a resume."""
    out = tmp_path / "run"
    options = ["-A", "search=tree", "-A", "threshold=0.05", "-A", "ethicist.tune_on=none"]
    check_command(*command(inputs, out, *ETHICIST, *options, *pmixed(inputs)))
    for target in ("undefended", "pmixed"):
        refused, row = (
            finding(out, target, setting, "ethicist") for setting in ("text-only", "white-box")
        )
        assert "needs log-probabilities" in refused["not_applicable"]
        assert row["decoding"] == "tree to 0.05, top-p 0.7, temperature 0.8" and row["drawn"] == 0
        found = [
            g for (cell, _), g in guesses(out).items() if cell == f"{target}/white-box/ethicist"
        ]
        assert row["rows"] == sum(g.rows for g in found) > 0
        certified = sum(g.certificate.certified for g in found if g.certificate)
        assert f"{certified} a certified likeliest suffix" in " ".join(row["notes"])
    assert value(finding(out, "undefended", "white-box", "ethicist"), "recall") > 0.5
    assert (
        f"{finding(out, 'undefended', 'white-box', 'ethicist')['rows']:,}"
        in (out / "report.md").read_text()
    )
    lines = (out / "guesses.jsonl").read_text().splitlines(keepends=True)
    expected = finding(out, "undefended", "white-box", "ethicist")
    (out / "guesses.jsonl").write_text("".join(lines[:7]))
    check_command("run", "--resume", out)
    again = finding(out, "undefended", "white-box", "ethicist")
    assert (again["rows"], again["notes"]) == (expected["rows"], expected["notes"])


def test_a_plug_in_file_runs_and_resumes(
    inputs: Path, tmp_path: Path, monkeypatch: Patch, said: Said
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from dataclasses import dataclass\n"
        "from typing import ClassVar\n"
        "from auditor.plugins.attack import SamplingAttack\n\n\n"
        "@dataclass(frozen=True)\n"
        "class Votes(SamplingAttack):\n"
        '    """The most frequent sample."""\n\n'
        '    name: ClassVar[str] = "votes"\n'
        "    power: float = 1.0\n\n"
        "    def candidate_scores(self, view, batch):\n"
        "        return [candidates.counts.double() ** self.power for _, candidates in batch]\n"
    )
    out = tmp_path / "run"
    flags = ["--plugin", str(mine), "--attack", "votes", "-A", "votes.power=2"]
    monkeypatch.setattr(CellJournal, "append", interrupt)
    check_command(*command(inputs, out, *flags), code=130)
    monkeypatch.undo()
    assert f"--resume {out} --plugin {mine}" in said.readouterr().err
    check_command("run", "--resume", out, "--plugin", mine)
    row = finding(out, "undefended", "text-only", "votes")
    assert row["options"]["power"] == 2 and not row["not_applicable"]
    mine.write_text(mine.read_text().replace("counts.double()", "-counts.double()"))
    said.readouterr()
    check_command("run", "--resume", out, "--plugin", mine, code=2)
    assert "plug-in 1/mine.py has changed since" in said.readouterr().err
    check_command("list", "--plugin", mine)
    assert "votes" in said.readouterr().out
    check_command("run", "--attack", "votez", "--plugin", mine, code=2)
    assert "did you mean 'votes'" in said.readouterr().err


def test_a_run_resumes_with_its_auxiliary_data_only(
    inputs: Path, tmp_path: Path, said: Said
) -> None:
    known, out = tmp_path / "known.jsonl", tmp_path / "run"
    rows = [json.dumps({"text": f"a note of day {i}, known to all"}) + "\n" for i in range(12)]
    known.write_text("".join(rows))
    check_command(*command(inputs, out, "--attack", "perplexity", "--known", str(known)))
    check_command("run", "--resume", out)
    known.write_text("".join(rows[::2]))
    said.readouterr()
    check_command("run", "--resume", out, code=2)
    assert "auxiliary data/pairs has changed since" in said.readouterr().err


def test_a_run_of_another_version_is_not_resumed(
    inputs: Path, tmp_path: Path, said: Said, monkeypatch: Patch
) -> None:
    """Its answers were mixed with this version's, and the result named this one only."""
    out = tmp_path / "run"
    check_command(*command(inputs, out, "--attack", "perplexity"))
    check_command("run", "--resume", out)
    monkeypatch.setattr(machine, "__version__", "9.9")
    said.readouterr()
    check_command("run", "--resume", out, code=2)
    error = said.readouterr().err
    assert "was started, got audit 9.9, torch " in error and "float32: give a new folder" in error


PROBES = ("extraction-probability", "near-verbatim")


def probed(inputs: Path, out: Path, *more: str) -> list[str]:
    names = [word for name in (*PROBES, "perplexity") for word in ("--attack", name)]
    floor = ["--nonmembers", str(inputs / "fresh.jsonl"), "-A", "beams=3", "-A", "distance=1"]
    return command(
        inputs, out, *names, *floor, "--defense", "uniform-mixing", "-D", "weight=0.05", *more
    )


@pytest.fixture(scope="module")
def measured(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "measured"
    check_command(*probed(inputs, out))
    return out


def test_probes_measure_beside_attacks(measured: Path) -> None:
    out = measured
    for name in PROBES:
        assert (
            "needs log-probabilities"
            in finding(out, "undefended", "text-only", name)["not_applicable"]
        )
        own, defended = (
            finding(out, target, "white-box", name) for target in ("undefended", "uniform-mixing")
        )
        main = own["measurements"][0]["name"]
        assert value(own, main) > 0.3 > value(own, f"{main}_nonmembers")
        assert value(own, main) > value(defended, main)
        assert own["decoding"] == "top-p 0.7, temperature 0.8" and own["drawn"] == 0
    exact = finding(out, "undefended", "white-box", "extraction-probability")
    counted = finding(out, "undefended", "white-box", "perplexity")
    # what 4 samples hit is possible
    assert value(exact, "expected_any_of_10000") >= value(counted, "any_of_k") - 1e-9
    report = (out / "report.md").read_text()
    assert "| chance per sample " in report and "| chance per sample ≥ " in report
    assert "### Expected recall of any of n samples" in report
    results = report.partition("Cost of each configuration")[0]
    assert not re.search(r"\| (extraction-probability|near-verbatim) \| – \|", results)
    lines = [json.loads(line) for line in (out / "observations.jsonl").read_text().splitlines()]
    assert all(set(line) == {"cell", "secret", "values"} for line in lines)
    assert len({(line["cell"], line["secret"]) for line in lines}) == len(lines)
    assert stat.S_IMODE((out / "observations.jsonl").stat().st_mode) == 0o600
    for limit, code in (
        ("extraction_probability=1", 0),
        ("extraction_probability=0.01", 1),
        ("recall=1", 0),
    ):
        check_command(
            "gate",
            out,
            "--max",
            limit,
            "--target",
            "undefended",
            "--setting",
            "white-box",
            code=code,
        )


FREE = """
from dataclasses import dataclass
from typing import ClassVar
from auditor.defenses.uniform_mixing import UniformMixing


@dataclass(frozen=True)
class Free(UniformMixing):
    \"\"\"Forgets what it is charged.\"\"\"

    name = "free"

    def claim(self, scenario, spent):
        return super().claim(scenario, 0)
"""


def test_claims_are_checked_and_gated(inputs: Path, tmp_path: Path, said: Said) -> None:
    """Next to an attack that draws inside the claim; one defense does not charge for it."""
    (tmp_path / "free.py").write_text(FREE)
    out = tmp_path / "run"
    attacks = [*ETHICIST, "--attack", "claim-check", "--limit", "12"]
    defenses = [
        "--defense",
        "uniform-mixing",
        "--defense",
        "free",
        "--plugin",
        str(tmp_path / "free.py"),
    ]
    budget = ["-D", "pmixed.queries=100", "-D", "pmixed.on_exhaustion=public"]
    check_command(*command(inputs, out, *attacks, *pmixed(inputs, *budget), *defenses, "--verbose"))
    assert "claim violations 0" in said.readouterr().out
    covered = [
        note
        for note in finding(out, "pmixed", "text-only", "ethicist")["notes"]
        if "the query budget paid" in note
    ]
    assert len(covered) == 1 and "the public model answered the rest" in covered[0]
    assert (
        "makes no claim" in finding(out, "undefended", "white-box", "claim-check")["not_applicable"]
    )
    for target, broken in (("pmixed", 0), ("uniform-mixing", 0), ("free", 1)):
        row = finding(out, target, "white-box", "claim-check")
        assert value(row, "claim_violations") == broken and row["decoding"] == "ancestral"
        assert any("do not publish" in note for note in row["notes"])
        limit = ["gate", str(out), "--max", "claim_violations=0", "--setting", "white-box"]
        check_command(*limit, "--target", target, code=broken)
    check_command(*limit, code=1)
    assert "tokens were drawn inside the claim and not charged" in (out / "report.html").read_text()
    assert PLANTED not in (out / "report.md").read_text() + (out / "observations.jsonl").read_text()


def fractions_apart(found: Any) -> tuple[list[float], Any]:
    """The fractions in it, and what it is without them."""
    fractions: list[float] = []
    rest = json.loads(json.dumps(found), parse_float=lambda number: fractions.append(float(number)))
    return fractions, rest


def test_a_private_prediction_is_held_to_its_games(inputs: Path, tmp_path: Path) -> None:
    """In both settings the same games; the claim is held to those inside it, and 48 of them are too
    weak for 8."""
    out = tmp_path / "run"
    options = ["-A", "prediction-audit.games=64", "-A", "prediction-audit.tokens=8", "--limit", "4"]
    games = ["--attack", "perplexity", "--attack", "prediction-audit", *options]
    defenses = ["--defense", "uniform-mixing", "-D", "uniform-mixing.weight=0.01"]
    check_command(
        *command(inputs, out, *games, *pmixed(inputs, "-D", "pmixed.queries=8"), *defenses)
    )
    for target in ("undefended", "pmixed", "uniform-mixing"):
        inside, worst = (
            finding(out, target, setting, "prediction-audit")
            for setting in ("text-only", "white-box")
        )
        for part in (
            "audits",
            "measurements",
        ):  # but for rounding: what texts begin with was read for the first
            (fractions, rest), (others, expected) = (
                fractions_apart(row[part]) for row in (inside, worst)
            )
            assert rest == expected and fractions == pytest.approx(others, rel=1e-4)
        (audit,) = inside["audits"]
        assert audit["estimator"] == "games" and audit["canaries"] == sum(audit["table"]) == 48
        assert value(inside, "epsilon_lower_bound") == audit["epsilon"]
    assert (
        finding(out, "ensemble-unmixed", "white-box", "prediction-audit")["audits"][0]["relation"]
        == "zero_out"
    )
    said = (out / "report.md").read_text()
    assert "audit too weak to tell" in said and "was not audited" not in said


def test_one_member_that_answers_always_is_legal(inputs: Path, tmp_path: Path) -> None:
    shutil.copytree(inputs / "ensemble" / "member-0", tmp_path / "one" / "member-0")
    own = ["-D", f"ensemble={tmp_path / 'one'}", "-D", "q=1", "-D", "queries=100"]
    flags = [
        "--attack",
        "claim-check",
        "--attack",
        "perplexity",
        "--limit",
        "4",
        "--setting",
        "white-box",
    ]
    check_command(*command(inputs, tmp_path / "run", *flags, *pmixed(inputs, *own)))
    row = finding(tmp_path / "run", "pmixed", "white-box", "claim-check")
    assert value(row, "claim_violations") == 0 < value(row, "realised_zero_out")


@pytest.mark.parametrize("cut", [1, 3, 4])
def test_an_interrupted_probe_resumes_to_the_same_end(
    measured: Path, inputs: Path, tmp_path: Path, monkeypatch: Patch, cut: int
) -> None:
    """The third write is what takes all secrets: the members' p-values against the non-members."""
    out, calls, append = tmp_path / "run", [0], CellJournal.append

    def interrupted(self: Any, cell: str, batch: list[Observation]) -> None:
        calls[0] += self.path.name == OBSERVATIONS
        if calls[0] == cut:
            raise KeyboardInterrupt
        append(self, cell, batch)

    monkeypatch.setattr(CellJournal, "append", interrupted)
    check_command(*probed(inputs, out), code=130)
    monkeypatch.setattr(CellJournal, "append", append)
    check_command("run", "--resume", out)
    for one, other in zip(result(out)["findings"], result(measured)["findings"], strict=True):
        for mine, theirs in zip(one["measurements"], other["measurements"], strict=True):
            assert mine["name"] == theirs["name"]
            assert [float(mine[k]) for k in ("value", "low", "high")] == pytest.approx(
                [float(theirs[k]) for k in ("value", "low", "high")], abs=1e-5
            )


def test_probes_alone_make_a_report(inputs: Path, tmp_path: Path, said: Said) -> None:
    out = tmp_path / "run"
    files = ["--model", str(inputs / "model"), "--data", str(inputs / "data.jsonl"), "-o", str(out)]
    check_command("run", *files, "--attack", "extraction-probability", "--setting", "white-box")
    screen = " ".join(said.readouterr().out.split())
    assert (
        "extraction probability, mean" in screen and "Not tested: verbatim, near-verbatim" in screen
    )
    report = (out / "report.md").read_text()
    assert "### What to do now" in report and "- Not tested: verbatim (--attack " in report
    assert run_command_line(["gate", str(out), "--max", "recall=1"]) == 1  # no row has a recall
    check_command("run", *files[:4], "--attack", "near-verbatim", "--samples", "5", code=2)
    assert "expected an attack that draws samples with --samples" in said.readouterr().err


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


# --- wrong usage and bad input: one sentence, exit code 2, nothing left behind ---

Case = Callable[[Path, Path], list[str]]  # (inputs, folder for files) -> what is run, -o aside


def with_data(text: str, name: str = "bad.jsonl") -> Case:
    def case(inputs: Path, files: Path) -> list[str]:
        (files / name).write_text(text)
        return [
            "--model",
            str(inputs / "model"),
            "--data",
            str(files / name),
            "--attack",
            "perplexity",
        ]

    return case


def with_flags(*flags: str) -> Case:
    own = () if "--model" in flags else ("--model",)
    return lambda inputs, files: [
        *(word for one in own for word in (one, str(inputs / "model"))),
        "--data",
        str(inputs / "data.jsonl"),
        *flags,
    ]


def long_prefix(inputs: Path, files: Path) -> list[str]:
    write(
        files / "long.jsonl", [{"prefix": "code" * POSITIONS, "suffix": f" {i}"} for i in range(8)]
    )
    return [
        "--model",
        str(inputs / "model"),
        "--data",
        str(files / "long.jsonl"),
        "--attack",
        "perplexity",
    ]


def nan_model(inputs: Path, files: Path) -> list[str]:
    model: Any = GPT2LMHeadModel.from_pretrained(inputs / "model")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[0, 0] = float("nan")
    save(model, PreTrainedTokenizerFast.from_pretrained(inputs / "model"), files / "nan")
    return [
        "--model",
        str(files / "nan"),
        "--data",
        str(inputs / "data.jsonl"),
        "--attack",
        "perplexity",
    ]


def other_model(flag: str, vocab_size: int, positions: int, *more: str) -> Case:
    """A model beside the target that does not fit it."""

    def case(inputs: Path, files: Path) -> list[str]:
        save(gpt2(vocab_size, positions=positions), _tokenizer(inputs), files / "other")
        return [*with_flags(*more)(inputs, files), flag, str(files / "other")]

    return case


def _tokenizer(inputs: Path) -> PreTrainedTokenizerFast:
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(inputs / "model")
    return tokenizer


def bad_plugin(text: str) -> Case:
    def case(inputs: Path, files: Path) -> list[str]:
        (files / "broken.py").write_text(text)
        return [*with_flags()(inputs, files), "--plugin", str(files / "broken.py")]

    return case


def no_members(make: bool) -> Case:
    def case(inputs: Path, files: Path) -> list[str]:
        if make:
            (files / "members").mkdir()
        ensemble = f"ensemble={files / 'members'}"
        flags = with_flags("--attack", "perplexity", "--defense", "pmixed", "-D", ensemble)(
            inputs, files
        )
        return [*flags, "--public", str(inputs / "public")]

    return case


REFUSED: dict[str, tuple[Case, str]] = {
    "attack": (
        with_flags("--attack", "etichist"),
        "unknown attack 'etichist'; did you mean 'ethicist'?",
    ),
    "attack, nothing near": (
        with_flags("--attack", "xyzzy"),
        "known: claim-check, epsilon-audit, ethicist",
    ),
    "defense": (
        with_flags("--defense", "pmixt"),
        "unknown defense 'pmixt'; did you mean 'pmixed'?",
    ),
    "option": (with_flags("-A", "sample=3"), "did you mean 'samples'?"),
    "own option": (with_flags("-A", "ethicist.epoch=3"), "did you mean 'epochs'?"),
    "option of nobody": (with_flags("-A", "ethicst.epochs=3"), "did you mean 'ethicist'?"),
    "option value": (with_flags("-A", "samples=ten"), "samples to be a whole number, got 'ten'"),
    "option word": (with_flags("-A", "eos=never"), "got 'never'"),
    "no data file": (with_flags("--data", "nowhere.jsonl"), "nowhere.jsonl"),
    "no model": (with_flags("--model", "./nowhere"), "'./nowhere': no such folder"),
    "no reference": (with_flags("--reference", "./nowhere"), "'./nowhere': no such folder"),
    "columns": (
        with_data('{"question": "a", "answer": "b"}\n'),
        "the columns prefix and suffix or the column text",
    ),
    "no header": (with_data(f"{PLANTED} 1,{PLANTED} 2\na,b\n", "bad.csv"), "header row missing"),
    "empty": (with_data(""), "is empty"),
    "empty CSV": (with_data("prefix,suffix\n", "bad.csv"), "is empty"),
    "not JSON": (with_data(f'{{"prefix": "{PLANTED}"\n'), "bad.jsonl"),
    "positions": (
        long_prefix,
        f"8 rows: longer than the {POSITIONS - 1} tokens that the model reads at once",
    ),
    "positions for a prompt": (with_flags("-A", "prompt_length=60"), f"has {POSITIONS} positions"),
    "NaN": (nan_model, "returned NaN"),
    "weight": (
        with_flags("--defense", "uniform-mixing", "-D", "weight=1.2"),
        "expected weight in [0, 1], got 1.2",
    ),
    "q": (with_flags("--defense", "pmixed", "-D", "q=0"), "expected q in (0, 1], got 0.0"),
    "pmixed without ensemble": (with_flags("--defense", "pmixed"), "needs -D ensemble=DIR"),
    "ensemble without public": (
        with_flags("--defense", "pmixed", "-D", "ensemble=x"),
        "needs --public MODEL",
    ),
    "fraction": (
        with_flags("--known-fraction", "1.5"),
        "expected --known-fraction in [0, 1), got 1.5",
    ),
    "samples of a search": (
        with_flags("-a", "exact", "--samples", "5"),
        "expected an attack that draws samples",
    ),
    "limit": (with_flags("--limit", "0"), "expected --limit >= 1, got 0"),
    "batch size": (with_flags("--batch-size", "0"), "expected --batch-size"),
    "setting": (with_flags("--setting", "claims"), "got 'claims'"),
    "flag": (with_flags("--atack", "ethicist"), "--atack"),
    "number": (with_flags("--seed", "one"), "--seed"),
    "public of another vocabulary": (other_model("--public", 200, 64), "vocabulary"),
    "plug-in missing": (with_flags("--plugin", "nowhere.py"), "nowhere.py"),
}
# What is refused too late or not as the user's doing: each shows a bug.
REFUSED_TOO: dict[str, tuple[Case, str]] = {
    "ensemble missing": (no_members(False), "members"),
    "ensemble empty": (no_members(True), "members"),
    "ensemble of another model": (
        lambda inputs, files: [
            *with_flags(
                "--attack", "perplexity", "--defense", "pmixed", "-D", f"ensemble={files / 'm'}"
            )(inputs, _members_of_another(inputs, files)),
            *("--public", str(inputs / "public")),
        ],
        "cannot load the ensemble",
    ),
    "positions of the reference": (
        other_model("--reference", VOCABULARY, 8, "--attack", "reference"),
        "8 positions",
    ),
    "positions of the public model": (
        other_model("--public", VOCABULARY, 8, *ETHICIST),
        "8 positions",
    ),
    "device": (with_flags("--device", "cuda"), "cuda"),
    "device of another kind": (
        with_flags("--device", "gpu"),
        "expected --device as auto, cpu, cuda, cuda:N or mps",
    ),
    "device that holds nothing": (with_flags("--device", "meta"), "expected meta to be available"),
    "map that is none": (
        with_flags("--device-map", "all"),
        "expected --device-map as auto, balanced",
    ),
    "map of nothing": (with_flags("--device-map", "{}"), "expected --device-map as auto, balanced"),
    "map and device": (
        with_flags("--device-map", "auto", "--device", "mps"),
        "expected either --device or --device-map, which says where each part of a model goes, got "
        "--device mps",
    ),
    "map twice": (
        with_flags("--device-map", "auto", "--model-arg", "device_map=auto"),
        "expected either --device-map or --model-arg device_map, got both",
    ),
    "bits of no kind": (with_flags("--quantise", "2bit"), "2bit"),
    "bits twice": (
        with_flags("--quantise", "8bit", "--model-arg", "load_in_4bit=true"),
        "expected either --quantise or --model-arg load_in_4bit, got both",
    ),
    "plug-in syntax": (bad_plugin("def (:\n"), "broken.py"),
    "plug-in import": (bad_plugin("import no_such_module_here\n"), "broken.py"),
}


def _members_of_another(inputs: Path, files: Path) -> Path:
    torch.manual_seed(0)
    wide = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    )
    get_peft_model(wide, lora("c_attn")).save_pretrained(str(files / "m" / "member-0"))
    return files


def members_of_another_base(inputs: Path, files: Path) -> list[str]:
    """Everything fits but the weights: an adapter of a model that has the public one's shape."""
    gpt2(VOCABULARY, seed=5).save_pretrained(files / "other")
    base = GPT2LMHeadModel.from_pretrained(files / "other")
    get_peft_model(base, lora("c_attn")).save_pretrained(str(files / "m" / "member-0"))
    ensemble = f"ensemble={files / 'm'}"
    return [*with_flags("--attack", "perplexity")(inputs, files), *pmixed(inputs, "-D", ensemble)]


def private(*more: str) -> Case:
    return lambda inputs, files: [
        *with_flags("--attack", "perplexity")(inputs, files),
        *pmixed(inputs, *more),
    ]


REFUSED_CLAIMS: dict[str, tuple[Case, str]] = {
    "budget": (private("-D", "epsilon=2", "-D", "alpha=3"), "expected epsilon above 4.80169 nats"),
    "queries": (private("-D", f"queries={10**40}"), f"no radius fits {10**40} queries"),
    "published queries": (
        private("-D", f"queries={10**40}", "-D", "accounting=published"),
        "no radius fits",
    ),
    "alpha not whole": (
        private("-D", "alpha=2.5"),
        "expected pmixed.alpha to be a whole number, got '2.5'",
    ),
    "alpha too small": (private("-D", "alpha=1"), "expected alpha >= 2 and at most 256, got 1"),
    "order above the controlled one": (
        lambda inputs, files: [
            *with_flags("--attack", "claim-check", "-A", "order=5")(inputs, files),
            *pmixed(inputs, "--setting", "white-box"),
        ],
        "expected order in 2..4, which the claim controls, got 5",
    ),
    "members of another base": (members_of_another_base, "but member-0 was trained from"),
    "members of another vocabulary": (
        lambda inputs, files: [
            *with_flags(
                "--attack",
                "perplexity",
                "--defense",
                "pmixed",
                "-D",
                f"ensemble={inputs / 'ensemble'}",
            )(inputs, files),
            *other_model("--public", 200, POSITIONS)(inputs, files)[-2:],
        ],
        "vocabulary",
    ),
}


@pytest.mark.parametrize("name", [*REFUSED, *REFUSED_TOO, *REFUSED_CLAIMS])
def test_bad_input_is_refused_in_one_sentence(
    name: str, inputs: Path, tmp_path: Path, monkeypatch: Patch, said: Said
) -> None:
    if name == "device" and torch.cuda.is_available():
        pytest.skip("this machine has the device")
    files, place = tmp_path / "files", tmp_path / "place"
    files.mkdir()
    place.mkdir()
    monkeypatch.chdir(place)
    case, message = {**REFUSED, **REFUSED_TOO, **REFUSED_CLAIMS}[name]
    flags = case(inputs, files)
    said.readouterr()
    assert run_command_line(["run", *flags, "-o", "out"]) == 2, said.readouterr().err
    seen = said.readouterr()
    errors = [line for line in seen.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0], seen.err
    assert seen.err.rstrip().splitlines()[-1] == errors[0]  # one line, and the last one
    assert "Traceback" not in seen.err and PLANTED not in seen.err + seen.out
    assert list(place.iterdir()) == []


def test_an_output_that_cannot_be_written_is_refused(
    inputs: Path, tmp_path: Path, said: Said
) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        check_command(*command(inputs, out), code=2)
        assert "error: " in said.readouterr().err
    assert (tmp_path / "file").read_text() == "mine" and os.listdir(tmp_path) == ["file"]


def test_a_folder_with_a_run_is_not_written_over(full: Path, inputs: Path, said: Said) -> None:
    before = {path.name: path.read_bytes() for path in full.iterdir() if path.is_file()}
    check_command(*command(inputs, full), code=2)
    assert f"--resume {full}" in said.readouterr().err
    assert {path.name: path.read_bytes() for path in full.iterdir() if path.is_file()} == before


def test_a_refused_run_leaves_the_users_files_alone(
    inputs: Path, tmp_path: Path, said: Said
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    check_command(
        *command(inputs, tmp_path / "out", "--data", str(tmp_path / "none.jsonl")), code=2
    )
    assert os.listdir(tmp_path / "out") == ["notes.txt"]


def test_resume_refuses_what_is_no_run_and_further_options(
    full: Path, tmp_path: Path, said: Said
) -> None:
    check_command("run", "--resume", tmp_path, code=2)
    assert "expected a run folder to resume" in said.readouterr().err
    check_command("run", "--resume", tmp_path / "none", code=2)
    for more in (["--seed", "1"], ["-o", "x"], ["-A", "samples=3"], ["--batch-size", "auto"]):
        check_command("run", "--resume", full, *more, code=2)
        assert "give no other option with it" in said.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_gate_and_report_refuse_what_is_no_finished_run(tmp_path: Path, said: Said) -> None:
    for arguments in (["report"], ["gate", "--max", "recall=1"]):
        for folder in (tmp_path, tmp_path / "none"):
            check_command(*arguments, folder, code=2)
            assert said.readouterr().err.startswith("error: ")
    (tmp_path / "result.json").write_text("{")
    check_command("report", tmp_path, code=2)
    assert os.listdir(tmp_path) == ["result.json"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--known-fraction", "0.5"],
        ["--device", "meta"],
        ["--device-map", "auto"],
        ["--quantise", "8bit"],
        ["--dtype", "bfloat16"],
        ["--model-arg", "attn_implementation=eager"],
        ["--trust-remote-code"],
        ["--public", "gpt2"],
        ["--nonmembers", "fresh.jsonl"],
    ],
    ids=lambda flags: flags[0],
)
def test_the_lab_ignores_no_flag_in_silence(
    flags: list[str], tmp_path: Path, monkeypatch: Patch, said: Said
) -> None:
    from auditor.runs import run as module

    def reached(*_: Any) -> None:
        raise AssertionError("the run started, though the lab does not look at this flag")

    monkeypatch.setattr(module, "run_audit", reached)
    assert run_command_line(["run", *flags, "-o", str(tmp_path / "out")]) == 2, (
        said.readouterr().err
    )
    assert flags[0] in said.readouterr().err


def test_a_cache_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: Patch, said: Said
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "file"))
    check_command("run", "-o", tmp_path / "out", code=2)
    assert "AUDIT_CACHE" in said.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_sweep_tunes_anew_where_the_defense_is_another(inputs: Path, tmp_path: Path) -> None:
    """PMixED's radius follows what the row will draw: a prompt of another number of samples is not
    of this model."""
    flags = [*ETHICIST, *pmixed(inputs), "--setting", "white-box", "--limit", "6"]
    check_command(*command(inputs, tmp_path / "grid", *flags, "--sweep", "ethicist.samples=1,40"))
    check_command(*command(inputs, tmp_path / "alone", *flags, "-A", "ethicist.samples=40"))
    (point,) = (
        path for path in (tmp_path / "grid").iterdir() if path.is_dir() and "40" in path.name
    )
    assert_same_guesses(point, tmp_path / "alone")


def test_a_grid_names_runs_of_its_folder_that_are_not_its_points(
    inputs: Path, tmp_path: Path
) -> None:
    """Before: they vanished from the table without a word."""
    flags = ["--attack", "perplexity", "--setting", "white-box", "--limit", "3"]
    for samples in ("1,2", "1,3"):
        sweep = ["--sweep", f"perplexity.samples={samples}"]
        check_command(*command(inputs, tmp_path / "grid", *flags, *sweep))
    table = (tmp_path / "grid" / "sweep.md").read_text(encoding="utf-8")
    (note,) = (line for line in table.splitlines() if "Left out, because" in line)
    assert "samples=2" in note and "samples=1" not in note and "samples=3" not in note


def test_flags_win_over_the_plan_file(inputs: Path, tmp_path: Path, said: Said) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(
        f'model = "{inputs / "model"}"\ndata = "{inputs / "data.jsonl"}"\nattack = ["perplexity"]\n'
        'setting = "white-box"\nseeds = [5, 7]\n[attack_options.perplexity]\nsamples = 2\ntop_p = '
        "0.9\n"
    )
    out = tmp_path / "out"
    check_command("run", "--config", plan, "--seed", "6", "-A", "perplexity.samples=3", "-o", out)
    row = finding(out, "undefended", "white-box", "perplexity")
    assert result(out)["seed"] == 6
    assert (row["options"]["samples"], row["options"]["top_p"]) == (3, 0.9)
    check_command("run", "--config", plan, "--submission", tmp_path / "guesses.csv", code=2)
    assert "--submission writes the guesses of a single run" in said.readouterr().err
    plan.write_text("atack = []\n")
    check_command("run", "--config", plan, code=2)
    assert "did you mean 'attack'" in said.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"), [(["run", "--help"], "--attack"), (["list"], "ethicist")]
)
def test_help_and_list_are_quick_and_import_nothing_heavy(arguments: list[str], said: str) -> None:
    heavy = (
        "{'torch', 'transformers', 'peft', 'numpy', 'pandas', 'matplotlib', 'scipy', 'datasets'}"
    )
    script = (
        f"import sys; from auditor.cli import run_command_line; run_command_line({arguments}); "
        f"sys.exit(bool({heavy} & set(sys.modules)))"
    )
    run_command_line(["list"])  # what plug-ins say is kept from now on
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout and time.perf_counter() - start < 10


_WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        slow = {"torch", "transformers", "peft", "datasets", "sklearn", "scipy.stats"}
        if name in slow:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
from auditor.cli import run_command_line

run, table = sys.argv[1:]
for command in (["report", run, "--baseline", run], ["gate", run, "--max", "recall=1", "--baseline", run],
                ["compare", run, run], ["export", run, "--csv", table]):
    assert run_command_line(command) == 0, command
"""  # noqa: E501


def test_what_reads_the_record_needs_no_torch(full: Path, tmp_path: Path) -> None:
    """Where a gate is held, in CI, nothing is installed that asks a model."""
    run = shutil.copytree(full, tmp_path / "run")
    script = [sys.executable, "-c", _WITHOUT, str(run), str(tmp_path / "rows.csv")]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "gate held" in done.stdout and (tmp_path / "rows.csv").is_file()


_READ = """
import atexit, sys
from auditor.cli import run_command_line
atexit.register(lambda: print(*sys.modules))
assert run_command_line(sys.argv[1:]) == 0
"""
_SLOW = {"filelock", "jinja2", "pandas", "pyarrow.compute", "scipy.stats", "sklearn", "torch"}


@pytest.mark.parametrize(
    ("command", "rest", "slow"),
    [
        ("gate", ["--max", "recall=1"], _SLOW - {"filelock"} | {"matplotlib"}),
        ("report", [], _SLOW - {"jinja2"} | {"auditor.gate.decide", "rich"}),
        ("run", ["--help"], _SLOW | {"matplotlib", "numpy", "pyarrow", "auditor.core.result"}),
    ],
)
def test_what_reads_the_record_imports_only_what_it_needs(
    full: Path, tmp_path: Path, command: str, rest: list[str], slow: set[str]
) -> None:
    folder = [] if command == "run" else [str(shutil.copytree(full, tmp_path / "run"))]
    script = [sys.executable, "-c", _READ, command, *folder, *rest]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(slow & {*done.stdout.splitlines()[-1].split()}) == []


def test_an_unexpected_error_is_ours(
    monkeypatch: Patch, said: Said, inputs: Path, tmp_path: Path
) -> None:
    def bug(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(CellJournal, "append", bug)
    check_command(*command(inputs, tmp_path / "out", "--attack", "perplexity"), code=3)
    assert "please report it" in said.readouterr().err


def test_a_tokenizer_wider_than_the_distribution_is_refused_where_the_data_use_it(
    inputs: Path, tmp_path: Path, said: Said
) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(inputs / "model")
    save(gpt2(100), tokenizer, tmp_path / "narrow")
    data = ["--data", str(inputs / "data.jsonl"), "-o", str(tmp_path / "out")]
    check_command("run", "--model", tmp_path / "narrow", *data, code=2)
    assert "vocabulary mismatch: the tokenizer writes the data with token" in said.readouterr().err
    assert not (tmp_path / "out").exists()
    model = GPT2LMHeadModel.from_pretrained(inputs / "model")
    tokenizer.add_tokens(
        [f"<unused {i}>" for i in range(1 + model.config.vocab_size - len(tokenizer))]
    )
    save(model, tokenizer, tmp_path / "wide")
    check_command("run", "--model", tmp_path / "wide", *data, "--attack", "zlib", "--samples", "1")
    told = json.loads((tmp_path / "out" / "result.json").read_text())["benchmark"]["notes"]
    assert [note for note in told if "the data use no token beyond these entries" in note]


def test_what_libraries_report_of_weights_does_not_bury_a_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers reads its variable once, and may have done so before the command line began."""
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    before = transformers.logging.get_verbosity()
    try:
        transformers.logging.set_verbosity_warning()
        console.silence_libraries()
        assert transformers.logging.get_verbosity() == transformers.logging.ERROR
    finally:
        transformers.logging.set_verbosity(before)


@pytest.mark.parametrize(("shell", "code"), [("bash", 0), ("zsh", 0), ("fish", 0), ("tcsh", 2)])
@pytest.mark.parametrize("flag", ["--show-completion", "--install-completion"])
def test_completion_is_no_fault(
    flag: str,
    shell: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for module in ("typer.completion", "typer._completion_shared"):
        monkeypatch.setattr(f"{module}._get_shell_name", lambda: shell)
    check_command(flag, code=code)
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    assert ("audit" in shown.out or "completion installed" in shown.out) is (code == 0)
