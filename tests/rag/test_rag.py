"""Systems whose leaks are planted, what is refused, and how often a sealed store is accused."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from auditor.core.errors import AuditError
from auditor.rag import page
from auditor.rag.asking import TEMPLATE
from auditor.rag.audit import RagAudit, audit_rag
from auditor.rag.documents import choose_document_strangers, read_rag_documents
from auditor.rag.layers import (
    CANNOT_TELL,
    LEAKS,
    NO_LEAK,
    RagJudge,
    RagVerdict,
    compute_coin_p_value,
)
from auditor.rag.system import RagSystem, open_rag_system
from tests.conftest import check_command
from tests.rag import systems
from tests.rag.systems import Row, make_documents, write_documents

FILE = Path(systems.__file__)


def audit(
    tmp_path: Path,
    store: systems.OpenStore,
    rows: list[Row],
    control: systems.OpenStore | None = None,
    crawl: int = 16,
) -> RagAudit:
    corpus = read_rag_documents(str(write_documents(tmp_path / "documents.jsonl", rows)), 0)
    shows = None
    if control is not None:
        shows = RagSystem("control", control.ask, control.index)
    system = RagSystem("store", store.ask, store.index)
    return audit_rag(corpus, system, shows, TEMPLATE, crawl, 0, lambda *_: None)


def count_shown(result: RagAudit) -> dict[str, tuple[int, int, str]]:
    return {
        layer.layer: (len(layer.disclosed), layer.n_possible, layer.verdict)
        for layer in result.layers
    }


def test_without_a_filter_every_document_reaches_others(tmp_path: Path) -> None:
    result = audit(tmp_path, systems.OpenStore(), make_documents())
    disclosed = count_shown(result)
    assert result.verdict == LEAKS
    crawled, n_foreign, _ = disclosed.pop("documents recovered by the crawl")
    assert set(disclosed.values()) == {(result.n_in, result.n_in, LEAKS)}
    assert len(disclosed) == 6 and 0 < crawled <= min(n_foreign, 3 * 16)
    assert result.membership.verdict == LEAKS
    assert result.membership.p_value == 1 / 2000
    assert result.membership.measurements[0].value == 1.0
    assert all(layer.outside[0] == 0 for layer in result.layers)
    assert result.crawl is not None
    assert [target for target, _ in result.crawl.points] == [4, 8, 12, 16]
    # more than the layer counts, which are those of others
    assert ", the asker's own included (" in page.describe_crawl(result.crawl)


def test_a_zero_is_earned_by_the_owners(tmp_path: Path) -> None:
    result = audit(tmp_path, systems.PerUser(), make_documents())
    assert result.verdict == NO_LEAK == result.membership.verdict
    for layer in result.layers:
        assert layer.control is not None and layer.control[0] == layer.n_possible >= 30
        assert not layer.disclosed and layer.interval[1] < 0.12
    assert result.membership.control_p == 1 / 2000


def test_what_the_control_is_not_shown_cannot_be_told(tmp_path: Path) -> None:
    result = audit(tmp_path, systems.Silent(), make_documents())
    assert {layer.verdict for layer in result.layers} == {CANNOT_TELL}
    assert result.membership.verdict == CANNOT_TELL == result.verdict
    few = audit(tmp_path, systems.PerUser(), make_documents(30))
    assert {layer.verdict for layer in few.layers} == {CANNOT_TELL}  # under 20 in the store


def test_a_shared_cache_shows_after_the_owner_asked(tmp_path: Path) -> None:
    result = audit(tmp_path, systems.SharedCache(), make_documents())
    assert result.verdict == LEAKS
    after, before = result.direct
    assert after > 20 and not before
    assert "share a cache" in page.describe_cache(result)
    open_result = audit(tmp_path, systems.OpenStore(), make_documents(), crawl=0)
    assert min(open_result.direct) > 20 and not page.describe_cache(open_result)
    assert open_result.crawl is None


def test_a_filter_after_the_search_tells_membership_by_what_is_missing(tmp_path: Path) -> None:
    rows = make_documents(240, n_identities=2)
    result = audit(tmp_path, systems.FilterAfter(), rows, crawl=0)
    assert {layer.verdict for layer in result.layers} == {NO_LEAK}
    assert result.membership.verdict == LEAKS == result.verdict
    assert result.membership.measurements[0].note.startswith("fewer texts retrieved")
    assert page.state_result(result).startswith("leaks: replies reveal which documents")


def test_without_identities_another_system_is_the_control(tmp_path: Path) -> None:
    rows = make_documents(80, n_identities=0)
    assert audit(tmp_path, systems.Silent(), rows).verdict == CANNOT_TELL
    earned = audit(tmp_path, systems.Silent(), rows, systems.OpenStore())
    assert earned.verdict == NO_LEAK
    leaking = audit(tmp_path, systems.OpenStore(), rows)
    assert leaking.verdict == LEAKS and leaking.control == "none"


def test_a_system_that_returns_no_texts_is_judged_by_its_answers(tmp_path: Path) -> None:
    result = audit(tmp_path, systems.AnswersOnly(), make_documents())
    assert result.channels == ("answers",) and result.verdict == NO_LEAK
    assert not any("retrieved" in layer.layer for layer in result.layers)


def test_text_in_and_out_of_the_store_is_no_leak(tmp_path: Path) -> None:
    """Every reply states a sentence that is in each document, and documents that are outside."""
    rows = make_documents()
    texts = [row["text"] for row in rows]

    class Oracle(systems.PerUser):
        def ask(self, question: str, identity: str | None) -> tuple[str, list[str]]:
            answer, retrieved = super().ask(question, identity)
            start = question.split("\n")[0]
            return f"{answer} {next((t for t in texts if t.startswith(start)), '')}", retrieved

    disclosed = count_shown(audit(tmp_path, Oracle(), rows, crawl=0))
    assert {v for layer, (_, _, v) in disclosed.items() if "answers" in layer} == {CANNOT_TELL}
    assert {v for layer, (_, _, v) in disclosed.items() if "retrieved" in layer} == {NO_LEAK}


def test_a_sentence_that_others_begin_with_is_no_sign(tmp_path: Path) -> None:
    """The tail of each document holds the first words of another user's document."""
    rows = make_documents()
    for row, following in zip(rows, [*rows[1:], rows[0]], strict=True):
        row["text"] += " " + " ".join(following["text"].split()[:15])
    assert audit(tmp_path, systems.PerUser(), rows, crawl=0).verdict == NO_LEAK


def test_personal_data_of_the_askers_own_documents_are_no_sign(tmp_path: Path) -> None:
    """Each user's document of a person is found by the words of another user's document."""
    rows = make_documents()
    for i, row in enumerate(rows):
        mail = f"person.{i // 2}@example.org"  # rows 2k and 2k + 1 are of two users
        row["text"] = f"Notes on person number {i // 2}: {row['text']} {mail}"
        row["pii"]["email"].append(mail)
    result = audit(tmp_path, systems.PerUser(), rows, crawl=0)
    assert {layer.verdict for layer in result.layers} == {NO_LEAK}
    assert audit(tmp_path, systems.OpenStore(), rows, crawl=0).verdict == LEAKS


def test_equal_tails_are_a_sign_of_no_document(tmp_path: Path) -> None:
    rows = make_documents()
    for i, row in enumerate(rows):
        if i % 10 < 2:
            row["text"] = f"{row['text'][:40]} {' '.join(map(str, range(100, 140)))}"
            row["pii"] = None
    result = audit(tmp_path, systems.OpenStore(), rows, crawl=0)
    verbatim = result.layers[0]
    names = {row["id"] for i, row in enumerate(rows) if i % 10 > 1}
    assert set(verbatim.disclosed) <= names and len(verbatim.disclosed) > 30


def test_copies_share_a_coin_and_their_owners(tmp_path: Path) -> None:
    rows = make_documents(40)
    copies = [*rows, *({**row, "identity": "user3", "id": f"copy {row['id']}"} for row in rows)]
    path = write_documents(tmp_path / "documents.jsonl", copies)
    corpus = read_rag_documents(str(path), 0)
    assert len(corpus.documents) == 40
    inside = [row["text"] for row in corpus.list_rows(True)]
    assert {inside.count(text) for text in inside} == {2}
    assert not set(inside) & {row["text"] for row in corpus.list_rows(False)}
    for entry, stranger in zip(corpus.documents, choose_document_strangers(corpus, 0), strict=True):
        assert "user3" in entry.owners and stranger not in entry.owners


def test_the_p_value_is_the_share_of_coins(tmp_path: Path) -> None:
    """All choices of 4 of 8 by hand: the two most extreme of 70 differ as much."""
    values = np.arange(8.0)
    member = np.arange(8) >= 4
    p_value = compute_coin_p_value(values[None], member, 0)
    assert abs(p_value - 2 / 70) < 4 * np.sqrt(2 / 70 / 1999)
    assert compute_coin_p_value(np.zeros((2, 8)), member, 0) == 1.0


def test_sealed_stores_are_rarely_accused() -> None:
    """Replies that do not depend on the coins, many of them equal: at most 5% of 300 stores."""
    noise = np.random.default_rng(0)
    alarms = 0
    for seed in range(300):
        n = 40
        signals = np.stack([noise.normal(size=n), noise.integers(0, 3, n), noise.random(n) < 0.1])
        member = noise.random(n) < 0.5
        alarms += compute_coin_p_value(signals.astype(float), member, seed) <= 0.05
    assert alarms <= 24  # 99% of a binomial of 5%


def test_few_documents_may_be_shown_by_chance() -> None:
    """Where chance shows as many documents outside as inside, a quarter of the audits had one
    inside and none outside."""
    judge = object.__new__(RagJudge)
    judge.seed = 0
    documents = [SimpleNamespace(name=str(i), document=i) for i in range(48)]
    judge.exchanges = SimpleNamespace(attack=documents, control=documents)  # type: ignore
    everything = np.ones(48, dtype=bool)

    def judged(member: Any, disclosed: Any) -> RagVerdict:
        judge.corpus = SimpleNamespace(member=member, documents=documents)  # type: ignore
        return judge.judge("documents", disclosed, member, everything)

    half = np.arange(48) < 24
    verdicts = [judged(half, np.arange(48) < n) for n in range(4)]
    assert [v.verdict for v in verdicts] == [NO_LEAK, CANNOT_TELL, CANNOT_TELL, LEAKS]
    assert verdicts[1].why == "chance may show fewer than 3 documents of the store"
    rng = np.random.default_rng(0)
    for expected in (1, 2):
        alarms = 0
        for _ in range(200):
            verdict = judged(rng.random(48) < 0.5, rng.random(48) < expected / 24)
            alarms += verdict.verdict == LEAKS
        assert alarms <= 18  # 4.5%, but for one series in a hundred


@pytest.mark.parametrize(("p_value", "verdict"), [(0.036, NO_LEAK), (0.034, LEAKS)])
def test_membership_is_told_below_five_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, p_value: float, verdict: str
) -> None:
    """At 0.05, the interval of the measured share of false alarms reached above 5%."""
    monkeypatch.setattr(RagJudge, "_compute_attack_p_value", lambda *_: p_value)
    result = audit(tmp_path, systems.PerUser(), make_documents())
    assert result.membership.verdict == verdict


def test_command_with_and_without_a_system(tmp_path: Path, capsys: Any) -> None:
    documents = write_documents(tmp_path / "documents.jsonl", make_documents(60))
    words: tuple[object, ...] = ("rag", "--documents", documents, "-o", tmp_path / "out")
    check_command(*words)
    corpus = (tmp_path / "out" / "in.jsonl").read_text()
    check_command(*words, f"{FILE}:open_store", "--crawl", "8", "--gate", "--json", code=1)
    stated = json.loads(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))
    assert stated["verdict"] == LEAKS and (tmp_path / "out" / "in.jsonl").read_text() == corpus
    assert (tmp_path / "out" / "rag.html").exists() and (tmp_path / "out" / "rag.md").exists()
    secret = make_documents(60)[0]["text"].split()[30]
    for report in ("html", "md", "json"):
        assert secret not in (tmp_path / "out" / f"rag.{report}").read_text()
    check_command(*words, f"{FILE}:per_user", "--crawl", "0", "--gate")


def test_what_is_refused(tmp_path: Path, capsys: Any) -> None:
    rows = make_documents(40)
    documents = write_documents(tmp_path / "documents.jsonl", rows)
    plain = tmp_path / "plain.py"
    plain.write_text("def ask(question, identity):\n    return 1\n")
    broken = tmp_path / "broken.py"
    broken.write_text("index = len\ndef ask(question, identity):\n    raise KeyError('x')\n")
    short = write_documents(tmp_path / "short.jsonl", [{"text": "too short"}])
    few = write_documents(tmp_path / "few.jsonl", rows[:3])
    mine = [{**row, "identity": "me"} for row in rows]
    only = write_documents(tmp_path / "only.jsonl", mine)
    words = ("rag", "--documents", documents)
    for arguments, sentence in (
        ((*words,), "expected SYSTEM to audit"),
        ((*words, "nothing.py"), "which does not exist"),
        ((*words, "nothing"), "expected a system as FILE.py"),
        ((*words, f"{FILE}:nobody"), "expected a function 'nobody'"),
        ((*words, plain), "the documents to index: draw them"),
        ((*words, broken), "failed to answer: 'x' (KeyError)"),
        ((*words, FILE, "--template", "Hello"), "expected {words} in --template"),
        ((*words, FILE, "--crawl", "-1"), "expected --crawl of at least 0"),
        ((*words, "http://127.0.0.1/v1?key=1"), "expected --base-url"),
        (("rag", "--documents", short, FILE), "expected at least 20 words"),
        (("rag", "--documents", few, FILE), "give more documents"),
        (("rag", "--documents", only, FILE), "that some identity"),
    ):
        check_command(*arguments, code=2)
        assert sentence in capsys.readouterr().err.replace("\n", " ")
    folder = tmp_path / "drawn"
    check_command(*words, "-o", folder)
    check_command(*words, "-o", folder, plain, code=2)
    assert "to return (answer, list of retrieved texts)" in capsys.readouterr().err
    check_command(*words, "-o", folder, plain, "--seed", "1", code=2)
    assert "--seed draw, got others" in capsys.readouterr().err


@contextmanager
def serve_chat(store: systems.OpenStore) -> Iterator[str]:
    """Serve a store as an OpenAI-compatible chat endpoint; `user` is the identity."""

    class Chat(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({"data": [{"id": "notes"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            text = store.ask(body["messages"][0]["content"], body.get("user"))[0]
            message = {"role": "assistant", "content": text}
            self.answer({"choices": [{"index": 0, "message": message}], "model": body["model"]})

        def answer(self, value: Any) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Chat)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_an_endpoint_is_asked_as_each_identity(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    rows = make_documents(16, n_identities=2)
    path = write_documents(tmp_path / "documents.jsonl", rows)
    corpus = read_rag_documents(str(path), 0)
    store = systems.PerUser()
    store.index(corpus.list_rows(True))
    with serve_chat(store) as address:
        system = open_rag_system(address)
        for entry in corpus.documents:
            for identity in corpus.identities:
                expected = store.ask(entry.head, identity)[0]
                assert system.ask(entry.head, identity).answer == expected
        assert system.ask("any", None).retrieved is None
        result = audit_rag(corpus, system, None, TEMPLATE, 0, 0, lambda *_: None)
    assert result.channels == ("answers",)
    with pytest.raises(AuditError, match="cannot ask"):
        RagSystem("gone", open_rag_system(f"{address}#notes").call).ask("any", None)


def test_question_order_is_drawn(tmp_path: Path) -> None:
    target: list[str] = []

    class Listening(systems.PerUser):
        def ask(self, question: str, identity: str | None) -> tuple[str, list[str]]:
            target.append(question.split()[0])
            return super().ask(question, identity)

    rows = make_documents(40)
    random.Random(1).shuffle(rows)
    audit(tmp_path, Listening(), rows, crawl=0)
    first_words = [row["text"].split()[0] for row in rows]
    assert sorted(set(target)) == sorted(set(first_words)) and target[::2] != first_words
