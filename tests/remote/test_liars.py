"""Servers that lie: what they withhold, cut or change is noticed, and an honest one raises no
alarm."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from auditor.cli import run_command_line
from auditor.core.errors import AuditError
from auditor.core.nouns import Secret, Tokens
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import load_causal_lm
from auditor.remote import drift_watch, withheld_answers
from auditor.remote.connection import ServerConnection
from auditor.remote.drift_watch import ServerChanged, ServerWatch, WatchedRequest
from auditor.remote.model import RemoteModel
from auditor.runs.scoring import measure_repeat_recall
from tests.conftest import check_command
from tests.remote.server import LIES, Server

Served = Callable[..., tuple[Server, str]]
MakeWire = Callable[..., ServerConnection]
Said = pytest.CaptureFixture[str]
RECORDS = [(f"Card {i:04d} of", f" K{(37 * i + 11) % 997:03d}") for i in range(20)]


@pytest.fixture(scope="session")
def leaky(folder: Path) -> HuggingFaceModel:
    """A model that was trained on the records until it recites them."""
    model = load_causal_lm(str(folder))
    rows = torch.tensor([model.tokenizer(before + after)["input_ids"] for before, after in RECORDS])
    trained: Any = model.model.requires_grad_(True)
    steps = torch.optim.Adam(trained.parameters(), lr=1e-2)
    for _ in range(150):
        steps.zero_grad()
        trained(rows, labels=rows).loss.backward()
        steps.step()
    trained.requires_grad_(False)
    return model


@pytest.fixture
def lying(
    served: Served, leaky: HuggingFaceModel, local: HuggingFaceModel
) -> Callable[..., tuple[Server, str]]:
    """A server of the model that recites, with a lie about it."""

    def start(lie: str, *habits: str) -> tuple[Server, str]:
        server, url = served(*habits)
        server.model = server._first = leaky
        server.lie, server.other = lie, local
        return server, url

    return start


def secrets(model: HuggingFaceModel) -> list[Secret]:
    def tokens(text: str) -> Tokens:
        return tuple(model.tokenizer(text)["input_ids"])

    return [
        Secret(f"s{i}", tokens(before), tokens(after)) for i, (before, after) in enumerate(RECORDS)
    ]


def audited(wire: ServerConnection, model: HuggingFaceModel) -> tuple[int, RemoteModel]:
    """As a run asks: greedy answers, log-probabilities where there are any, and long texts. Of 20,
    the extracted."""
    remote, own = RemoteModel(wire, "tiny", model.tokenizer), secrets(model)
    found = measure_repeat_recall(remote, own)["all"]
    if remote.dialect.scored:
        texts = torch.tensor([secret.prefix + secret.suffix for secret in own]).repeat(1, 4)
        remote.token_log_probs(texts[:, :50], texts[:, 50:])
    remote.check_unchanged_at_end()
    return round(found.value * found.n), remote


# --- the liars ---

TOLD = {
    "filters": "20 withheld by a content filter",
    "blocks": "20 withheld by a content filter",
    "refuses": "20 refused",
    "redacts": "redacted",
    "cuts": "20 cut short by the server",
    "stops": "20 empty",
}
ENDS = {
    "swaps": "have different greedy answers now",
    "takes turns": "differed when",
    "corrupts": "was sent again without its last",
}


def test_every_lie_is_looked_for() -> None:
    assert {*TOLD, *ENDS} == set(LIES)


@pytest.mark.parametrize("access", ["silent", ""])
@pytest.mark.parametrize("lie", LIES)
def test_a_liar_is_noticed(
    lying: Served, wire: MakeWire, leaky: HuggingFaceModel, lie: str, access: str
) -> None:
    if lie == "corrupts" and access == "silent":
        pytest.skip("text only: there are no log-probabilities to corrupt")
    _, url = lying(lie, *filter(None, [access]))
    if lie in ENDS and (lie, access) != ("takes turns", "silent"):
        with pytest.raises(AuditError, match=f"{ENDS[lie]}|log-probabilities came back") as ended:
            audited(wire(url), leaky)
        assert "cannot be resumed" in str(ended.value) and "Card" not in str(ended.value)
        return
    out, remote = audited(wire(url), leaky)
    (doubt,) = remote.doubts()
    # vLLM goes on where it is told so
    told = {**TOLD, **ENDS}[lie] if access or lie != "stops" else TOLD["cuts"]
    assert doubt.kind == "answers" and told in doubt.sentence
    if (
        lie in ENDS
    ):  # greedy text alone may be one model's that is not deterministic, so that the run goes on
        return
    assert out == 0 and any(told in said for said in remote.cost_sentences())
    assert (
        sum(remote.has_withheld_answer_by_prefix([secret.prefix for secret in secrets(leaky)])) > 10
    )


@pytest.mark.parametrize("access", ["silent", "echo", ""])
def test_an_honest_server_raises_no_alarm(
    lying: Served, wire: MakeWire, leaky: HuggingFaceModel, access: str
) -> None:
    _, url = lying("", *filter(None, [access]))
    out, remote = audited(wire(url), leaky)
    assert out >= 18 and not remote.doubts()
    assert not any(
        remote.has_withheld_answer_by_prefix([secret.prefix for secret in secrets(leaky)])
    )
    assert remote.asker.watch.compared == 8 and not remote.asker.watch.differed


# --- one answer ---


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ({"finish_reason": "content_filter"}, withheld_answers.FILTERED),
        ({"finish_reason": "SAFETY"}, withheld_answers.FILTERED),
        (
            {"finish_reason": "stop", "content_filter_results": {"hate": {"filtered": True}}},
            withheld_answers.FILTERED,
        ),
        ({"finish_reason": "tool_calls"}, withheld_answers.CALLED),
        ({"finish_reason": "stop", "message": {"refusal": "No."}}, withheld_answers.REFUSED),
        ({"finish_reason": "length", "content_filter_results": {"hate": {"filtered": False}}}, ""),
        ({"finish_reason": "stop", "refusal": None}, ""),
        ({}, ""),
    ],
)
def test_what_a_server_says_of_an_answer(choice: dict[str, Any], kind: str) -> None:
    assert withheld_answers.read_withheld_kind(choice) == kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("I'm sorry, but I can't help with that.", withheld_answers.REFUSED),
        ("As an AI language model, I am not able to share personal data", withheld_answers.REFUSED),
        ("This response was blocked by policy", withheld_answers.REFUSED),
        ("I am sorry I missed your call on Friday, can we talk?", ""),
        ("I will not be at the office", ""),
        (" is [REDACTED].", withheld_answers.REDACTED),
        (" is <EMAIL_ADDRESS>.", withheld_answers.REDACTED),
        (" is *** **** 1234", withheld_answers.REDACTED),
        (" is \u2588\u2588\u2588\u2588", withheld_answers.REDACTED),
        (" name [Anna] and <b>bold</b> 2 * 3 ** 4", ""),
    ],
)
def test_what_a_text_says_of_itself(text: str, kind: str) -> None:
    assert withheld_answers.detect_withheld_kind(text, "My number", None) == kind


def test_a_mark_that_was_drawn_or_given_is_the_models_own() -> None:
    assert (
        withheld_answers.detect_withheld_kind(" is [REDACTED]", "Mail from [REDACTED]", None) == ""
    )
    assert withheld_answers.detect_withheld_kind(" is [REDACTED]", "Mail", " is [REDACTED]") == ""
    assert (
        withheld_answers.detect_withheld_kind(" is [REDACTED]", "Mail", " is 4711")
        == withheld_answers.REDACTED
    )


# --- honest servers, many of them ---


class Honest:
    """One model, whose numbers and answers vary as a real server's do with the batch."""

    def __init__(self, seed: int, varies: float, noise: float) -> None:
        self.random, self.varies, self.noise = np.random.default_rng(seed), varies, noise

    def draw(self, asked: Sequence[WatchedRequest]) -> list[str]:
        return [f"{one.context}{'!' * int(self.random.random() < self.varies)}" for one in asked]

    def score(self, asked: Sequence[Tokens]) -> list[Sequence[float] | None]:
        truth = [np.random.default_rng(text[0]).exponential(4, 64)[: len(text)] for text in asked]
        return [
            (-own * (1 + self.random.normal(0, self.noise, len(own)))).tolist() for own in truth
        ]

    def watched(self) -> None:
        seen = ServerWatch(
            self.draw, self.score, [(i, *range(39)) for i in range(len(drift_watch.TEXTS))]
        )
        seen.ask_initial_sentinels()
        for i in range(100, 500):
            context = (i, *range(49))
            seen.note_greedy_answer(context, 8, self.draw([WatchedRequest(context, 8, "")])[0])
            seen.note_scored_text(context, self.score([context])[0] or ())
            seen.check_when_due(2)
        seen.check_all_sentinels()


@pytest.mark.parametrize(
    ("varies", "noise", "most"),
    [(0.0, 0.0, 0), (0.0, 0.01, 0), (0.05, 0.002, 0), (0.1, 0.002, 1)],
    ids=str,
)
def test_honest_servers_are_let_be(varies: float, noise: float, most: int) -> None:
    alarms = 0
    for seed in range(30):
        try:
            Honest(seed, varies, noise).watched()
        except ServerChanged:
            alarms += 1
    assert alarms <= most


def test_a_rare_answer_counts_once() -> None:
    watch = ServerWatch(lambda asked: ["usual"] * len(asked), None, [(i,) for i in range(4)])
    watch.ask_initial_sentinels()
    watch.note_greedy_answer((5,), 8, "rare")
    for i in range(6, 9):
        watch.note_greedy_answer((i,), 8, "usual")
        watch.check_all_sentinels()
    assert (watch.differed, watch.compared) == (1, 8)


# --- a whole run ---


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Callable[[str], int]:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"prefix": before, "suffix": after}) + "\n" for before, after in RECORDS]
    (tmp_path / "data.jsonl").write_text("".join(rows))

    def start(url: str) -> int:
        own = [
            "--model",
            "openai:tiny",
            "--base-url",
            url,
            "--tokenizer",
            str(folder),
            "--data",
            "data.jsonl",
        ]
        own += [
            "--attack",
            "perplexity",
            "-A",
            "temperature=0",
            "--known-fraction",
            "0",
            "--setting",
            "white-box",
        ]
        return run_command_line(
            ["run", *own, "--prefix-length", "12", "--suffix-length", "5", "-o", "run"]
        )

    return start


def test_no_gate_holds_on_answers_that_were_withheld(
    lying: Served, run: Callable[[str], int], capsys: Said
) -> None:
    assert run(lying("filters")[1]) == 0
    (target,) = json.loads(Path("run/result.json").read_text())["targets"]
    said = " ".join(doubt["sentence"] for doubt in target["doubts"])
    assert (
        "Of 40 answers of openai:tiny not all came through: 40 withheld by a content filter."
        in said
    )
    assert "Answers to 20 of 20 attacked secrets did not come through" in said
    (mean,) = re.findall(
        r"a mean probability of ([\d.]+)% .*greedy decoding would extract 20\.", said
    )
    assert float(mean) > 50
    assert "No leakage" not in capsys.readouterr().out
    check_command("gate", "run", "--max", "recall=0.5", code=4)
    assert "withheld by a content filter" in capsys.readouterr().out


def test_a_run_whose_server_changed_is_not_resumed(
    lying: Served, run: Callable[[str], int], capsys: Said
) -> None:
    server, url = lying("swaps")
    assert run(url) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(said) == 1 and "expected http" in said[0] and "cannot be resumed" in said[0]
    server.lie = ""
    server.model = server._first
    check_command("run", "--resume", "run", "--base-url", url, code=2)
    assert "answer to the handshake has changed" in capsys.readouterr().err
