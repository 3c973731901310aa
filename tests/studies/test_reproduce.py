"""Sweeps and reproductions end to end on a tiny model of token ids; and every paper plan there
is."""

from __future__ import annotations

import csv
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from auditor.cli import run_command_line
from auditor.conclusions import replicates
from auditor.core.errors import AuditError
from auditor.core.result import Chain, ChainStep, Measurement, TargetRecord
from auditor.providers import hugging_face
from auditor.records.folder import RunFolder
from auditor.runs import run as running
from auditor.runs.plan import GridPoint, expand_plan_grid, make_plan
from auditor.statistics.metrics import METRICS
from auditor.studies import ledger, masked_utility, papers, reproduce, sweep
from tests.conftest import check_command, fits_schema, tiny

Said = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and LM-Extraction arrays, of which every other suffix is the model's own greedy
    continuation."""
    folder = tmp_path_factory.mktemp("inputs")
    model = tiny(scale=8.0)
    model.model.save_pretrained(folder / "model")  # type: ignore[attr-defined]
    prefix = torch.randint(1, 61, (24, 6), generator=torch.Generator().manual_seed(0))
    suffix = torch.randint(1, 61, (24, 4), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        tokens = prefix[::2]
        for _ in range(4):
            tokens = torch.cat([tokens, model.model(tokens).logits[:, -1:].argmax(-1)], dim=1)  # type: ignore[attr-defined]
    suffix[::2] = tokens[:, 6:]
    (folder / "data").mkdir()
    np.save(folder / "data" / "tiny_prefix.npy", prefix.numpy().astype(np.uint16))
    np.save(folder / "data" / "tiny_suffix.npy", suffix.numpy().astype(np.uint16))
    return folder


PLAN = """
attack = ["perplexity"]
setting = "white-box"
samples = 3
seeds = [0, 1]

[[variant]]
name = "hot"

[[variant]]
name = "cold"
attack_options = { perplexity = { temperature = 0.1 } }
"""


def own(inputs: Path) -> list[str]:
    return ["--model", str(inputs / "model"), "--data", str(inputs / "data")]


def config(tmp_path: Path, text: str = PLAN) -> list[str]:
    (tmp_path / "plan.toml").write_text(text)
    return ["--config", str(tmp_path / "plan.toml")]


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


# --- sweeps ---


def test_a_sweep_runs_every_point_once_and_resumes(
    inputs: Path, tmp_path: Path, monkeypatch: Patch, said: Said
) -> None:
    out, walked, loaded = tmp_path / "out", [], []
    real, load = running.run_audit, hugging_face.load_causal_lm

    def counted(planned: Any, folder: RunFolder) -> Any:
        if len(walked) == 2 and "stop" not in walked:
            walked.append("stop")
            raise KeyboardInterrupt
        walked.append(folder.path.name)
        return real(planned, folder)

    def counting(name: str, options: Any) -> Any:
        loaded.append(name)
        return load(name, options)

    monkeypatch.setattr(sweep, "run_audit", counted)
    monkeypatch.setattr(hugging_face, "load_causal_lm", counting)
    command = ["run", *own(inputs), *config(tmp_path), "-o", str(out)]
    monkeypatch.setattr(sys, "argv", ["audit", *command])
    check_command(*command, code=130)
    monkeypatch.setattr(sys, "argv", ["audit", "run", "--resume", str(out)])
    assert walked == ["hot_seed-0", "cold_seed-0", "stop"]
    assert len(loaded) == 1, "the target was loaded for every point"
    before = (out / "hot_seed-0" / "result.json").read_bytes()
    assert run_command_line(["run", "--resume", str(out)]) == 0, said.readouterr().err
    assert walked[3:] == ["hot_seed-1", "cold_seed-1"]
    told = {json.loads(path.read_text())["command"] for path in out.glob("*/result.json")}
    assert told == {shlex.join(["audit", *command])}  # which is what reproduces each of them
    assert (out / "hot_seed-0" / "result.json").read_bytes() == before
    assert run_command_line(command) == 0 and len(walked) == 5  # finished: nothing is run again
    assert all(fits_schema(path.parent) for path in out.glob("*/result.json"))
    table = rows(out / "sweep.csv")
    assert [(row["variant"], row["seeds"], row["n"]) for row in table] == [
        ("hot", "0, 1", "24"),
        ("cold", "0, 1", "24"),
    ]
    recalls = [json.loads((out / f"cold_seed-{s}" / "result.json").read_text()) for s in (0, 1)]
    values = [result["findings"][0]["measurements"][0]["value"] for result in recalls]
    assert float(table[1]["recall"]) == pytest.approx(np.mean(values))
    assert 0 < float(table[1]["recall"]) < 1 and float(table[1]["recall_difference"]) >= 0
    assert "| hot" in (out / "sweep.md").read_text()


@pytest.fixture
def said(capsys: Said) -> Said:
    return capsys


def test_flags_sweep_too(inputs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = [
        "-a",
        "perplexity",
        "--setting",
        "white-box",
        "--sweep",
        "perplexity.samples=1,2",
        "--seeds",
        "3-4",
    ]
    check_command("run", *own(inputs), *flags, "-o", out)
    assert [(row["perplexity.samples"], row["seeds"]) for row in rows(out / "sweep.csv")] == [
        ("1", "3, 4"),
        ("2", "3, 4"),
    ]


def test_a_point_is_the_run_it_would_be_alone(inputs: Path, tmp_path: Path) -> None:
    """What runs share (models, data, soft prompts) changes nothing about them."""
    text = """
attack = ["ethicist"]
setting = "white-box"
attack_options = { ethicist = { prompt_length = 3, epochs = 2, warmup_steps = 1, samples = 4 } }
variant = [
    { name = "calibrated" },
    { name = "unsmoothed", attack_options = { ethicist = { alpha = 0 } } },
    { name = "likeliest", attack_options = { ethicist = { confidence = "perplexity" } } },
]
"""
    out, alone = tmp_path / "out", tmp_path / "alone"
    check_command("run", *own(inputs), *config(tmp_path, text), "-o", out)
    options = (
        "prompt_length=3",
        "epochs=2",
        "warmup_steps=1",
        "samples=4",
        "confidence=perplexity",
    )
    single = [
        "-a",
        "ethicist",
        "--setting",
        "white-box",
        *(f"-Aethicist.{option}" for option in options),
    ]
    check_command("run", *own(inputs), *single, "-o", alone)
    assert (out / "likeliest_seed-0" / "guesses.jsonl").read_text() == (
        alone / "guesses.jsonl"
    ).read_text()
    states = [
        torch.load(path, weights_only=True)["prompt"] for path in sorted(out.glob("*/state/*.pt"))
    ]
    calibrated, likeliest, unsmoothed = states
    assert torch.equal(calibrated, likeliest) and not torch.equal(calibrated, unsmoothed)


def test_a_folder_of_other_runs_is_not_mixed_up(inputs: Path, tmp_path: Path, said: Said) -> None:
    out = tmp_path / "out"
    check_command("run", *own(inputs), *config(tmp_path), "--seeds", "0", "-o", out)
    other = config(tmp_path, PLAN.replace("samples = 3", "samples = 2"))
    check_command("run", *own(inputs), *other, "--seeds", "0", "-o", out, code=2)
    assert "was run with samples = 3, not 2" in said.readouterr().err
    versions = next(out.glob("*/versions.txt"))
    earlier = versions.read_text()
    versions.write_text(earlier.replace("torch ", "torch 0."))
    check_command("run", *own(inputs), *config(tmp_path), "--seeds", "0", "-o", out, code=2)
    assert "expected audit " in said.readouterr().err
    versions.write_text(earlier)
    check_command("run", *own(inputs), *config(tmp_path), "--seeds", "0", "-o", out)


def test_a_bad_point_is_refused_before_any_starts(inputs: Path, tmp_path: Path, said: Said) -> None:
    text = (
        PLAN + '\n[[variant]]\nname = "bad"\nattack_options = { perplexity = { temprature = 1 } }\n'
    )
    check_command("run", *own(inputs), *config(tmp_path, text), "-o", tmp_path / "out", code=2)
    assert "did you mean 'temperature'" in said.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_point_that_fails_is_a_row_and_the_others_go_on(
    inputs: Path, tmp_path: Path, said: Said
) -> None:
    out = tmp_path / "out"
    swept = [
        "--sweep",
        "prefix_length=60,6",
        "-a",
        "perplexity",
        "-A",
        "samples=2",
        "--setting",
        "white-box",
    ]
    check_command("run", *own(inputs), *swept, "-o", out, code=2)
    assert "1 of 2 points failed; prefix_length=60, seed 0" in said.readouterr().err
    failed, done = rows(out / "sweep.csv")
    assert "expected --prefix-length <= 6" in failed["failure"] and failed["recall"] == ""
    assert done["failure"] == "" and float(done["recall"]) > 0
    assert not (out / "prefix_length=60_seed-0").exists()


def test_known_pairs_are_limited_and_nested(inputs: Path, tmp_path: Path) -> None:
    known = {}
    for limit in (2, 3, 99):
        plan = make_plan(
            {"model": str(inputs / "model"), "data": str(inputs / "data"), "known_limit": limit}, {}
        )
        known[limit] = running.Site(plan).benchmark.known
    assert [len(pairs) for pairs in known.values()] == [2, 3, 5]
    assert set(known[2]) < set(known[3]) < set(known[99])


# --- reproductions ---

PAPER = """
title = "A paper"
setting = "white-box"
attack = ["perplexity"]
[scale.lab]
samples = 3
seeds = [0]
[scale.paper]
model = "someone/big"
samples = 100
"""
TABLE = """
title = "Table 1: temperature"
[[variant]]
name = "hot"
[[variant]]
name = "cold"
attack_options = { perplexity = { temperature = 0.05 } }
[[variant]]
name = "odd"
attack_options = { perplexity = { nothing = 1 } }
[[claim]]
id = "cold"
text = "Cold sampling extracts & finds 25%, or nearly"
paper = "0.5"
metric = "recall"
of = { variant = "cold" }
expect = "> 0.2"
[[claim]]
id = "zero"
text = "Cold sampling extracts nothing"
paper = "0"
metric = "recall"
of = { variant = "cold" }
expect = "< 0.1"
[[claim]]
id = "odd"
text = "The odd one wins"
paper = "?"
metric = "recall"
of = { variant = "odd" }
minus = { variant = "cold" }
expect = "> 0"
[[claim]]
id = "number"
scale = "paper"
text = "A number of the paper's own size"
paper = "0.5"
metric = "recall"
of = { variant = "cold" }
expect = [0.4, 0.6]
"""


@pytest.fixture
def paper(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "paper.toml").write_text(PAPER)
    (folder / "table1.toml").write_text(TABLE)
    return folder


def test_a_reproduction_writes_its_ledger(
    inputs: Path, paper: Path, tmp_path: Path, said: Said
) -> None:
    out = tmp_path / "out"
    command = ["reproduce", str(paper), *own(inputs), "-o", str(out)]
    # the odd one cannot run; the ledger is written all the same
    check_command(*command, code=2)
    seen = said.readouterr()
    assert (
        "1 point failed, which the ledger calls not run; table1/odd, seed 0: unknown option"
        in seen.err
    )
    shown = seen.out
    assert "holds" in shown and "refuted" in shown and "not run" in shown
    found = {row["id"]: row for row in rows(out / "ledger.csv")}
    assert {id: row["verdict"] for id, row in found.items()} == {
        "cold": "holds",
        "zero": "refuted",
        "odd": "not run",
    }
    assert "did you mean" in found["odd"]["note"] or "unknown option" in found["odd"]["note"]
    assert found["cold"]["setting"] == "model on lm-extraction; n 19; K 3; seeds 0"
    held = json.loads((out / "table1" / "cold_seed-0" / "result.json").read_text())["findings"][0][
        "measurements"
    ][0]
    assert float(found["cold"]["ours"]) == pytest.approx(held["value"])
    whole = json.loads((out / "ledger.json").read_text())
    assert whole["rule"] == ledger.RULE and len(whole["claims"]) == 3
    assert r"extracts \& finds 25\%" in (out / "ledger.tex").read_text()
    assert "A claim holds if" in (out / "ledger.md").read_text()
    before = sorted(path.stat().st_mtime_ns for path in out.glob("table1/*/result.json"))
    check_command(*command, code=2)
    assert sorted(path.stat().st_mtime_ns for path in out.glob("table1/*/result.json")) == before
    shutil.rmtree(out / "table1" / "hot_seed-0")
    (paper / "table1.toml").write_text(TABLE.replace("nothing = 1", "samples = 1"))
    assert (
        run_command_line(command) == 0 and (out / "table1" / "hot_seed-0" / "result.json").is_file()
    )


def test_a_ledger_beside_another_says_first_where_they_disagree(tmp_path: Path) -> None:
    paper = papers.load_paper("exact")
    verdicts = {
        "a": ("holds", "refuted"),
        "b": ("holds", "holds"),
        "c": ("not at this scale", "holds"),
    }
    for at, out in enumerate((tmp_path / "small", tmp_path / "real")):
        out.mkdir()
        number = Measurement("x", 0.25 + at / 2, 0.2, 0.8, 30)
        entries = [
            ledger.LedgerRow("ten-samples", id, f"Claim {id}", "1", "", "> 0", own[at], number)
            for id, own in verdicts.items()
        ]
        if at:
            entries.append(
                ledger.LedgerRow("ten-samples", "d", "Claim d", "1", "", "> 0", "refuted", number)
            )
        other = reproduce.read_other_ledger(tmp_path / "small", paper) if at else None
        reproduce.write_ledger_files(out, paper, ("lab", "smollm2")[at], entries, other)
    first, _, table = (tmp_path / "real" / "ledger.md").read_text().partition("\n\n")
    assert first == (
        "They disagree about a (Claim a: holds on lab, refuted on smollm2). 1 of 4 claims are "
        "decided alike on both, 2 only on one."
    )
    assert "ours, lab | verdict, lab | ours, smollm2 | verdict, smollm2" in table
    found = {row["id"]: row for row in rows(tmp_path / "real" / "ledger.csv")}
    assert (found["a"]["ours"], found["a"]["lab_ours"], found["a"]["lab_verdict"]) == (
        "0.75",
        "0.25",
        "holds",
    )
    assert (found["d"]["lab_ours"], found["d"]["lab_verdict"]) == ("", "not run")
    with pytest.raises(
        AuditError, match="expected a ledger of ethicist beside it, got one of exact"
    ):
        reproduce.read_other_ledger(tmp_path / "small", papers.load_paper("ethicist"))


def test_what_a_reproduction_refuses(paper: Path, tmp_path: Path, said: Said) -> None:
    refused = {
        "did you mean 'ethicist'": ["eticist"],
        "did you mean 'table2'": ["ethicist", "--plan", "tabel2"],
        "did you mean 'paper'": ["ethicist", "--scale", "papr"],
        "attacks someone/big: give --data": [str(paper), "--scale", "paper"],
        "expected --seeds like": ["ethicist", "--seeds", "x"],
        "error: expected --limit >= 1, got 0": ["ethicist", "--limit", "0"],
        "--lab smollm2 goes with --scale lab, got --scale paper": [
            "ethicist",
            "--lab",
            "smollm2",
            "--scale",
            "paper",
        ],
        "ethicist/figure3 is not run at scale smollm2: table2,": [
            "ethicist",
            "--lab",
            "smollm2",
            "--plan",
            "figure3",
        ],
        "unknown scale of claims: 'smollm2'": ["claims", "--lab", "smollm2"],
    }
    for message, arguments in refused.items():
        check_command("reproduce", *arguments, "-o", tmp_path / "out", code=2)
        assert message in said.readouterr().err
    (paper / "table1.toml").write_text(
        TABLE.replace('variant = "odd" }\nminus', 'variant = "ood" }\nminus')
    )
    check_command("reproduce", paper, "-o", tmp_path / "out", code=2)
    assert "unknown variant in claim 'odd': 'ood'; did you mean 'odd'" in said.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_list_imports_nothing_heavy() -> None:
    script = (
        "import sys; from auditor.cli import run_command_line; code = "
        "run_command_line(['reproduce', '--list']); sys.exit(code or bool({'torch', 'scipy', "
        "'pandas', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "ethicist" in done.stdout and "table2" in done.stdout
    assert (
        "  uniform-mixing  Uniform mixing\n" in done.stdout and "  table1   Table 1" in done.stdout
    )


# --- the papers that come with the program ---

ALL = [
    pytest.param(paper, plan, scale, id=f"{name}-{plan}-{scale}")
    for name, paper in (
        (name, papers.load_paper(name)) for name in papers.find_bundled_paper_folders()
    )
    for scale in paper.scales
    for plan in paper.plans_at_scale(scale)
    if papers.PUBLISHED not in paper.plans[plan]  # they have no points: test_published.py
]


MEASURED = (
    "epsilon",
    "nominal_epsilon",
    "perplexity",
    "perplexity_subset_average",
    "extraction_probability",
    "extraction_probability_nonmembers",
    "extraction_probability_ancestral",
    "exposure",
    "exposure_nonmembers",
    "near_verbatim_probability",
    "near_verbatim_probability_splitting",
    "near_verbatim_probability_mixing",
    "realised_zero_out",
    "likelihood_splitting",
    "likelihood_mixing",
    "likelihood_no_private_data",
)


def make_small_study(
    paper: papers.Paper, plan: str, scale: str, model: bool = False
) -> reproduce.RunStudy | reproduce.UtilityStudy:
    given = (
        {"data": "d"}
        if scale in ("paper", "arrays")
        else {"model": "m", "data": "d"}
        if model
        else {}
    )
    return reproduce.make_paper_study(paper, plan, scale, given)


def grid(paper: papers.Paper, plan: str, scale: str, model: bool = False) -> list[GridPoint]:
    runs = make_small_study(paper, plan, scale, model)
    return runs.grid if isinstance(runs, reproduce.RunStudy) else []


@pytest.mark.parametrize(("paper", "plan", "scale"), ALL)
def test_every_claim_names_points_and_metrics_that_exist(
    paper: papers.Paper, plan: str, scale: str
) -> None:
    statements = reproduce.list_claim_statements(paper, plan, scale)
    assert statements and paper.plans[plan]["title"]
    kind = make_small_study(paper, plan, scale)
    of_guesses = {metric.name for metric in METRICS if metric.is_of_member_guesses}
    known = (
        {*of_guesses, *MEASURED}
        if isinstance(kind, reproduce.RunStudy)
        else {*masked_utility.HEADINGS, "perplexity_over_vocabulary", "slowdown"}
    )
    for statement in statements:
        ledger.check_claim_points_are_planned(statement, kind.planned_points())
        for _, term in statement.signed_terms:
            named = term.metric.split("(")[0]
            assert named in known, (statement.id, term.metric)
        assert statement.paper and statement.text


@pytest.mark.parametrize(("paper", "plan", "scale"), ALL)
def test_every_point_is_a_plan_that_can_run(paper: papers.Paper, plan: str, scale: str) -> None:
    assert make_small_study(paper, plan, scale).planned_points()
    for point in grid(paper, plan, scale):
        made = make_plan(point.plan, {})
        running.plan_audit(running.Site(made))


def test_a_scale_without_a_variant_is_not_asked_about_it_and_a_misspelt_variant_is_refused() -> (
    None
):
    def claim(id: str, variant: str) -> dict[str, Any]:
        of = {"variant": variant, "metric": "recall"}
        return {"id": id, "text": "t", "paper": "p", "of": of, "expect": "> 0"}

    plan = {
        "variant": [{"name": "long"}, {"name": "short"}],
        "scale": {"small": {"variant": [{"name": "short"}]}},
        "claim": [claim("long", "long"), claim("short", "short"), claim("misspelt", "shrot")],
    }
    paper = papers.Paper("mine", "Mine", {"scale": {"small": {}, "large": {}}}, {"table": plan})
    small = reproduce.list_claim_statements(paper, "table", "small")
    assert [statement.id for statement in small] == ["short", "misspelt"]
    assert [
        statement.id for statement in reproduce.list_claim_statements(paper, "table", "large")
    ] == [
        "long",
        "short",
        "misspelt",
    ]
    places = reproduce.make_paper_study(paper, "table", "small", {}).planned_points()
    with pytest.raises(AuditError, match="shrot"):
        ledger.check_claim_points_are_planned(small[-1], places)


def test_ids_are_unique_in_a_paper() -> None:
    for name in papers.find_bundled_paper_folders():
        paper = papers.load_paper(name)
        ids = [claim["id"] for plan in paper.plans.values() for claim in plan.get("claim", [])]
        assert len(set(ids)) == len(ids)


def test_ones_own_target_gets_the_labs_sizes_at_its_scale_and_the_papers_at_its_own() -> None:
    from auditor.benchmarks.lab.lab import Lab

    def options(plan: str, scale: str) -> dict[str, Any]:
        made = make_plan(grid(papers.load_paper("ethicist"), plan, scale, model=True)[0].plan, {})
        (attack, *_) = running.plan_audit(running.Site(made)).selection.attacks
        return vars(attack)

    lab = options("table2", "lab")
    assert {**lab, **Lab.attack_defaults["ethicist"], "samples": 10} == lab
    assert options("table4", "lab")["samples"] == 100 and options("figure8", "lab")["samples"] == 1
    paper = options("table2", "paper")
    assert (paper["samples"], paper["prompt_length"], paper["epochs"], paper["eos"]) == (
        100,
        100,
        20,
        "masked",
    )
    figure3 = grid(papers.load_paper("ethicist"), "figure3", "lab", model=True)[0].plan
    with pytest.raises(AuditError, match="changes the built-in lab"):
        make_plan(figure3, {})


def test_pmixed_is_run_as_in_table_1() -> None:
    paper = papers.load_paper("pmixed")
    (point,) = (p for p in grid(paper, "figure3", "paper") if p.variant == "PMixED")
    options = point.plan["defense_options"]["pmixed"]
    table_1 = {
        "epsilon": 8,
        "delta": 1e-5,
        "alpha": 3,
        "queries": 1024,
        "q": 0.03,
        "accounting": "published",
    }
    assert options == {**table_1, "ensemble": "ensembles/80"}
    orders = [p.plan["defense_options"]["pmixed"] for p in grid(paper, "figure4a", "lab")]
    # As in Figure 4a of Flemings et al. (2024).
    assert [(o["epsilon"], o["alpha"]) for o in orders] == [
        (2, 9),
        (4, 5),
        (6, 4),
        (8, 3),
        (10, 3),
    ]


# What a defense costs and what still leaks, in one ledger: a probe's numbers and perplexities
# paired by text.
COSTS = """
setting = "white-box"
attack = ["perplexity", "extraction-probability"]
samples = 2
[scale.lab]
seeds = [0, 1]
[[variant]]
name = "less"
defense = ["uniform-mixing"]
defense_options = { uniform-mixing = { weight = 0.9 } }
[[variant]]
name = "more"
defense = ["uniform-mixing"]
defense_options = { uniform-mixing = { weight = 0.5 } }
[[claim]]
id = "cost"
text = "On texts of chance, the model that is mixed more is surprised less"
paper = "?"
metric = "perplexity"
of = { variant = "more", target = "uniform-mixing", attack = "perplexity" }
minus = { variant = "less", target = "uniform-mixing", attack = "extraction-probability" }
expect = "< 0"
[[claim]]
id = "leak"
text = "The undefended model leaks"
paper = "?"
metric = "extraction_probability_ancestral"
of = { variant = "less", target = "undefended", attack = "extraction-probability" }
expect = "> 0"
"""


def test_costs_and_probes_are_quantities_of_a_ledger(
    inputs: Path, tmp_path: Path, said: Said
) -> None:
    folder, out = tmp_path / "costs", tmp_path / "out"
    folder.mkdir()
    (folder / "paper.toml").write_text('title = "Costs"\n[scale.lab]\n')
    (folder / "plan.toml").write_text(COSTS)
    (tmp_path / "fresh").mkdir()
    for part, width in (("prefix", 6), ("suffix", 4)):
        tokens = np.random.default_rng(width).integers(1, 61, (9, width))
        np.save(tmp_path / "fresh" / f"fresh_{part}.npy", tokens.astype(np.uint16))
    command = [
        "reproduce",
        str(folder),
        *own(inputs),
        "--nonmembers",
        str(tmp_path / "fresh"),
        "-o",
        str(out),
    ]
    assert run_command_line(command) == 0, said.readouterr().err
    found = {row["id"]: row for row in rows(out / "ledger.csv")}
    assert (found["cost"]["verdict"], found["cost"]["n"], found["cost"]["unit"]) == (
        "holds",
        "9",
        "perplexity",
    )
    held = {
        name: json.loads((out / "plan" / f"{name}_seed-0" / "result.json").read_text())["targets"][
            1
        ]["perplexity"]
        for name in ("less", "more")
    }
    assert float(found["cost"]["ours"]) == pytest.approx(
        held["more"]["value"] - held["less"]["value"]
    )
    assert found["leak"]["verdict"] == "holds" and found["leak"]["setting"].endswith(
        "n 19; seeds 0, 1"
    )
    table = rows(out / "plan" / "sweep.csv")
    assert all(row["perplexity"] for row in table)
    assert [bool(row["extraction_probability_ancestral"]) for row in table[:2]] == [False, True]
    assert [bool(row["recall"]) for row in table[:2]] == [True, False]
    for path in out.glob("plan/*/secrets.parquet"):
        assert path.stat().st_mode & 0o777 == 0o600


def test_what_each_cause_takes_of_likelihood_is_a_quantity_of_a_ledger() -> None:
    taken = Measurement("likelihood_difference", -0.5, -0.7, -0.3, 40, "nats a token")
    steps = (
        ChainStep({"mixing": "m"}, "ensemble-unmixed", "pmixed", taken),
        ChainStep({"no private data": "n"}, "pmixed", "", note="not measured"),
        ChainStep({"recipe": "r", "splitting": "s"}, "undefended", "ensemble-unmixed", taken),
    )
    target = TargetRecord("pmixed", "PMixED", "", likelihood=Chain(steps, taken))
    found = {
        m.name: (m.value, m.low, m.high, m.n) for m in replicates._list_model_measurements(target)
    }
    own = (-0.5, -0.7, -0.3, 40)
    assert found == {"likelihood_mixing": own, "likelihood_recipe_splitting": own}


def test_table_2_ablates_what_it_says() -> None:
    points = {
        point.variant: point.plan
        for point in grid(papers.load_paper("ethicist"), "table2", "lab")
        if point.seed == 0
    }
    options = {
        name: plan.get("attack_options", {}).get("ethicist", {}) for name, plan in points.items()
    }
    assert options == {
        "Ethicist": {},
        "w/o smooth": {"alpha": 0},
        "w/o calibrated": {"confidence": "perplexity"},
        "w/o smooth & calibrated": {"alpha": 0, "confidence": "perplexity"},
        "w/o smooth & calibrated, comparing (LM)": {"alpha": 0, "confidence": "reference"},
        "w/o prompt tuning": {"tune_on": "none"},
        "baselines": {},
    }
    assert expand_plan_grid({})[0].plan["attack"] == ["ethicist"]


def test_a_defense_without_options_has_its_place() -> None:
    m = Measurement("perplexity", 2.0, 1.9, 2.1, 10, "per token")
    names = {"undefended": {}, "public": {}, "uniform-mixing": {"weight": 0.5}}
    rows = tuple(
        masked_utility.UtilityRow(name, {}, options, {m.name: m}) for name, options in names.items()
    )
    result = masked_utility.Utility("m", "d", rows, (), "", "", "", 3, {}, {}, 0.0)
    cells = [cell for place in result.list_points() for cell in place.cells]
    assert [cell.target for cell in cells] == list(names)
    assert cells[1].measured == {3: {"perplexity": m}}
