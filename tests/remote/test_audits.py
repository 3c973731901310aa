"""`audit run --model openai:NAME`: a whole audit over HTTP, what it refuses, what it costs, and
that no key is kept."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from auditor.api import audit
from auditor.core.errors import AuditError
from auditor.remote import connection
from auditor.remote.drift_watch import ServerWatch
from tests.conftest import check_command
from tests.remote.conftest import QUICK, save
from tests.remote.server import Server

Said = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
KEY = "sk-planted-4711"
ATTACKS = ["perplexity", "lowercase", "reference", "ethicist", "extraction-probability"]
FLAGS = [word for name in ATTACKS for word in ("--attack", name)]
FLAGS += ["-A", "ethicist.tune_on=none", "-A", "ethicist.prompt_length=4"]
OPTIONS = [
    "-A",
    "temperature=1",
    "-A",
    "top_p=1",
    "--samples",
    "4",
    "--prefix-length",
    "8",
    "--suffix-length",
    "4",
]


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: Patch) -> Iterator[Path]:
    """data.jsonl, fresh.jsonl and an empty cache; retries that wait for nobody."""
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(connection, "PATIENCE", QUICK)
    monkeypatch.chdir(tmp_path)
    for name, offset in (("data", 0), ("fresh", 500)):
        rows = [
            {"prefix": f"Card {offset + i:04d} of", "suffix": f" K{(7 * i + offset) % 997:03d}"}
            for i in range(5)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield tmp_path


def arguments(url: str, tokenizer: Path, *more: str) -> list[str]:
    own = ["--model", "openai:tiny", "--base-url", url, "--tokenizer", str(tokenizer)]
    return [
        "run",
        *own,
        "--data",
        "data.jsonl",
        "--nonmembers",
        "fresh.jsonl",
        "--known-fraction",
        "0",
        *OPTIONS,
        *more,
    ]


def result(run: Path) -> Any:
    return json.loads((run / "result.json").read_text(encoding="utf-8"))


def rows(found: Any) -> dict[tuple[str, str], Any]:
    return {(row["setting"], row["attack"]): row for row in found["findings"]}


def value(row: Any, name: str) -> float:
    return next(float(m["value"]) for m in row["measurements"] if m["name"] == name)


Serve = Callable[..., tuple[Server, str]]


def test_an_audit_over_http_finds_what_one_at_hand_finds(
    inputs: Path, served: Serve, folder: Path, capsys: Said
) -> None:
    server, url = served(key="")
    save(inputs / "other", seed=5)
    check_command(*arguments(url, folder, *FLAGS, "--reference", "other", "-o", "far"))
    at_hand = [
        "--model",
        str(folder),
        *arguments(url, folder, *FLAGS, "--reference", "other", "-o", "near")[7:],
    ]
    check_command("run", *at_hand)
    far, near = result(inputs / "far"), result(inputs / "near")
    mine, theirs = rows(far), rows(near)
    own, other = (seen["white-box", "extraction-probability"] for seen in (mine, theirs))
    names = [m["name"] for m in other["measurements"]]
    assert [m["name"] for m in own["measurements"]] == names and "rank_bound" in names
    for name in names:
        assert value(own, name) == pytest.approx(value(other, name), rel=1e-3)
    assert far["benchmark"]["greedy_recall"] == near["benchmark"]["greedy_recall"]
    perplexities = [found["targets"][0]["perplexity"]["value"] for found in (far, near)]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=1e-4)
    for name in ATTACKS[:4]:
        assert mine["white-box", name]["measurements"] and mine["white-box", name]["access"] == [
            "draw",
            "likelihood",
            "ranks",
            "likeliest",
        ]
    assert "only sampled tokens" in mine["text-only", "perplexity"]["not_applicable"]
    notes = far["targets"][0]["notes"]
    paid = next(note for note in notes if note.startswith("this run paid for"))
    said = re.match(r"this run paid for ([\d,]+) tokens in ([\d,]+) requests", paid)
    assert said and int(said[2].replace(",", "")) == len(server.asked)
    assert any("with ranks" in note for note in far["benchmark"]["notes"])
    assert "behind an API" in (inputs / "far" / "report.md").read_text(encoding="utf-8")
    capsys.readouterr()
    check_command(
        *arguments(url, folder, "--attack", "exact", "--attack", "perplexity", "-o", "refused"),
        code=2,
    )
    refused = capsys.readouterr().err
    assert (
        "--attack exact cannot run: needs" in refused
        and "openai:tiny does not give them" in refused
    )


@pytest.mark.parametrize("reference", [[], ["--reference", "other"]], ids=["none", "given"])
def test_membership_over_http_falls_back_to_the_loss(
    inputs: Path, served: Serve, folder: Path, capsys: Said, reference: list[str]
) -> None:
    """A server of text and its log-probabilities gives no distributions (Min-K%++) and no ranks
    (EZ-MIA)."""
    _, url = served("echo")
    for name, offset in (("data", 0), ("fresh", 500)):
        pairs = [
            {"prefix": f"Card {offset + i:04d} of", "suffix": f" K{7 * i + offset:03d}"}
            for i in range(12)
        ]
        (inputs / f"{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    save(inputs / "other", seed=5)
    own = ["--attack", "perplexity", "--attack", "membership", "--setting", "white-box", *reference]
    check_command(*arguments(url, folder, *own, "-o", "run"))
    said = capsys.readouterr()
    assert "membership: score=loss, because APIs give no whole distributions" in said.out + said.err
    row = rows(result(inputs / "run"))["white-box", "membership"]
    assert not row["not_applicable"] and 0 <= value(row, "membership_auc") <= 1
    asked = ["-A", "membership.score=min_k_plus", "-o", "refused"]
    check_command(*arguments(url, folder, *own, *asked))
    said = capsys.readouterr()
    assert "score=loss" not in said.out + said.err
    assert (
        "is not a number for 24 of 24 records"
        in rows(result(inputs / "refused"))["white-box", "membership"]["not_applicable"]
    )


def test_a_bracket_is_shown_as_both_of_its_ends(inputs: Path, served: Serve, folder: Path) -> None:
    _, url = served()
    own = [
        "--attack",
        "perplexity",
        "--attack",
        "extraction-probability",
        "-A",
        "extraction-probability.top_p=0.7",
    ]
    check_command(*arguments(url, folder, *own, "-o", "run"))
    row = rows(result(inputs / "run"))["white-box", "extraction-probability"]
    assert not any(
        m["name"] in ("extraction_probability", "expected_any_of_10") for m in row["measurements"]
    )
    assert value(row, "extraction_probability_at_least") <= value(
        row, "extraction_probability_at_most"
    )
    report = (inputs / "run" / "report.md").read_text(encoding="utf-8")
    assert (
        re.search(r"chance per sample \S+% \[\S+\] to \S+% \[\S+\]", report)
        and "brackets, not numbers" in report
    )


def test_python_audits_over_http_too(inputs: Path, served: Serve, folder: Path) -> None:
    server, url = served()
    lengths = {"prefix_length": 8, "suffix_length": 4, "known_fraction": 0.0}
    run = audit(
        "openai:tiny",
        folder,
        base_url=url,
        data="data.jsonl",
        attacks=["perplexity"],
        out="run",
        **lengths,
    )
    assert run.result.plan["tokenizer"] == str(folder) and server.asked
    with pytest.raises(AuditError, match="--tokenizer does not apply to a model"):
        audit(str(folder), str(folder), data="data.jsonl", **lengths)


def test_text_alone_is_audited_as_text_alone(
    inputs: Path, served: Serve, folder: Path, capsys: Said
) -> None:
    _, url = served("silent")
    check_command(*arguments(url, folder, *FLAGS, "-o", "refused"), code=2)
    assert "--attack perplexity cannot run: needs log-probabilities" in capsys.readouterr().err
    ethicist = ["--attack", "ethicist", *FLAGS[2 * len(ATTACKS) :]]
    check_command(*arguments(url, folder, *ethicist, "-o", "run"))
    found = result(inputs / "run")
    applicable = {key for key, row in rows(found).items() if not row["not_applicable"]}
    assert applicable == {("text-only", "ethicist"), ("white-box", "ethicist")}
    assert any(
        "text only (the server ignores echo and logprobs" in note
        for note in found["benchmark"]["notes"]
    )
    target = found["targets"][0]
    assert target["perplexity"] is None
    assert "no held-out perplexity: openai:tiny gives no log-probabilities" in target["notes"]


# --- what it costs ---


def test_a_run_that_is_stopped_pays_for_nothing_twice(
    inputs: Path, served: Serve, folder: Path, monkeypatch: Patch
) -> None:
    # what is asked again on purpose is another matter
    monkeypatch.setattr(ServerWatch, "check_all_sentinels", lambda self: None)
    server, url = served()
    more = ("--attack", "perplexity", "--setting", "white-box")
    check_command(*arguments(url, folder, *more, "-o", "whole"))
    whole = list(server.asked)
    handshake = next(i for i, body in enumerate(whole) if "Card" in str(_words(server, body)))
    server.asked.clear()
    os.remove(next((inputs / "cache" / "api").iterdir()))
    # a server that gives up in the middle
    server.faults.extend([None] * (len(whole) - 3) + [(400, {})])
    check_command(*arguments(url, folder, *more, "-o", "cut"), code=2)
    first = len(server.asked)
    # a folder may be anybody's: who gets the texts is named again
    check_command("run", "--resume", "cut", code=2)
    check_command("run", "--resume", "cut", "--base-url", url)
    paid = [
        json.dumps(body, sort_keys=True)
        for body in server.asked[handshake:first] + server.asked[first + handshake :]
    ]
    once = {json.dumps(body, sort_keys=True) for body in whole[handshake:]}
    assert len(once) == len(whole) - handshake
    assert set(paid) == once and len(paid) == len(once) + 1  # the one that was refused
    assert _told(rows(result(inputs / "cut"))) == _told(rows(result(inputs / "whole")))
    before = len(server.asked)
    check_command(*arguments(url, folder, *more, "-o", "again"))
    assert len(server.asked) - before == handshake  # the rest was answered before


def _words(server: Server, body: Any) -> str:
    prompt = body["prompt"]
    return prompt if isinstance(prompt, str) else str(server.model.tokenizer.decode(prompt))


def _told(found: Any) -> Any:
    return {key: row["measurements"] for key, row in found.items()}


def test_a_budget_is_not_exceeded_and_a_larger_one_pays_for_the_rest(
    inputs: Path,
    served: Serve,
    folder: Path,
    capsys: Said,
) -> None:
    server, url = served()
    more = ("--attack", "perplexity", "--setting", "white-box")
    check_command(*arguments(url, folder, *more, "--max-tokens-total", "1300", "-o", "run"), code=2)
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.match(
        r"error: expected --max-tokens-total to pay for all requests, but [\d,]+ of 1,300 tokens "
        r"are spent",
        said,
    )
    (store,) = (inputs / "cache" / "api").iterdir()
    with closing(sqlite3.connect(store)) as file:
        spent = file.execute("select sum(read + written) from spent").fetchone()[0]
    assert 900 < spent <= 1300
    before = len(server.asked)
    check_command(*arguments(url, folder, *more, "--max-tokens-total", "20000", "-o", "run2"))
    note = next(
        n
        for n in result(inputs / "run2")["targets"][0]["notes"]
        if n.startswith("this run paid for")
    )
    assert "of --max-tokens-total 20,000" in note and len(server.asked) > before


# --- keys and private text ---


def test_no_key_is_kept_or_told(
    inputs: Path,
    served: Serve,
    folder: Path,
    monkeypatch: Patch,
    capsys: Said,
) -> None:
    server, url = served(key=KEY)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_LOG", "debug")
    server.faults.extend([(500, {}), "json", "cut"])
    check_command("--debug", *arguments(url, folder, "--attack", "perplexity", "-o", "run"))
    monkeypatch.setenv("OPENAI_API_KEY", f"{KEY}-wrong")
    check_command(
        "--debug", *arguments(url, folder, "--attack", "perplexity", "-o", "other"), code=2
    )
    said = capsys.readouterr()
    assert KEY not in said.out + said.err
    written = [path for path in inputs.rglob("*") if path.is_file()]
    assert written and not [path for path in written if KEY.encode() in path.read_bytes()]


def test_answers_are_their_owners_only(inputs: Path, served: Serve, folder: Path) -> None:
    _, url = served()
    before = os.umask(0o022)
    check_command(*arguments(url, folder, "--attack", "perplexity", "-o", "run"))
    os.umask(before)
    store = inputs / "cache" / "api"
    assert stat.S_IMODE(store.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in store.iterdir()} == {0o600}


# --- what is refused ---

REFUSED: dict[str, tuple[list[str], str]] = {
    "no url": (
        ["--model", "openai:tiny"],
        "expected --base-url URL with --model openai:tiny, got none",
    ),
    "no name": (
        ["--model", "openai:", "--base-url", "{url}"],
        "expected --model openai:NAME, got no name",
    ),
    "url alone": (
        ["--model", "{t}/m", "--base-url", "{url}"],
        "--base-url does not apply to a model of the provider hf",
    ),
    "budget alone": (
        ["--model", "{t}/m", "--max-tokens-total", "9"],
        "--max-tokens-total does not apply to a model",
    ),
    "tokenizer alone": (
        ["--model", "{t}/m", "--tokenizer", "x"],
        "--tokenizer does not apply to a model",
    ),
    "no server": (
        ["--model", "openai:tiny", "--base-url", "http://127.0.0.1:9/v1"],
        "cannot ask http://127.0.0.1:9/v1",
    ),
    "no http": (
        ["--model", "openai:tiny", "--base-url", "localhost:8000"],
        "expected --base-url as http://HOST:PORT/v1",
    ),
    "no url at all": (
        ["--model", "openai:tiny", "--base-url", "http://[::1/v1"],
        "expected --base-url as http://HOST",
    ),
    "password": (
        ["--model", "openai:tiny", "--base-url", "http://a:b@h/v1"],
        "expected --base-url without a name or",
    ),
    "other model": (["--model", "openai:big", "--base-url", "{url}"], "serves (tiny), got 'big'"),
    "no tokenizer": (
        ["--model", "openai:tiny", "--base-url", "{url}", "--tokenizer", "no/such/one"],
        "got none in 'no/such/one'",
    ),
    "none beside": (
        ["--model", "openai:no/such/one", "--base-url", "{url}", "--tokenizer", ""],
        "expected --tokenizer DIR",
    ),
    "wrong key": (
        ["--model", "openai:tiny", "--base-url", "{locked}"],
        "accepts, got none: set OPENAI_API_KEY (it answers",
    ),
    "small budget": (
        ["--model", "openai:tiny", "--base-url", "{url}", "--max-tokens-total", "40"],
        "but 0 of 40 tokens are spent",
    ),
    "device": (
        ["--model", "openai:tiny", "--base-url", "{url}", "--device", "cuda"],
        "--device does not apply to a model",
    ),
    "dtype": (
        ["--model", "openai:tiny", "--base-url", "{url}", "--dtype", "float16"],
        "--dtype does not apply to a model",
    ),
    "revision": (
        ["--model", "openai:tiny", "--base-url", "{url}", "--revision", "a"],
        "--revision does not apply to a model",
    ),
    "model arg": (
        ["--model", "openai:tiny", "--base-url", "{url}", "--model-arg", "a=b"],
        "--model-arg does not apply to",
    ),
    "defense": (
        ["--model", "openai:tiny", "--base-url", "{url}", "--defense", "uniform-mixing"],
        "--defense uniform-mixing needs a model whose distributions are read here",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_says_nothing_or_leads_nowhere_is_refused(
    inputs: Path,
    served: Serve,
    folder: Path,
    capsys: Said,
    case: str,
) -> None:
    flags, why = REFUSED[case]
    words = {"{url}": served()[1], "{locked}": served(key=KEY)[1], "{t}": str(inputs)}
    for word, real in words.items():
        flags = [flag.replace(word, real) for flag in flags]
    tokenizer = (
        []
        if "--tokenizer" in flags or "{t}" in REFUSED[case][0][1]
        else ["--tokenizer", str(folder)]
    )
    before = sorted(inputs.rglob("*"))
    check_command(
        "run",
        *flags,
        *tokenizer,
        "--data",
        "data.jsonl",
        "--attack",
        "perplexity",
        "-o",
        "run",
        code=2,
    )
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and why in lines[0]
    assert [path for path in sorted(inputs.rglob("*")) if "cache" not in path.parts] == before


def test_a_served_form_stands_beside_the_model_at_hand(
    inputs: Path, served: Serve, folder: Path, capsys: Said
) -> None:
    server, url = served(key="")
    at_hand = [
        "run",
        "--model",
        str(folder),
        *arguments(url, folder)[7:],
        "--attack",
        "perplexity",
        "--attack",
        "exact",
    ]
    check_command(*at_hand, "--forms", f"served:{url}", "--setting", "white-box", "-o", "run")
    found, name = result(inputs / "run"), f"served:{url.split('/')[2]}"
    assert [target["name"] for target in found["targets"]] == ["undefended", name] and server.asked
    own = {row["attack"]: row for row in found["findings"] if row["target"] == name}
    assert (
        own["perplexity"]["measurements"] and "does not give them" in own["exact"]["not_applicable"]
    )
    assert "cannot be asked" in (inputs / "run" / "report.html").read_text()
    (inputs / "plan.toml").write_text(f'forms = ["int8", "served:{url}"]')
    capsys.readouterr()
    check_command(*at_hand, "--config", "plan.toml", "-o", "other", code=2)
    assert (
        "the records would be sent there: if you want that, give it on the command line"
        in capsys.readouterr().err
    )
    check_command(*at_hand, "--forms", f"served:{url}", "--engine", "ray", "-o", "other", code=2)
    assert "got a model behind an API" in capsys.readouterr().err
