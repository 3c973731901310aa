"""README, CONTRIBUTING and docs: every command is run, in a folder that holds what it names, or
says why it is not.

Models, data and the lab are tiny. A command that finds nothing under a name it uses fails, as it
would for a reader.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import posixpath
import re
import runpy
import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from auditor.benchmarks.lab.lab_recipe import LabRecipe
from auditor.cli import run_command_line
from auditor.commands import check
from auditor.gate.policy import parse_gate_rule
from auditor.plugins import registry
from auditor.runs import plan
from tests.conftest import check_command, save_tiny
from tests.docs import reference, rooms
from tests.docs.pages import (
    DOCS,
    PAGES,
    ROOT,
    Command,
    File,
    links,
    options,
    parse,
    parts,
    spans,
    steps,
)
from validation import harness

Said = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
LAB = {
    "vocab_size": 300,
    "layers": 1,
    "hidden": 32,
    "heads": 2,
    "repeats": tuple((times, 2, 1) for times in (1, 4, 16)),
    "others": 2,
    "nonmembers": 4,
    "public_records": 20,
    "public_epochs": 1,
    "private_epochs": 1,
    "private_rank": 2,
    "members": 2,
    "lora_rank": 2,
    "lora_epochs": 1,
    "batch": 8,
}
MODELS = ("my-model", "gpt2", "EleutherAI/gpt-neo-1.3B")
FINISHED = ("runs/ci", "runs/main", "runs/a", "runs/b")
# What a command is given on top of what the page says, so that it takes seconds: fewer samples,
# epochs and searches.
SMALLER = {
    "ethicist": (
        "-A",
        "ethicist.samples=4",
        "-A",
        "ethicist.prompt_length=2",
        "-A",
        "ethicist.epochs=1",
    ),
    "epsilon-audit": ("-A", "epsilon-audit.samples=2"),
    "exposure": (
        "-A",
        "exposure.enumerate=1000",
        "-A",
        "exposure.references=20",
        "-A",
        "exposure.draws=16",
    ),
    "near-verbatim": ("-A", "near-verbatim.beams=2"),
    "untargeted": ("-A", "untargeted.generations=4", "-A", "untargeted.length=16"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the pages speak of as there: models, records, arrays, an ensemble, finished
    runs; and a cache."""
    folder = tmp_path_factory.mktemp("docs")
    given = folder / "given"
    for name in MODELS:
        save_tiny(given / name)
        longer(given / name, max_position_embeddings=512)
    masked(given / "my-model", given / "roberta-base")
    chatting(given / "my-model", given / "chat-model")
    notes = [
        {
            "prefix": f"ward {i % 7} bed {i * 37 % 97:02d} code",
            "suffix": f" {i * 7919 % 997:03d}",
            "patient": f"p{i}",
        }
        for i in range(40)
    ]
    rows(given / "private.jsonl", notes[:34])
    rows(given / "fresh.jsonl", notes[34:])
    rows(given / "forget.jsonl", notes[:4])
    rows(given / "out.jsonl", notes[::2])
    texts = [{"text": note["prefix"] + note["suffix"]} for note in notes[:6]]
    rows(given / "texts.jsonl", texts)
    rows(given / "train.jsonl", texts)
    for step in (2, 10):
        shutil.copytree(given / "my-model", given / "trained" / f"checkpoint-{step}")
    for name, start in (("chats", 0), ("fresh-chats", 20)):
        told = [
            (f"Which code has ward {i}?", f"It is {i * 7919 % 997:03d}.")
            for i in range(start, start + 8)
        ]
        rows(given / f"{name}.jsonl", [conversation(*turns) for turns in told])
    for name, host in (("corpus", "example.com"), ("heldout", "example.org")):
        mails = [
            f"{i * 7919} for {'xyz'[i % 3] * (i + 20)}: write to p{i}@{host}" for i in range(8)
        ]
        rows(given / f"{name}.jsonl", [{"text": text} for text in mails])
    (given / "prompts.txt").write_text("A public prompt\nand another\n", encoding="utf-8")
    (given / "lm-extraction").mkdir()
    for part, width in (("prefix", 8), ("suffix", 4)):
        ids = np.random.default_rng(0).integers(1, 257, (12, width), dtype=np.uint16)
        np.save(given / "lm-extraction" / f"val_{part}.npy", ids)
    return folder


def conversation(*turns: str) -> dict[str, Any]:
    roles = ("system", "user", "assistant")
    said = zip(roles, ("You are a clerk.", *turns), strict=True)
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def chatting(base: Path, folder: Path) -> None:
    """The same model with a chat template."""
    shutil.copytree(base, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )


def rows(path: Path, values: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in values))


def longer(folder: Path, **more: int) -> None:
    """Rotary positions have no weights: only the configuration says how many there are."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **more}))


def masked(base: Path, folder: Path) -> None:
    """A tiny masked LM with the tokenizer of `base` and a mask token."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **shape)).save_pretrained(folder)


@pytest.fixture
def here(inputs: Path, tmp_path: Path, monkeypatch: Patch) -> Path:
    """An empty folder to stand in, the lab tiny, plug-in files of this test only, no hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUDIT_CACHE", str(inputs / "cache"))
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    defaults = [LAB.get(field.name, field.default) for field in dataclasses.fields(LabRecipe)]
    monkeypatch.setattr(LabRecipe.__init__, "__defaults__", tuple(defaults))
    small = {**LAB, "repeats": [[times, 2, 1] for times in (1, 4, 16)]}
    # the real one is trained in tests/commands/test_check.py
    monkeypatch.setattr(check, "_DEMONSTRATION", small)
    return tmp_path


def values(words: Sequence[str], *names: str) -> set[str]:
    """What the command gives these options."""
    return {after for before, after in pairwise(words) if before in names}


def run_here(page: str) -> list[Command]:
    return [step for step in steps(page) if isinstance(step, Command) and not step.why]


@pytest.mark.parametrize("page", [page for page in PAGES if run_here(page)])
def test_commands_run(
    page: str, inputs: Path, here: Path, capsys: Said, monkeypatch: Patch
) -> None:
    lay_out(inputs, here, [step.words for step in run_here(page)])
    for step in steps(page):
        if isinstance(step, File):
            (here / step.name).write_text(step.text)
        if isinstance(step, File) or step.why:
            continue
        program, *words = step.words
        if program == "python":
            make(words, monkeypatch)
            continue
        assert program == "audit", (
            f"{step.where}: the test runs `audit` and examples only; say why this is not run"
        )
        monkeypatch.setattr(sys, "argv", list(step.words))
        capsys.readouterr()
        code = run_command_line([*words, *smaller(words)])
        held = words[0] == "gate" or "--gate" in words
        assert code in ((0, 1, 4) if held else (0,)), (
            f"{step.where}: exit code {code}\n{capsys.readouterr().err}"
        )


def make(words: Sequence[str], monkeypatch: Patch) -> None:
    """Runs a script of examples/, for a few records where it knows how."""
    script = ROOT / words[0]
    assert script.is_relative_to(ROOT / "examples")
    few = ["--few"] if '"--few"' in script.read_text(encoding="utf-8") else []
    monkeypatch.setattr(sys, "argv", [words[0], *words[1:], *few])
    runpy.run_path(str(script), run_name="__main__")


def lay_out(inputs: Path, folder: Path, commands: list[tuple[str, ...]]) -> None:
    """What is given, but for what the commands make themselves; trained and finished things where
    they are named."""
    making = {str(Path(out)) for words in commands for out in values(words, "-o", "--out")}
    said = " ".join(word for words in commands for word in words)
    shutil.copytree(
        inputs / "given", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*making)
    )
    for name in ("ensemble", *FINISHED):
        if name in said and name not in making:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copytree(
                finished(inputs, "ensemble" if name == "ensemble" else "run"), folder / name
            )


def finished(inputs: Path, name: str) -> Path:
    """An ensemble, or a run, made once when it is first asked for."""
    folder, given = inputs / name, inputs / "given"
    if not folder.exists():
        model, data = (
            str(given / "my-model"),
            ["--data", str(given / "private.jsonl"), "-o", str(folder)],
        )
        others = ["--nonmembers", str(given / "fresh.jsonl")]
        ensemble = ["train", "pmixed", "--model", model, "-D", "members=2", "-D", "epochs=1", *data]
        run = [
            "run",
            "--model",
            model,
            "--attack",
            "ethicist",
            "--limit",
            "4",
            *SMALLER["ethicist"],
            *data,
            *others,
        ]
        check_command(*(ensemble if name == "ensemble" else run))
    return folder


def smaller(words: Sequence[str]) -> list[str]:
    """Options that make the command quick and that the page does not give."""
    if words[:2] == ["canaries", "score"]:
        return list(SMALLER["exposure"])
    if words[:2] == ["canaries", "make"] and "--audit" in words:
        return ["--audit", "40"]
    if words[0] == "check":
        return ["--minutes", "0.2"]
    if words[0] == "train":
        sizes = {"epochs": "1", "batch": "8"}
        return [word for name, value in sizes.items() for word in ("-D", f"{name}={value}")]
    if words[0] != "run" or "--resume" in words:
        return []
    few = (
        []
        if "--limit" in words or ("--data" not in words and "--canaries" in words)
        else ["--limit", "4"]
    )
    attacks = values(words, "--attack") or {"ethicist"}
    if "--data" not in words and values(words, "--defense") & {"dp-sgd", "adp", "adp-sound"}:
        few += ["-D", "epochs=1"]
    return [*few, *(word for name in sorted(attacks & set(SMALLER)) for word in SMALLER[name])]


@pytest.mark.parametrize("page", PAGES)
def test_commands_that_are_not_run_would_be_read(page: str) -> None:
    """Their options exist; scripts and modules that they name are there, and know the options they
    are given."""
    for step in steps(page):
        if isinstance(step, Command) and step.why:
            assert len(step.why) > 10, f"{step.where}: say why"
            for words in parts(step):
                check_unrun(words, step.where)


# whose options are not ours
FOREIGN = (
    "openssl",
    "pip",
    "ruff",
    "mypy",
    "ray",
    "kubectl",
    "salloc",
    "export",
    "srun",
)


def check_unrun(words: list[str], where: str) -> None:
    program, arguments = Path(words[0]).name, words[1:]
    if program == "audit":
        parse(arguments)
    elif program in ("python", "python3") and arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1]) is not None, (
            f"{where}: there is no module {arguments[1]}"
        )
        if arguments[1].startswith("validation."):
            harness.flags(importlib.import_module(arguments[1]).main).parse_args(arguments[2:])
    elif program in ("python", "python3") or words[0].startswith("examples/"):
        script = ROOT / (arguments[0] if program.startswith("python") else words[0])
        source = script.read_text(encoding="utf-8")
        assert all(f'"{word}"' in source for word in arguments if word.startswith("--")), where
    else:
        assert program in FOREIGN, f"{where}: the test does not know {program}"


@pytest.mark.parametrize("page", PAGES)
def test_every_option_and_path_in_the_text_is_there(page: str) -> None:
    known = options() | {"--help"}
    for span in spans(page):
        if span.startswith(("audit ", "--")):
            named = {re.split("[=|,]", word)[0] for word in span.split() if word.startswith("--")}
            assert named <= known, f"{page}: {span}"
        if given := re.match(r"-([AD]) (?:[\w-]+\.)?([a-z]\w*)", span):
            assert given[2] in plugin_options(given[1]), f"{page}: {span}"
        top = span.partition("/")[0]
        # runs/ is what audits in this checkout left, if there were any
        if (
            "/" in span
            and re.fullmatch(r"[\w./-]+", span)
            and (ROOT / top).is_dir()
            and top != "runs"
        ):
            assert (ROOT / span).exists(), f"{page}: {span}"
    for link in links(page):
        assert "://" in link or (ROOT / page).parent.joinpath(link).exists(), f"{page}: {link}"


def plugin_options(flag: str) -> set[str]:
    """Every option that -A, or -D, may give to a plug-in of ours."""
    found: list[dict[str, Any]] = [registry.list_defenses(), registry.list_trainers()]
    if flag == "A":
        found = [registry.list_methods()]
    return {
        field.name
        for kinds in found
        for kind in kinds.values()
        for field in dataclasses.fields(kind)
    }


def test_the_front_door_is_short_and_leads_everywhere() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
    found, below = set(), ["README.md"]
    while below:
        page = below.pop()
        found.add(page)
        there = (
            posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
            for link in links(page)
        )
        below += {one for one in there if one in PAGES} - found
    # what lies in that folder; it leads to its tutorial
    assert found == set(PAGES) - {"examples/ci/README.md"}


def test_every_rule_of_the_features_is_one() -> None:
    rules = [span for span in spans("docs/reference/features.md") if "<=" in span]
    assert len(rules) >= 12 and all(str(parse_gate_rule(rule)) == rule for rule in rules)


def test_what_is_written_by_hand_stays_short() -> None:
    """Count the words of README, tutorials, how-to and explanation."""
    printed = re.compile(r"<!-- printed by .*?<!-- end of what is printed -->", re.DOTALL)
    words = {
        page: len(printed.sub("", (ROOT / page).read_text(encoding="utf-8")).split())
        for page in PAGES
    }
    by_hand = ("README.md", "docs/tutorials/", "docs/how-to/", "docs/explanation/")
    assert sum(count for page, count in words.items() if page.startswith(by_hand)) <= 18_000
    assert all(count <= 700 for page, count in words.items() if page.startswith("docs/tutorials/"))


def test_the_site_names_every_page() -> None:
    nav = (
        (ROOT / "docs" / "site" / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    )
    named = re.findall(r": (\S+\.md)$", nav, re.M)
    assert len(named) == len(set(named))
    assert {f"docs/{name}" for name in named} >= set(DOCS)


def test_ci_runs_the_two_commands_of_the_readme() -> None:
    """`.ci/run` takes the first line of the first and of the second bash block: an install with an
    audit; the tests."""
    first, second = [step for step in steps("README.md") if isinstance(step, Command)][:2]
    install, audit = first.words.index("install"), first.words.index(".venv/bin/audit")
    assert install < audit and first.words[audit + 1] == "run"
    assert second.words[:3] == (".venv/bin/python", "-m", "pytest")


def test_the_drawing_is_that_of_the_layer_test() -> None:
    assert all(map(rooms.purpose, rooms.ROOMS))
    page = rooms.PAGE.read_text(encoding="utf-8")
    assert f"{rooms.BEGIN}{rooms.printed()}{rooms.END}" in page, (
        "python -m tests.docs.rooms writes it anew"
    )
    drawn = {room: set(rooms.arrows(room)) for room in rooms.ROOMS}
    for room in rooms.ROOMS:  # every import that is allowed follows the arrows
        seen, below = set(), [room]
        while below:
            here = below.pop()
            below += drawn[here] - seen
            seen |= drawn[here]
        assert rooms.ROOMS[room] <= seen


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_reference_page_is_what_the_code_says(name: str) -> None:
    shown = (reference.FOLDER / name).read_text(encoding="utf-8")
    assert shown == reference.PAGES[name](), "python -m tests.docs.reference writes it anew"


def test_the_files_of_a_run_are_those_of_the_page(inputs: Path, here: Path) -> None:
    folder = shutil.copytree(finished(inputs, "run"), here / "run")
    assert run_command_line(["gate", str(folder), "--max", "recall=1"]) in (0, 4)
    check_command("report", folder, "--format", "edpb")
    check_command("attest", folder)
    found = {f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir()}
    assert found <= set(reference.FILES)
    sources = [path for top in ("auditor", "reports") for path in (ROOT / top).rglob("*.py")]
    written = "".join(path.read_text(encoding="utf-8") for path in sources)
    # those that this run has no use of
    assert all(f'"{name}"' in written for name in set(reference.FILES) - found)
    held = {
        name for name in found if name[-1] != "/" and b"ward 3 bed" in (folder / name).read_bytes()
    }
    assert held <= set(reference.PRIVATE) and held
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.rglob("*"))


def test_the_plan_that_is_not_run_is_a_grid_of_as_many_runs_as_it_says(tmp_path: Path) -> None:
    page = steps("docs/how-to/grids-and-papers.md")
    (shown,) = (step for step in page if isinstance(step, File))
    (asked,) = (step for step in page if isinstance(step, Command) and shown.name in step.words)
    (tmp_path / shown.name).write_text(shown.text)
    points = plan.expand_plan_grid(plan.read_plan_file(tmp_path / shown.name, plan.GRID))
    assert asked.why.startswith(f"{len(points)} runs")
