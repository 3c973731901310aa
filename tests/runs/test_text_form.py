"""The text form of conversations: a model that is trained in a form is audited in it, whatever the
form, or doubted."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from auditor.benchmarks.data.files import TableReader
from auditor.cli import run_command_line
from auditor.core.errors import AuditError
from auditor.core.nouns import TextForm
from auditor.core.plan import Plan
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.benchmark import Benchmark
from auditor.runs import quick_check, text_form
from auditor.runs.own_data import load_own_benchmark
from auditor.runs.prefix_token import find_default_prefix, wrap_prefixed_model
from auditor.runs.scoring import doubt_if_members_likelier, measure_repeat_recall
from auditor.runs.site import Site
from auditor.runs.sweep_cache import SweepCache
from tests.conftest import check_command
from validation.trust import text_forms as forms

MEMBERS = 8


class World:
    """A tiny model that was trained on the rows of a case, in its form, and the files of an audit.

    steps: 0: it was not trained. others: it was trained on other rows.
    """

    def __init__(self, name: str, folder: Path, steps: int = 120, others: bool = False) -> None:
        self.case, self.folder = forms.cases()[name], folder
        said = forms.records(2 * MEMBERS)
        self.words = forms.tokenizer(self.case.template)
        self.answers = [a for _, a in said][:MEMBERS]
        self.rows = [self.case.row(q, a) for q, a in said]
        self.texts = [self.case.text(self.words, row) for row in self.rows][:MEMBERS]
        learnt = forms.records(24, seed=2) if others else said[:MEMBERS]
        self.learn(
            [self.case.text(self.words, self.case.row(*one)) for one in learnt],
            [a for _, a in learnt],
            steps,
        )
        self.files = list(forms._written(folder, self.rows[:MEMBERS], self.rows[MEMBERS:]))

    def learn(self, texts: list[str], answers: list[str], steps: int) -> None:
        self.model = forms.trained(
            self.words, texts, [self.case.first or a for a in answers], steps
        )

    def saved(self) -> Path:
        self.words.save_pretrained(self.folder / "model")
        self.model.save_pretrained(self.folder / "model")
        return self.folder / "model"

    def run(self, out: str, *more: str) -> int:
        data, fresh = self.files
        asked = [
            "run",
            "--model",
            str(self.saved()),
            "--data",
            data,
            "--nonmembers",
            fresh,
            "--known-fraction",
            "0",
        ]
        return run_command_line(
            [*asked, "-o", str(self.folder / out), "--attack", "extraction-probability", *more]
        )

    @property
    def truth(self) -> int:
        return sum(
            forms.recited(self.model, self.words, *one)
            for one in zip(self.texts, self.answers, strict=True)
        )

    def plan(self, **asked: Any) -> Plan:
        data, fresh = self.files
        return Plan.from_fields(
            model="tiny", data=data, **{"nonmembers": fresh, "known_fraction": 0.0, **asked}
        )

    def data(
        self, held: TextForm | None = None, form_rows: int = text_form.ROWS, **asked: Any
    ) -> Benchmark:
        return load_own_benchmark(
            TableReader(self.plan(**asked).data),
            "tiny",
            HuggingFaceModel(self.model, self.words, "tiny"),
            held,
            form_rows,
        )

    def recall(self, found: Benchmark) -> int:
        """Answers of the kind of `self.answers` that greedy decoding says, of each record one."""
        target = wrap_prefixed_model(
            HuggingFaceModel(self.model, self.words, "tiny"),
            () if found.framed else find_default_prefix(self.words),
        )
        wanted = [
            s
            for s in found.secrets
            if s.wording is not None and s.wording.suffix.strip() in self.answers
        ]
        return sum(
            round(one.value * one.n) for one in measure_repeat_recall(target, wanted).values()
        )


CHOSEN = {  # as which form each case is read
    "messages": "model",
    "prompt + completion": "none",
    "prompt + completion, in the template": "model",
    "Alpaca": "alpaca",
    "Alpaca, axolotl's": "alpaca+line",
    "Alpaca, in the template": "model+line",
    "a template with the day": "model",
    "reasoning_content": "model",
    "tools": "model",
    "developer": "model",
    "ShareGPT, axolotl's roles": "model",
    "ShareGPT, TRL's roles": "model+given-roles",
    "Qwen3, assistant_only_loss of TRL": "trl",
    "Qwen3": "model",
    "DeepSeek-R1-Distill": "model",
    "a thought is opened for the answer": "model",
    "the assistant begins": "model",
}


@pytest.mark.parametrize("name", CHOSEN)
def test_a_model_is_asked_in_the_form_that_it_was_trained_in(name: str, tmp_path: Path) -> None:
    """Twin: plain `generate` on the token ids of the trainer, which the case makes without any of
    our code."""
    world = World(name, tmp_path)
    found = world.data(**world.case.asked)
    assert found.text_form is not None and found.text_form.template == CHOSEN[name]
    assert world.truth == world.recall(found) >= MEMBERS // 2
    assert found.text_form.said in found.notes and "nats a token" in found.text_form.said
    hurried = world.data(form_rows=quick_check.FORM_ROWS, **world.case.asked)
    assert hurried.text_form is not None and hurried.text_form.template == CHOSEN[name]


def test_a_check_reads_few_rows_for_a_clear_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it read non-members in every rendering, though members were likelier in the best."""
    world, n_rows = World("messages", tmp_path), list[int]()
    score = text_form._compute_row_nlls
    monkeypatch.setattr(
        text_form,
        "_compute_row_nlls",
        lambda model, rows: (n_rows.append(len(rows)), score(model, rows))[1],
    )
    world.data(form_rows=quick_check.FORM_ROWS)
    *members, others = n_rows
    assert len(members) > 1 and set(members) == {text_form._FIRST_ROWS}
    assert others == quick_check.FORM_ROWS


# --- when nothing seen is no evidence ---


def sentences(found: Benchmark) -> str:
    assert {doubt.kind for doubt in found.doubts} <= {"text form"}
    return " ".join(doubt.sentence for doubt in found.doubts)


def test_a_form_that_the_model_was_trained_in_is_no_doubt_though_nothing_was_memorised(
    tmp_path: Path,
) -> None:
    """It learnt the form from other rows: non-members' answers speak for it."""
    found = World("messages", tmp_path, steps=30, others=True).data()
    assert found.text_form is not None and found.text_form.template == "model"
    assert not found.doubts


def test_a_model_that_prefers_no_form_is_a_doubt(tmp_path: Path) -> None:
    world = World("messages", tmp_path, steps=0)
    assert "looks like one that was trained on another text form" in sentences(world.data())
    # few rows say so: an attack on more of them may show the opposite, on the same screen
    assert re.match(r"members \(\d+ rows, before the attacks\) are", sentences(world.data()))
    named = world.data(template="model")  # whoever names it answers for it
    assert (
        named.text_form is not None
        and not named.doubts
        and "nothing in the data confirms" in named.text_form.said
    )


def test_a_form_that_nobody_tries_is_a_doubt_and_its_template_resolves_it(tmp_path: Path) -> None:
    """Before: truth 8 of 8, found 0, and nothing that would stop "no leakage seen"."""
    world = World("another template, which nobody tries", tmp_path)
    found = world.data()
    assert world.truth == MEMBERS and world.recall(found) == 0
    assert doubt_if_members_likelier(
        "Undefended", forms.likelihoods(HuggingFaceModel(world.model, world.words, "tiny"), found)
    )
    file = tmp_path / "other.jinja"
    file.write_text(forms.OTHER)
    right = world.data(template=str(file))
    assert (
        world.recall(right) == MEMBERS
        and right.text_form is not None
        and right.text_form.template == str(file)
    )


def test_another_form_than_asked_for_that_is_more_likely_is_a_doubt(tmp_path: Path) -> None:
    world = World("prompt + completion", tmp_path)
    found = world.data(template="model")
    assert world.recall(found) == 0
    assert "more likely as none than as model, which was given, by" in sentences(found)
    assert "more likely as none" not in sentences(world.data(template="none"))


def test_without_non_members_it_says_what_nobody_knows(tmp_path: Path) -> None:
    found = World("messages", tmp_path, steps=0).data(nonmembers=None)
    assert not found.doubts and any(
        "without --nonmembers nobody knows" in note for note in found.notes
    )


# --- the day ---


def test_a_day_that_nobody_names_is_found_by_the_models_files_or_is_a_doubt(tmp_path: Path) -> None:
    """Trained on 5 March 2024, and on other days on other answers to the same questions."""
    world = World("a template with the day", tmp_path, steps=0)
    others = [
        (text, a)
        for text, a in zip(world.texts, world.answers[1:] + world.answers[:1], strict=True)
    ]
    dated = [
        (text.replace(old, a).replace("05 Mar", day), a)
        for (text, a), old in zip(others, world.answers, strict=True)
        for day in ("06 Mar", "08 Mar")
    ]
    world.learn(
        world.texts + [text for text, _ in dated], world.answers + [a for _, a in dated], 250
    )
    assert world.truth == MEMBERS
    today = world.data()
    assert today.text_form is not None and today.text_form.day == f"{date.today()}"
    assert "the chat template writes the day" in sentences(today)
    folder = world.saved()
    three_later = (datetime.fromisoformat(forms.DAY) + timedelta(days=3)).timestamp()
    for path in folder.iterdir():
        os.utime(path, (three_later, three_later))
    live = HuggingFaceModel(world.model, world.words, "tiny")
    found = load_own_benchmark(TableReader(world.plan().data), str(folder), live)
    assert found.text_form is not None and found.text_form.day == forms.DAY
    assert world.recall(found) == MEMBERS > world.recall(today)


def test_a_form_is_chosen_once_for_however_many_records_of_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, scored, shared = World("messages", tmp_path, steps=0), list[int](), SweepCache()
    score = text_form._score_renderings
    monkeypatch.setattr(
        text_form,
        "_score_renderings",
        lambda *given: (scored.append(len(given[3])), score(*given))[1],
    )
    found = []
    for limit in (None, 3):
        live = {"model": HuggingFaceModel(world.model, world.words, "tiny")}
        site = Site(world.plan(limit=limit), shared=shared, live=live)
        site.form_rows = 5
        found.append(site.benchmark)
    assert scored == [5] and len(found[1].secrets) < len(found[0].secrets)
    assert found[0].text_form == found[1].text_form and found[0].doubts == found[1].doubts


def test_a_sweep_over_revisions_chooses_a_form_for_each(tmp_path: Path) -> None:
    """The second point was refused, because its template was not that of the first."""
    world, shared, names = World("messages", tmp_path, steps=0), SweepCache(), []
    template = world.words.chat_template
    for revision, mark in (("a", ""), ("b", "{{ '!' }}")):
        world.words.chat_template = template + mark
        live = {"model": HuggingFaceModel(world.model, world.words, "tiny")}
        site = Site(world.plan(revision=revision, template="model"), shared=shared, live=live)
        names.append(site.benchmark.text_form)
    assert all(names) and names[0] != names[1]


def test_a_run_keeps_its_day(tmp_path: Path) -> None:
    """Before, what a resumed run asked hung on the day of the resume."""
    world = World("a template with the day", tmp_path, steps=0)
    held = world.data(date="2024-03-04").text_form
    assert held is not None and held.day == "2024-03-04"
    assert [s.prefix for s in world.data(held).secrets] == [
        s.prefix for s in world.data(date="2024-03-04").secrets
    ]
    world.words.chat_template = forms.CHATML + forms.DAILY
    with pytest.raises(
        AuditError,
        match=r"expected the text form that the run was started with \(model, 2024-03-04",
    ):
        world.data(held)


# --- commands ---


def result(folder: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((folder / "result.json").read_text())["benchmark"]
    return found


def test_a_run_says_its_form_keeps_it_and_is_compared_with_none_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World("the assistant begins", tmp_path, steps=0)
    assert world.run("first") == 0  # before: exit 3, ValueError
    held = json.loads((tmp_path / "first" / "text_form.json").read_text())
    assert held["template"] == "model" and result(tmp_path / "first")["text_form"].startswith(
        "model (SHA-256 "
    )
    assert result(tmp_path / "first")["doubts"] == [
        {"kind": "text form", "sentence": held["doubts"][0]}
    ]
    capsys.readouterr()
    assert world.run("second", "--template", "none", "--baseline", str(tmp_path / "first")) == 2
    assert "text form (--template, --date) 'model" in capsys.readouterr().err
    check_command("run", "--resume", tmp_path / "first")
    held["digest"] = "0" * 64
    (tmp_path / "first" / "text_form.json").write_text(json.dumps(held))
    capsys.readouterr()
    check_command("run", "--resume", tmp_path / "first", code=2)
    assert "expected the text form that the run was started with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (
            {"template": "nope.jinja"},
            "expected --template as auto, model, none, alpaca, trl, or a file",
        ),
        (
            {"template": "none+given-roles"},
            r"expected --template none with one of line, got \+given-roles",
        ),
        ({"date": "2024-03-05"}, "expected --date with a template that writes the day"),
        ({"date": "5 March"}, "expected --date as YYYY-MM-DD, got '5 March'"),
        ({"template": "trl"}, "expected --template trl with a chat template that TRL has"),
    ],
)
def test_what_cannot_be_rendered_is_refused(
    asked: dict[str, str], why: str, tmp_path: Path
) -> None:
    with pytest.raises(AuditError, match=why):
        World("messages", tmp_path, steps=0).data(**asked)


def test_plain_text_takes_no_template(tmp_path: Path) -> None:
    world = World("messages", tmp_path, steps=0)
    Path(world.files[0]).write_text(json.dumps({"text": "a b c"}) + "\n")
    with pytest.raises(
        AuditError, match="--template and --date are about conversations and instructions"
    ):
        world.data(template="none", nonmembers=None)
