"""Runs with several defenses, and grids over their knobs, end to end: any plug-in is a line of the
picture."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from auditor.attacks.extraction_probability import ExtractionProbability
from auditor.conclusions.frontier import (
    build_frontiers,
    list_frontier_models,
    merge_frontier_models,
)
from auditor.conclusions.outcomes import read_secret_values
from auditor.core.jsonable import from_json
from auditor.core.nouns import CellKey, Observation, Secret
from auditor.core.plan import Plan
from auditor.core.result import Frontier
from auditor.plugins.view import View
from auditor.records.result_file import read_result
from auditor.runs.loader import build_lab_recipe
from auditor.runs.run import plan_audit
from auditor.runs.site import Site
from auditor.statistics.roc import auc
from tests.conftest import check_command, fits_schema, tiny
from tests.rows import read_rows

MINE, COPY = "Uniform mixing (mine)", "Uniform mixing (copy)"  # they have one title
PLUGINS = """
from dataclasses import dataclass
from typing import ClassVar
from auditor.defenses.uniform_mixing import UniformMixing


@dataclass(frozen=True)
class Mine(UniformMixing):
    \"\"\"Mixes.\"\"\"

    name = "mine"


@dataclass(frozen=True)
class Copy(UniformMixing):
    \"\"\"Mixes and promises nothing.\"\"\"

    name = "copy"

    def claim(self, scenario, spent):
        return None
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, arrays of which every other suffix is its own greedy continuation, and others;
    two plug-ins."""
    folder = tmp_path_factory.mktemp("inputs")
    model = tiny(scale=8.0)
    model.model.save_pretrained(folder / "model")  # type: ignore[attr-defined]
    prefix = torch.randint(1, 61, (148, 6), generator=torch.Generator().manual_seed(0))
    suffix = torch.randint(1, 61, (148, 4), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        tokens = prefix[:40:2]
        for _ in range(4):
            tokens = torch.cat([tokens, model.model(tokens).logits[:, -1:].argmax(-1)], dim=1)  # type: ignore[attr-defined]
    suffix[:40:2] = tokens[:, 6:]
    for name, rows in (("data", slice(0, 48)), ("others", slice(48, 148))):
        (folder / name).mkdir()
        np.save(folder / name / "tiny_prefix.npy", prefix[rows].numpy().astype(np.uint16))
        np.save(folder / name / "tiny_suffix.npy", suffix[rows].numpy().astype(np.uint16))
    (folder / "plugins.py").write_text(PLUGINS)
    return folder


def command(inputs: Path, *more: str) -> list[str]:
    data = [
        "--data",
        str(inputs / "data"),
        "--nonmembers",
        str(inputs / "others"),
        "--setting",
        "white-box",
    ]
    plugins = ["--plugin", str(inputs / "plugins.py"), "--defense", "mine", "--defense", "copy"]
    return [
        "run",
        "--model",
        str(inputs / "model"),
        *data,
        "--attack",
        "extraction-probability",
        *plugins,
        *more,
    ]


@pytest.fixture(scope="module")
def single(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("single") / "run"
    flags = [
        "--attack",
        "membership",
        "-A",
        "membership.score=min_k",
        "-D",
        "weight=0.02",
        "-o",
        str(out),
    ]
    check_command(*command(inputs, *flags))
    return out


@pytest.fixture(scope="module")
def swept(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("swept") / "run"
    flags = ["--sweep", "mine.weight=0.9,0.02", "-D", "copy.weight=0.02", "-o", str(out)]
    check_command(*command(inputs, *flags))
    return out


def test_a_run_with_several_defenses_has_its_picture(single: Path) -> None:
    result = read_result(single)
    assert fits_schema(single)
    extraction, members = result.frontiers
    # too few for a rate
    assert (extraction.metric, members.metric) == (
        "extraction_probability",
        "membership_auc",
    )
    base, mine, copy = extraction.points
    assert (base.label, mine.label, copy.label) == ("Undefended", MINE, COPY)
    perplexity = {target.name: target.perplexity for target in result.targets}
    assert perplexity["mine"] and perplexity["undefended"]
    assert mine.ratio.value == pytest.approx(
        perplexity["mine"].value / perplexity["undefended"].value
    )
    # filled, and hollow
    assert (mine.epsilon, mine.tokens, copy.epsilon) == (
        pytest.approx(0.809, abs=1e-3),
        1,
        None,
    )
    main = next(
        f for f in result.findings if f.cell_key == ("mine", "white-box", "extraction-probability")
    ).main
    assert (
        main is not None
        and mine.leak.value == pytest.approx(main.value)
        and mine.leak.n == main.n == 38
    )
    # one distribution: not told apart
    assert (mine.leak, mine.ratio, mine.least) == (
        copy.leak,
        copy.ratio,
        copy.least,
    )
    assert members.points[0].leak.n == 38 and not members.missing
    report = (single / "report.md").read_text()
    assert "What leaks least at the same usefulness" in report and "perplexity within 10%" in report
    assert 'id="frontier-extraction-probability' in (single / "report.html").read_text()
    assert {path.suffix for path in single.glob("frontier.*")} == {
        ".svg",
        ".png",
        ".md",
        ".csv",
        ".tex",
        ".json",
    }


def test_aucs_are_those_of_the_scores_that_were_kept(single: Path) -> None:
    row = read_secret_values(single)[CellKey("mine", "white-box", "membership")]
    scores, member = row.values["membership_score"], row.member
    found = read_result(single).frontiers[1].points[1].leak.value
    value = auc(scores[member], scores[~member])
    assert found == pytest.approx(max(value, 1 - value))


def test_a_grid_has_a_line_a_defense_over_its_own_knob(swept: Path) -> None:
    with open(swept / "frontier.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "extraction_probability"]
    assert [row["model"] for row in rows] == [
        "Undefended",
        f"{MINE}, weight 0.9",
        COPY,
        f"{MINE}, weight 0.02",
    ]
    by = {row["model"]: row for row in rows}
    # no option of its own was swept: one point
    assert by[COPY]["leakage"] == by[f"{MINE}, weight 0.02"]["leakage"]
    assert float(by[f"{MINE}, weight 0.02"]["leakage"]) < float(
        by[f"{MINE}, weight 0.9"]["leakage"]
    )
    found: tuple[Frontier, ...] = from_json(
        tuple[Frontier, ...], json.loads((swept / "frontier.json").read_text())
    )
    assert all(sum(p.corner for p in f.points) >= 1 for f in found)
    assert all((swept / f"frontier.{ending}").is_file() for ending in ("svg", "png", "md", "tex"))


def test_every_point_of_a_grid_asks_the_undefended_model_the_same_and_it_answers_once(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    measure = ExtractionProbability.observe_secrets

    def counted(
        self: ExtractionProbability, view: View, secrets: Sequence[Secret]
    ) -> Iterator[Observation]:
        asked.append(len(secrets))
        return measure(self, view, secrets)

    monkeypatch.setattr(ExtractionProbability, "observe_secrets", counted)
    out = tmp_path / "run"
    flags = [
        "--sweep",
        "mine.weight=0.9,0.02",
        "--defense",
        "mine",
        "--limit",
        "10",
        "-o",
        str(out),
    ]
    check_command(*command(inputs), *flags)
    first, second = sorted(out.glob("mine*"))
    assert [n for n in asked if n] == [20] * 5  # one of no defense, two points of two
    rows = [read_rows(point) for point in (first, second)]
    key = "undefended/white-box/extraction-probability"
    assert rows[0][key] == rows[1][key] and rows[0]["mine" + key[10:]] != rows[1]["mine" + key[10:]]


PICTURE = """
title = "Two defenses"
setting = "white-box"
attack = ["extraction-probability"]

[scale.lab]
limit = 10
variant = [
    { name = "Knob", defense = ["mine"], sweep = { "mine.weight" = [0.9, 0.02] } },
    { name = "Other", defense = ["copy"], defense_options = { copy = { weight = 0.5 } } },
]
"""


def test_a_study_of_ones_own_has_a_line_a_variant(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one without claims has no ledger."""
    plans = tmp_path / "study"
    plans.mkdir()
    (plans / "paper.toml").write_text(
        f'title = "Ours"\nplugin = ["{inputs / "plugins.py"}"]\n[scale.lab]\n'
    )
    (plans / "picture.toml").write_text(PICTURE)
    data = ["--data", str(inputs / "data"), "--nonmembers", str(inputs / "others")]
    command = [
        "reproduce",
        str(plans),
        "--model",
        str(inputs / "model"),
        *data,
        "--seeds",
        "0-1",
        "-o",
        str(tmp_path / "out"),
    ]
    # the plan's plug-in runs if the command line names it too
    check_command(*command, code=2)
    command += ["--plugin", str(inputs / "plugins.py")]
    check_command(*command)
    found = tmp_path / "out" / "picture"
    with open(found / "frontier.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    names = ["Undefended", "Knob, weight 0.9", "Knob, weight 0.02", "Other"]
    assert [(row["model"], row["line"], row["seeds"]) for row in rows] == [
        (name, name.partition(",")[0], "0 1") for name in names
    ]
    said = capsys.readouterr().out
    assert "at perplexity within 10%" in said.replace("\n", " ") and "frontier.svg" in said.replace(
        "\n", ""
    )
    assert not list((tmp_path / "out").glob("ledger*")) and "Claims" not in said


def test_fewer_than_two_defenses_have_no_picture(single: Path) -> None:
    models = list_frontier_models({0: (read_result(single), single)})
    assert (
        build_frontiers(models) and build_frontiers(models[:2]) == () and build_frontiers([]) == ()
    )


def test_points_of_different_models_have_none_together(single: Path, swept: Path) -> None:
    models = list_frontier_models({0: (read_result(single), single)})
    base, *defended = models
    held = {
        seed: {**own, "perplexity": [x + 1 for x in own["perplexity"]]}
        for seed, own in base.heldout.items()
    }
    other = [
        replace(base, cells={row: replace(cell, heldout=held) for row, cell in base.cells.items()}),
        *defended,
    ]
    assert (
        len(merge_frontier_models([models, models])) == 3
        and merge_frontier_models([models, other]) == []
        and merge_frontier_models([]) == []
    )


def test_a_model_without_the_same_questions_has_no_point_and_says_why(single: Path) -> None:
    models = list_frontier_models({0: (read_result(single), single)})
    base, mine, copy = models
    row = ("white-box", "extraction-probability")
    cases = {
        "no perplexity of the texts": {"heldout": {}},
        "ran with other options": {"options": {"top_p": 0.5}},
        "not measured with all seeds": {"values_by_seed": {}},
        "its budget is spent": {"not_applicable": "its budget is spent"},
    }
    third = replace(copy, line="Third", label="Third")
    for why, changed in cases.items():
        other = replace(copy, cells={row: replace(copy.cells[row], **changed)})
        found = build_frontiers([base, mine, third, other])[0]
        assert why in found.missing[COPY] and len(found.points) == 3


def test_fewer_answers_narrow_what_all_are_compared_on(single: Path) -> None:
    models = list_frontier_models({0: (read_result(single), single)})
    row = ("white-box", "extraction-probability")
    cell = models[2].cells[row]
    held = cell.values_by_seed[0]
    few = type(held)(
        held.ids[:20],
        held.member[:20],
        held.repeats[:20],
        {k: v[:20] for k, v in held.values.items()},
    )
    fewer = replace(models[2], cells={row: replace(cell, values_by_seed={0: few})})
    found = build_frontiers([*models[:2], fewer])[0]
    assert {p.leak.n for p in found.points} == {int(held.member[:20].sum())}
    assert found.points[1].leak == found.points[2].leak


def test_a_lab_may_be_of_the_seed_of_its_run() -> None:
    own, usual = Plan.from_fields(seed=3, lab_recipe={"seed": "run"}), Plan.from_fields(seed=3)
    of = [build_lab_recipe(plan) for plan in (own, usual)]
    assert [recipe.seed for recipe in of] == [3, 0]


def test_without_controls_a_defense_stands_alone() -> None:
    rows = [
        [
            row.name
            for row in plan_audit(
                Site(Plan.from_fields(defense=("pmixed",), controls=on))
            ).selection.rows
        ]
        for on in (True, False)
    ]
    assert rows == [["pmixed", "ensemble-unmixed", "public"], ["pmixed"]]
