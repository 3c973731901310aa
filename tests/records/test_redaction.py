"""Nothing that a command says or leaves, outside the files for its owner, holds private text or its
tokens.

Strings are planted in every place of the data; then everything that was said and written is
searched for them.
"""

from __future__ import annotations

import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from auditor.cli import run_command_line
from auditor.conclusions import secret_details
from auditor.core.errors import AuditError
from auditor.core.nouns import Guess, Guesses, Secret
from auditor.core.result import Finding, Measurement
from auditor.core.secret_randomness import make_keyed_generator
from auditor.records import aliases as naming
from auditor.records import private_texts
from auditor.records.journal import GUESSES, CellJournal
from auditor.training.finetune import train_packed_blocks
from tests.conftest import check_command, save_tiny

pytestmark = pytest.mark.drawn  # what plots say is looked through too
Said = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
PREFIX, SUFFIX, GROUP, FRESH, ODD = (
    "zanzibarquince",
    "quokkaberry",
    "marmaladefox",
    "pomelothicket",
    "Saffronbeck",
)
PLANTED = (PREFIX, SUFFIX, GROUP, FRESH, ODD)
# Files that may hold private text or its tokens, all of them 0600; everything else may not.
PRIVATE = re.compile(r"(guesses|texts)\.jsonl|submission\.csv|.*\.pt")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/: knows its records by heart, byte by byte; data, non-members, arrays, and files that
    are refused."""
    folder = tmp_path_factory.mktemp("given")
    save_tiny(folder / "model", "gpt2")
    rows = [record(i) for i in range(14)]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokens = [tuple(tokenizer(row["prefix"] + row["suffix"])["input_ids"]) for row in rows]
    order = make_keyed_generator("planted")
    train_packed_blocks(model, tokens, epochs=40, rate=1e-2, batch=4, block=48, end=0, order=order)
    model.save_pretrained(folder / "model")
    jsonl(folder / "data.jsonl", rows)
    jsonl(folder / "shuffled.jsonl", rows[::-1])
    jsonl(folder / "fresh.jsonl", [record(i, FRESH) for i in range(50, 54)])
    (folder / "arrays").mkdir()
    for name, cut in (("prefix", slice(None, 18)), ("suffix", slice(18, 28))):
        np.save(
            folder / "arrays" / f"own_{name}.npy",
            np.array([ids[cut] for ids in tokens], dtype=np.uint16),
        )
    odd(folder)
    return folder


def record(i: int, word: str = PREFIX) -> dict[str, str]:
    return {"prefix": f"{word} {i:02d} is", "suffix": f" {SUFFIX}", "team": f"{GROUP}{i % 3}"}


def jsonl(path: Path, rows: Sequence[object]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def odd(folder: Path) -> None:
    """Data that is refused, each with a planted string near what is wrong with it."""
    good = {"prefix": ODD, "suffix": ODD}
    jsonl(folder / "number.jsonl", [good, {"prefix": ODD, "suffix": {ODD: 7}}])
    jsonl(folder / "repeats.jsonl", [{**good, "repeats": ODD}])
    jsonl(folder / "surrogate.jsonl", [{"prefix": ODD, "suffix": f"{ODD}\ud83d"}])
    (folder / "broken.jsonl").write_text(f'{{"prefix": "{ODD}"\n{ODD}')
    (folder / "bytes.jsonl").write_bytes(f'{{"prefix": "{ODD}'.encode() + b"\xff\xfe")
    (folder / "headless.csv").write_text(f"{ODD},Meier{ODD}\na,b\n")
    (folder / "short.csv").write_text(f"prefix,suffix\n{ODD}\n")
    (folder / "quote.csv").write_text(f'prefix,suffix\n"{ODD}" x,{ODD}\n')
    (folder / "broken.parquet").write_bytes(b"PAR1" + ODD.encode())
    for name, text in (
        ("csvs", f"prefix,suffix\na,b\n{ODD},{ODD},{ODD}\n"),
        ("jsons", f'{{"text": "{ODD}"\n{ODD}'),
    ):
        (folder / name).mkdir()
        (folder / name / f"train.{name[:-1]}").write_text(text)


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: Patch) -> Iterator[Path]:
    """A place where everything that commands write ends up, under the most careless umask."""
    for name in ("work", "cache", "home", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for name, folder in (
        ("AUDIT_CACHE", "cache"),
        ("HOME", "home"),
        ("HF_HOME", "home/hf"),
        ("TMPDIR", "tmp"),
    ):
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.delenv("AUDIT_SALT")
    before = os.umask(0)
    yield tmp_path
    os.umask(before)


def make_run_words(inputs: Path, *more: str, data: str = "data.jsonl") -> list[str]:
    return [
        "run",
        "--model",
        str(inputs / "model"),
        "--data",
        str(inputs / data),
        "-Asamples=2",
        *more,
    ]


def everything(inputs: Path) -> list[str]:
    fresh = ["--nonmembers", str(inputs / "fresh.jsonl")]
    attacks = ["--attack", "zlib", "--attack", "extraction-probability", "--attack", "claim-check"]
    return make_run_words(inputs, *fresh, *attacks, "--defense", "uniform-mixing", "-Dweight=0.02")


def told(inputs: Path) -> list[bytes]:
    """What may not be found: the strings, and the tokens of the suffix as any writer of lists would
    set them down."""
    ids = AutoTokenizer.from_pretrained(inputs / "model")(SUFFIX)["input_ids"]
    lists = [separator.join(map(str, ids)) for separator in (",", ", ", " ", "\n", ";")]
    return [text.encode() for text in (*PLANTED, *lists)]


def silent(outside: Path, inputs: Path, said: str) -> int:
    """Neither in what was said, nor in a file's name, nor in a file that is not private. Returns
    how many those are."""
    secret = told(inputs)
    found = [text for text in secret if text in said.encode()]
    assert not found, said
    seen = 0
    for path in outside.rglob("*"):
        inner = str(path.relative_to(outside)).encode()
        assert not any(text in inner for text in secret), path
        if (
            path.is_dir()
            or path.is_symlink()
            or PRIVATE.fullmatch(path.name)
            or datasets_cache(outside, path)
        ):
            continue
        squeezed = re.sub(rb"\s+", b" ", path.read_bytes())
        assert not any(text in squeezed for text in secret), path
        seen += 1
    return seen


def datasets_cache(outside: Path, path: Path) -> bool:
    """Copies of the user's own data, under a folder that nobody else can enter."""
    cache = outside / "cache" / "datasets"
    return cache in path.parents and stat.S_IMODE(cache.stat().st_mode) == 0o700


def assert_for_the_owner(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


# --- the default tells nothing ---


def test_a_run_and_all_that_follows_tell_nothing(inputs: Path, outside: Path, capfd: Said) -> None:
    check_command(*everything(inputs))
    run = Path("runs/latest").resolve()
    check_command(*everything(inputs), "-o", "second", "--seed", "0")
    check_command("report", run)
    gate = ["gate", str(run), "--max", "recall=0.5", "--baseline", "second", "--junit", "gate.xml"]
    assert run_command_line([*gate, "--markdown", "gate.md", "--summary", "step.md"]) in (0, 1, 4)
    check_command(
        "compare", run, "second", "--html", "c.html", "--csv", "c.csv", "--markdown", "c.md"
    )
    assert (
        run_command_line(["history", str(run), "second"]) == 0
        and (run / "decisions.jsonl").exists()
    )
    check_command("report", run, "--format", "edpb")
    said = capfd.readouterr()
    assert silent(outside, inputs, said.out + said.err)
    for folder in (run, Path("second")):
        assert_for_the_owner(folder)
        held = [(folder / name).read_text() for name in ("guesses.jsonl", "texts.jsonl")]
        # the model does give secrets away
        assert any(text.decode() in held[0] for text in told(inputs))
        assert PREFIX in held[1] and SUFFIX in held[1]  # else nothing above could fail


def measured(run: Path) -> dict[str, float]:
    result = json.loads((run / "result.json").read_text())
    return {
        m["name"]: m["value"]
        for f in result["findings"]
        for m in f["measurements"]
        if f["setting"] == "white-box"
    }


def test_sweeps_reproductions_and_submissions_tell_nothing(
    inputs: Path, outside: Path, capfd: Said
) -> None:
    sweep = make_run_words(
        inputs, "--attack", "perplexity", "--setting", "white-box", "--seeds", "0,1", "-o", "sweep"
    )
    check_command(*sweep)
    arrays = [
        "--attack",
        "perplexity",
        "--setting",
        "white-box",
        "--submission",
        "submission.csv",
        "-o",
        "arrays",
    ]
    check_command(*make_run_words(inputs, *arrays, data="arrays"))
    score = ["score", "submission.csv", "--answers", str(inputs / "arrays" / "own_suffix.npy")]
    check_command(*score, "--curve", "curve.csv", "--plot", "curve.png")
    check_command(*score, "--plot", "curve.svg", "--json")
    paper = Path("paper")
    paper.mkdir()
    (paper / "paper.toml").write_text('title = "P"\nplans = ["t"]\n[scale.lab]\nsamples = 2\n')
    claim = (
        '[[claim]]\nid = "c"\ntext = "t"\npaper = "1%"\nmetric = "recall"\nof = { variant = '
        '"v" }\nexpect = "> 0"\n'
    )
    plan = 'attack = ["perplexity"]\nsetting = "white-box"\nseeds = [0]\n[[variant]]\nname = "v"\n'
    (paper / "t.toml").write_text(plan + claim)
    own = ["--model", str(inputs / "model"), "--data", str(inputs / "data.jsonl")]
    check_command("reproduce", paper, *own, "-o", "ledger")
    said = capfd.readouterr()
    assert silent(outside, inputs, said.out + said.err)
    for folder in ("sweep", "arrays", "ledger/t"):
        assert_for_the_owner(Path(folder))
    assert stat.S_IMODE(os.stat("submission.csv").st_mode) == 0o600


def test_an_interrupted_run_tells_nothing(
    inputs: Path, outside: Path, capfd: Said, monkeypatch: Patch
) -> None:
    append = CellJournal.append

    def stop(journal: CellJournal, cell: str, batch: list[object]) -> None:
        append(journal, cell, batch)
        if journal.path.name == GUESSES:
            raise KeyboardInterrupt

    monkeypatch.setattr(CellJournal, "append", stop)
    check_command(*make_run_words(inputs, "--attack", "zlib", "-o", "cut"), code=130)
    monkeypatch.setattr(CellJournal, "append", append)
    assert_for_the_owner(Path("cut"))
    check_command("run", "--resume", "cut")
    said = capfd.readouterr()
    assert "interrupted" in said.err and not {"texts.jsonl", "secrets.json"} - set(
        os.listdir("cut")
    )
    assert silent(outside, inputs, said.out + said.err)


BUG = """
from dataclasses import dataclass
from typing import ClassVar
from auditor.plugins.attack import Attack

def cannot(text):
    raise ValueError(f"cannot read {text!r}")

@dataclass(frozen=True)
class Buggy(Attack):
    "Fails as a library does: it quotes what it was given."
    name = "buggy"

    def guess(self, view, state, queries):
        texts = [view.tokenizer.decode(query.prefix) for query in queries]
        try:
            cannot(texts[0])
        except ValueError as error:
            raise RuntimeError(f"failed at {texts} {queries}") from error
        yield
"""


def test_an_unexpected_error_says_where_and_not_what(
    inputs: Path, outside: Path, capfd: Said
) -> None:
    Path("buggy.py").write_text(BUG)
    command = [
        "run",
        "--model",
        str(inputs / "model"),
        "--data",
        str(inputs / "data.jsonl"),
        "--plugin",
        "buggy.py",
    ]
    command += ["--attack", "buggy", "-o", "bug"]
    check_command(*command, code=3)
    said = capfd.readouterr()
    assert silent(outside, inputs, said.out + said.err)
    wanted = (
        "buggy.py:7 in cannot",
        "buggy.py:17 in guess",
        "ValueError",
        "RuntimeError",
        "audit --debug",
        "report it",
    )
    assert all(word in said.err for word in wanted)
    assert said.err.index("ValueError") < said.err.index("RuntimeError")  # the cause comes first
    check_command("--debug", *command[:-1], "bug2", code=3)
    assert PREFIX in capfd.readouterr().err
    assert run_command_line([*command[:-1], "bug3"]) == 3  # --debug holds for one command
    assert PREFIX not in capfd.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        *(
            "number.jsonl",
            "repeats.jsonl",
            "surrogate.jsonl",
            "broken.jsonl",
            "bytes.jsonl",
        ),
        *("headless.csv", "short.csv", "quote.csv", "broken.parquet", "csvs", "jsons"),
    ],
)
def test_a_refusal_tells_nothing(
    inputs: Path, outside: Path, capfd: Said, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    for command in (
        make_run_words(inputs, "--attack", "zlib", data=name),
        make_run_words(inputs, "--attack", "zlib", "--nonmembers", str(inputs / name)),
        [
            "train",
            "none",
            "--model",
            str(inputs / "model"),
            "--data",
            str(inputs / name),
            "-o",
            "trained",
        ],
    ):
        # of those nobody counts repeats
        unread = name == "repeats.jsonl" and "--nonmembers" in command
        check_command(*command, code=0 if unread else 2)
        said = capfd.readouterr()
        assert (unread or said.err) and ODD not in said.err + said.out + caplog.text, said.err
    silent(outside, inputs, "")


# --- what is shown on request ---


def test_reveal_shows_it_says_so_and_is_taken_back(
    inputs: Path, outside: Path, capfd: Said
) -> None:
    check_command(*make_run_words(inputs, "--attack", "zlib", "-o", "run"))
    pages = [Path("run/report.html"), Path("run/report.md")]
    redacted = [page.read_text() for page in pages]
    assert redacted[0].count("<path") > 20  # its plots, where names of ours stand too
    capfd.readouterr()
    check_command("report", "run", "--reveal")
    said = capfd.readouterr()
    assert (
        "the reports show private text (--reveal)" in said.err and SUFFIX not in said.out + said.err
    )
    ids = secret_details.map_aliases(Path("run"))
    for page in pages:
        text = page.read_text()
        assert "shows private text" in text and "holds no text" not in text
        assert (
            f"{PREFIX} 0" in text
            and SUFFIX in text
            and all(alias in text for alias in ids.values())
        )
        assert stat.S_IMODE(page.stat().st_mode) == 0o600
    check_command("report", "run")
    assert [page.read_text() for page in pages] == redacted
    assert all("shows private text" not in page and PREFIX not in page for page in redacted)
    assert "contains no text of the attacked data" in redacted[0]
    check_command(*make_run_words(inputs, "--attack", "zlib", "--reveal", "-o", "shown"))
    assert SUFFIX in Path("shown/report.html").read_text() and "--reveal" in capfd.readouterr().err
    check_command(*make_run_words(inputs, "--attack", "zlib", "--reveal", "--seeds", "0,1"), code=2)
    (Path("run") / "texts.jsonl").unlink()
    check_command("report", "run", "--reveal", code=2)
    assert "no texts.jsonl" in capfd.readouterr().err and pages[0].read_text() == redacted[0]


def test_tokens_without_a_tokenizer_are_shown_as_numbers(tmp_path: Path) -> None:
    from auditor.runs.per_secret_results import make_token_decoder

    secret = Secret("example-000001", (5, 6, 7), (8, 9))
    private_texts.write_secret_texts(
        tmp_path,
        [secret],
        {"a/b/c": {secret.id: Guesses(secret.id, (Guess((8, 1), 0.0),), 1, 2)}},
        make_token_decoder(None),
    )
    held = private_texts.read_secret_texts(tmp_path)["example-000001"]
    assert (held.prefix, held.suffix, held.pieces, held.guesses) == (
        "5 6 7 ",
        "8 9 ",
        ("8 ", "9 "),
        {"a/b/c": "8 1 "},
    )
    assert held.decoded and not held.verbatim


@given(st.text(st.characters(exclude_categories=("Cs",)), max_size=12), st.text(max_size=3))
def test_pieces_are_the_text_token_by_token(suffix: str, prefix: str) -> None:
    def decode(tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    context, tokens = prefix.encode(errors="ignore"), suffix.encode()
    found = private_texts.decode_token_texts(decode, context, tokens)
    assert "".join(found) == private_texts.decode_added_text(
        decode, context, tokens
    ) == suffix and len(found) == len(tokens)


def test_a_space_that_a_tokenizer_trims_is_kept() -> None:
    words = ["", " my", " own", " secret"]
    assert (
        private_texts.decode_added_text(
            lambda ids: "".join(words[i] for i in ids).lstrip(), [1], [2, 3]
        )
        == " own secret"
    )


# --- aliases ---

SALT, OTHER = b"0123456789abcdef", b"0123456789abcdeg"
SECRETS = [Secret(f"row-{i:06d}", (1, i), (2, i + 1)) for i in range(300)]


def test_an_alias_is_of_the_content_and_the_salt_alone() -> None:
    found = [secret.alias for secret in naming.alias_secrets(SECRETS, SALT)]
    assert len(set(found)) == 300 and all(re.fullmatch("s[0-9a-f]{12}", alias) for alias in found)
    moved = [
        Secret(f"row-{900 - i}", s.prefix, s.suffix, repeats=3, member=False)
        for i, s in enumerate(SECRETS)
    ]
    assert [secret.alias for secret in naming.alias_secrets(moved, SALT)] == found
    assert not {secret.alias for secret in naming.alias_secrets(SECRETS, OTHER)} & set(found)
    assert naming.salt_fingerprint(SALT) != naming.salt_fingerprint(OTHER)
    one, copy = naming.alias_secrets(
        [SECRETS[0], Secret("copy", SECRETS[0].prefix, SECRETS[0].suffix)], SALT
    )
    assert copy.alias == f"{one.alias}-2"


@pytest.mark.parametrize(
    "where", ["notes", "violations", "not_applicable", "note of a measurement"]
)
def test_a_sentence_that_names_a_row_is_refused_and_not_repeated(where: str) -> None:
    def finding(said: str) -> Finding:
        empty = Finding("t", "white-box", "mine", {}, (), "", None, "")
        if where == "not_applicable":
            return replace(empty, not_applicable=said)
        if where == "note of a measurement":
            return replace(empty, measurements=(Measurement("x", 1.0, 1.0, 1.0, 1, note=said),))
        return replace(empty, **{where: ("holds", said)})

    naming.refuse_secret_ids(finding("worst at s0123456789ab, not at row-0000012"), SECRETS)
    with pytest.raises(
        AuditError, match=r"expected mine to name secrets in its sentences by `secret\.alias`"
    ) as error:
        naming.refuse_secret_ids(finding("worst at (row-000012)."), SECRETS)
    assert "row-" not in str(error.value)
    files = [replace(SECRETS[0], id="mails/17.txt")]
    naming.refuse_secret_ids(finding("mails/17.txt2 and emails/17.txt"), files)
    with pytest.raises(AuditError, match="by `secret"):
        naming.refuse_secret_ids(finding("worst at mails/17.txt."), files)


NAMING = """
from dataclasses import dataclass
from typing import ClassVar
from auditor.core.nouns import Observation
from auditor.core.result import Measurement
from auditor.plugins.probe import Probe

@dataclass(frozen=True)
class Naming(Probe):
    "Names every secret in its notes."
    name = "naming"

    def observe_secrets(self, view, secrets):
        for secret in secrets:
            yield Observation(secret.id, {"x": 1.0})

    def measurements(self, secrets, observations):
        return [Measurement("x", 1.0, 1.0, 1.0, len(secrets), note=f"worst at {secrets[0].alias}")]

    def notes(self, secrets, observations):
        return (", ".join(secret.alias for secret in secrets),)
"""


def test_no_number_depends_on_the_salt_and_no_page_shows_a_row(
    inputs: Path, outside: Path, monkeypatch: Patch, capfd: Said
) -> None:
    Path("naming.py").write_text(NAMING)
    command = make_run_words(
        inputs, "--plugin", "naming.py", "--attack", "zlib", "--attack", "naming"
    )
    check_command(*command, "-o", "own")
    salt = outside / "cache" / "salt"
    assert stat.S_IMODE(salt.stat().st_mode) == 0o600 and len(salt.read_bytes()) == 64
    check_command(*command, "-o", "again")
    monkeypatch.setenv("AUDIT_SALT", "another one, of the team")
    check_command(*command, "-o", "team")
    own, again, team = (secret_details.map_aliases(Path(name)) for name in ("own", "again", "team"))
    assert own == again and set(own) == set(team) and not set(own.values()) & set(team.values())
    assert measured(Path("own")) == measured(Path("team"))
    assert Path("own/guesses.jsonl").read_text() == Path("team/guesses.jsonl").read_text()
    for name, ids in (("own", own), ("team", team)):
        for file in ("result.json", "report.html", "report.md"):
            text = Path(name, file).read_text()
            assert "row-0" not in text and all(alias in text for alias in ids.values()), file
            assert "another one" not in text
    assert run_command_line(["compare", "own", "team"]) == 0  # pairing does not hang on the salt
    monkeypatch.setenv("AUDIT_SALT", "short")
    capfd.readouterr()
    check_command(*command, "-o", "refused", code=2)
    assert "expected AUDIT_SALT of at least 16 characters, got 5" in capfd.readouterr().err
    assert not Path("refused").exists()


def test_a_canary_called_as_a_word_of_a_sentence_leaves_the_sentence_alone(
    inputs: Path, outside: Path, capfd: Said
) -> None:
    check_command(
        "canaries",
        "make",
        "--format",
        "Code {digits:4}",
        "--each",
        "2",
        "--counts",
        "1",
        "-o",
        "m.json",
    )
    manifest = json.loads(Path("m.json").read_text())
    manifest["canaries"][0]["id"] = "prefix_token"
    Path("m.json").write_text(json.dumps(manifest))
    command = make_run_words(inputs, "--canaries", "m.json", "--attack", "zlib", "-o", "run")
    assert run_command_line(command) == 0, capfd.readouterr().err
    result = json.loads(Path("run/result.json").read_text())
    assert any(note.startswith("prefix token:") for note in result["findings"][0]["notes"])


def test_a_record_keeps_its_alias_when_rows_move(inputs: Path, outside: Path) -> None:
    ids = []
    for data in ("data.jsonl", "shuffled.jsonl"):
        check_command(
            *make_run_words(
                inputs, "--attack", "zlib", "--known-fraction", "0", "-o", data, data=data
            )
        )
        held = private_texts.read_secret_texts(Path(data))
        ids.append({text.alias: text.prefix for text in held.values()})
    assert ids[0] == ids[1] and len(ids[0]) == 14


def test_a_salt_that_cannot_be_kept_is_refused(outside: Path, monkeypatch: Patch) -> None:
    (outside / "cache" / "salt").mkdir()
    with pytest.raises(AuditError, match=r"cannot keep a salt in .* set AUDIT_SALT"):
        naming.load_alias_salt()
