"""The reference pages, printed from what the code says of itself: `python -m tests.docs.reference`
writes them."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import typer

from auditor.cli import EXIT_CODES, app
from auditor.core.plan import FIELDS, IN_FILE, Plan
from auditor.core.plan_fields import PlanField
from auditor.gate import decision_log
from auditor.plugins import registry
from auditor.plugins.options import get_option_defaults
from auditor.records import attacked_secrets, journal, manifest, private_texts, result_file, table
from auditor.reports import files
from auditor.statistics.metrics import METRICS
from tests.benchmarks.pii_formats import EXAMPLES, N_RANDOM, REGIONS, false_alarm_shares
from tests.docs.pages import split_help

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
_PRINTED = "Printed from the code by `python -m tests.docs.reference`.\n"
_DEFAULT = re.compile(r" \[default: (.*)\]$")
_PRESIDIO = """\
python-stdnum 2.2 refuses numbers that are issued: Chinese ones of people older than their district's code, Korean ones
without a check digit, Swedish coordination numbers. `audit` has its own checks of these.

presidio-analyzer 2.2.366 was measured once on the same texts, each of its pattern recognisers for these kinds at any
score, without a language model: it finds 48 of the 102 examples whole that were recognised here then. It misses e-mail
addresses next to a letter of another script or after `=` or `/`, IBANs in lower case, cards with dots, of 19 digits,
from 2200 to 2720 (Mastercard, Mir) or in full width, dates of birth with a month's name, and French, Swiss, Brazilian
and Chinese numbers. It finds 7 that are not recognised here, as no check says that they are anybody's: nine digits as
an SSN, an IMEI as a card, any date. It brings spaCy (430 MB installed), so the checks here are not replaced by it.

presidio-anonymizer 2.2.366 joins values of one kind with only blanks between them before it cleans them: of two card
numbers, `mask` with `chars_to_mask=12` leaves the second readable in full.
"""  # noqa: E501
_TYPES = {str: "text", int: "whole number", float: "number", bool: "true or false"}
_KINDS = {
    "Attack": ("Attacks", "`--attack`, options by `-A`"),
    "Probe": (
        "Probes",
        "`--attack`, options by `-A`. A probe sees the answers: the auditor's own measurement",
    ),
    "Defense": ("Defenses", "`--defense`, options by `-D`"),
    "Trainer": ("Training methods", "`audit train METHOD`, options by `-D`"),
}


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(head)
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _kind(kind: Any) -> str:
    """A type as a reader of TOML calls it."""
    origin, of = (
        typing.get_origin(kind),
        [one for one in typing.get_args(kind) if one is not types.NoneType],
    )
    if origin is Literal:
        return " or ".join(f"`{one}`" for one in of)
    if origin is dict:
        return "table"
    if origin is tuple:
        return f"list of {_kind(of[0])}"
    return " or ".join(map(_kind, of)) if of else _TYPES[kind]


def _plain(value: Any) -> str:
    """As a command line and TOML write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- the plan ---

_PLAN = """# The plan

{printed}
All that `audit run` can be asked. A field has one name wherever it is given: as a flag (`--known-limit 5`), in a plan
file (`known_limit = 5`; `audit run --config plan.toml`), in Python (`known_limit=5`). Flags win over the plan file. A
plan file is flat, and may also hold `seeds`, `sweep` and `variant`: [grids](../how-to/grids-and-papers.md).

A field with a **risk** that stands in a plan file or in a run folder is refused unless the command line names it too.
"""  # noqa: E501


def plan() -> str:
    parts: dict[str, list[str]] = {}
    for name in IN_FILE:
        parts.setdefault(FIELDS[name].part, []).append(name)
    text = _PLAN.format(printed=_PRINTED)
    for part, names in parts.items():
        text += f"\n## {part or 'the run'}\n\n{_about(part)}\n\n"
        text += _table(
            ("field", "flag", "type", "default", "meaning"), (_field(name) for name in names)
        )
    return text


def _about(part: str) -> str:
    kind = typing.get_type_hints(Plan)[part] if part else None
    return (
        "What concerns all parts."
        if kind is None
        else " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
    )


def _field(name: str) -> list[str]:
    one = FIELDS[name]
    found = _DEFAULT.search(one.help)
    meaning = _DEFAULT.sub("", one.help)
    if one.risk:
        meaning += f" **Risk:** {one.risk}."
    spelt = ""
    if one.has_flag:
        spelt = f"{', '.join(one.flags).replace('/', ' / ')} {one.metavar}".strip()
    default = (
        _given(one)
        if found is None or (found[1].startswith("--") and one.kind is bool)
        else found[1]
    )
    return [_code(name), _code(spelt), _kind(one.kind), default, meaning]


def _given(one: PlanField) -> str:
    if one.default in (None, (), {}) and one.default is not False:
        return ""
    return _code(_plain(one.default))


# --- commands ---

_COMMANDS = """# Commands

{printed}
What `--help` of each says. A value is written in capitals; `a|b` is one of both.

## Exit codes

{codes}"""


def commands() -> str:
    codes = _table(("code", "meaning"), ((str(code), said) for code, said in EXIT_CODES.items()))
    return _COMMANDS.format(printed=_PRINTED, codes=codes) + "".join(
        _command("audit", typer.main.get_command(app))
    )


def _command(name: str, command: Any) -> Iterator[str]:
    context = command.context_class(command, info_name=name)
    (summary, *paragraphs), examples = split_help(command)
    yield f"\n## {name}\n\n{summary}\n"
    if examples:
        yield "\n```text\n" + "".join(f"{line}\n" for line in examples) + "```\n"
    yield from (f"\n{paragraph}\n" for paragraph in paragraphs)
    if rows := [_flag(one, context) for one in command.params]:
        yield "\n" + _table(("", "meaning", "panel"), rows)
    for title, one in getattr(command, "commands", {}).items():
        yield from _command(f"{name} {title}", one)


def _flag(one: Any, context: Any) -> tuple[str, str, str]:
    written, told = one.get_help_record(context)
    kind = f"{one.param_type_name}s"
    return (
        _code(written.partition(" ")[0] if kind == "arguments" else written.strip()),
        " ".join(told.replace("\\[", "[").split()),
        (one.rich_help_panel or kind).lower(),
    )


# --- plug-ins ---

_PLUGINS = """# Plug-ins

{printed}
Attacks, probes, defenses and training methods that come with the program, with their options and defaults; the
lab has smaller defaults. `audit list` shows those that are installed.
[One of your own](../how-to/write-a-plug-in.md).
"""  # noqa: E501


def plugins() -> str:
    text = _PLUGINS.format(printed=_PRINTED)
    found = registry.list_plugin_classes()
    for kind, (title, asked) in _KINDS.items():
        text += f"\n## {title}\n\n{asked}.\n"
        for name, cls in sorted(found[kind].items()):
            if cls.__module__.startswith("auditor."):
                text += _plugin(kind, name, cls)
    return text


def _plugin(kind: str, name: str, cls: Any) -> str:
    paragraphs = (" ".join(one.split()) for one in (inspect.getdoc(cls) or "").split("\n\n"))
    text = f"\n### {name}\n\n" + "\n\n".join(one.replace("<", "&lt;") for one in paragraphs) + "\n"
    facts = {"needs": ", ".join(getattr(cls, "needs", ())), "claim": getattr(cls, "claims", "")}
    for fact, told in facts.items():
        text += f"\n{fact.capitalize()}: {told}.\n" if told else ""
    hints = typing.get_type_hints(cls)
    rows = [
        [_code(option), _kind(hints[option]), _code(_plain(value))]
        for option, value in get_option_defaults(cls).items()
    ]
    return text + ("\n" + _table(("option", "type", "default"), rows) if rows else "")


# --- metrics ---

_METRICS = """# Metrics

{printed}
The names that `result.json`, policies of a gate, `audit compare --metric` and exports use. In a family `{{n}}` and
`{{p}}` stand for a number. Every number has its interval and its sample size, but for those without one. A gate refuses
a rule on a metric that has no `yes` under "gate": it is in no row of an attack, or has no interval.

"""  # noqa: E501


def metrics() -> str:
    rows = [
        [
            _code(metric.name),
            metric.title,
            metric.unit,
            "" if metric.bounded else "none",
            "yes" if metric.is_gateable else "",
            metric.note,
        ]
        for metric in METRICS
    ]
    return _METRICS.format(printed=_PRINTED) + _table(
        ("name", "what it is", "unit", "interval", "gate", "note"), rows
    )


# --- files of a run ---

_FILES = """# Files of a run

{printed}
The files of a run folder. Only their owner can read them; **private** marks files with text or tokens of the data.
`--resume` reads the files that grow during the run; all other commands read the files written at its end.

"""  # noqa: E501
_TABLE_OF_SECRETS = """
## `secrets.parquet`

The columns are `kind`, `target`, `setting`, `attack`, `secret` (its id; in Python its alias), `member`, `repeats`, `quantity`, `token`, `value`.

| kind | a row is | quantities |
| --- | --- | --- |
| `measured` | a secret in a configuration | of an attack `hit`, `any_hit`, `distance` (token edits), `tolerance`, `score` (`probability` if it is one), `rank`, `lead`, `recall(kind=…)`; of a probe the values whose means are its measurements |
| `observed` | an observation of a probe | `log_p`, `null_p`, `exposure_bits`, … (nats, bits) |
| `tokens` | a token of a true suffix, under a target | `log_prob`, in nats |
| `heldout` | a held-out text, under a target | `tokens`, and the summed nll behind each `perplexity` |
| `records` | a training record extracted without a prompt | `generations`, `longest`; `record`: the record that holds a secret; `trained`: the number of training records |
"""  # noqa: E501
_RUN = "`audit run`"
PRIVATE = (journal.GUESSES, private_texts.TEXTS, "state/")
FILES = {  # name -> by whom, what it holds
    attacked_secrets.PLAN: (_RUN, "the plan, flat, as `--resume` reads it: [fields](plan.md)"),
    journal.GUESSES: (_RUN, "guesses, one a line, appended as secrets finish"),
    journal.OBSERVATIONS: (
        _RUN,
        "the observations of probes, one a line, appended as secrets finish",
    ),
    journal.TOKENS: (_RUN, "log-probabilities of the tokens of each secret"),
    private_texts.TEXTS: (_RUN, "secrets and first guesses as text, for `--reveal`"),
    "state/": (_RUN, "the fitted state of attacks, such as tuned prompts"),
    attacked_secrets.SECRETS: (
        _RUN,
        "the attacked secrets by salted digest: member or not, copies, kinds",
    ),
    "secrets.sha256": (_RUN, "digest of the secrets: a resume attacks the same ones"),
    "until.sha256": (
        "`audit run --until`",
        "digest of its stopping rules: a resume uses the same ones",
    ),
    "versions.txt": (_RUN, "versions of the programs: a resume has the same ones"),
    "weights.json": (_RUN, "SHA-256 of the files of the models"),
    "prefix_token.json": (_RUN, "the prefix token and the reason for it"),
    "text_form.json": (_RUN, "the text form of conversations and the reason for it"),
    "facts.json": (_RUN, "the results of a probe for a whole configuration"),
    result_file.RESULT: (
        _RUN,
        "the result: measurements with intervals ([schema](commands.md): `audit list --schema`)",
    ),
    table.TABLE: (
        _RUN,
        "every quantity of every secret, by digest: the input of gates and comparisons",
    ),
    manifest.MANIFEST: (_RUN, "SHA-256 of every record, which a gate checks"),
    manifest.PRIVATE: (_RUN, "SHA-256 of the private records"),
    ".lock": (_RUN, "held while a process writes here"),
    files.HTML: (_RUN, "the report"),
    files.MARKDOWN: (_RUN, "the report for a pull request"),
    "gate.md": ("`audit run --gate`", "the decision, for a pull request"),
    "gate.xml": ("`audit run --gate`", "the decision as JUnit XML"),
    decision_log.DECISIONS: ("`audit gate`", "decisions, one a line"),
    decision_log.LAST: (
        "`audit gate`",
        "SHA-256 of the last line, so that a removed line is noticed",
    ),
    manifest.ATTESTATION: ("`audit attest`", "the signed statement"),
    "edpb.md": ("`audit report --format edpb`", "answers to a data protection officer's questions"),
    "edpb.html": ("`audit report --format edpb`", "the same as a page"),
}


def files_of_a_run() -> str:
    rows = [
        [_code(name), "**private**" if name in PRIVATE else "", by, told]
        for name, (by, told) in FILES.items()
    ]
    return (
        _FILES.format(printed=_PRINTED)
        + _table(("file", "", "written by", "content"), rows)
        + _TABLE_OF_SECRETS
    )


def personal_data() -> str:
    """What is recognised as personal data; `tests/benchmarks/test_pii.py` holds each example to
    it."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for one in EXAMPLES:
        shown = one.example if one.before == "see " else one.text
        rows.setdefault((one.country, one.what, one.source, one.kind or "no: mark it"), []).append(
            _code(shown)
        )
    head = ("country, language", "what", "examples", "format by", "recognised")
    lines = (
        (country, what, " ".join(some), source, kind)
        for (country, what, source, kind), some in rows.items()
    )
    alarms = _table(("digits", "a national number", "a card"), false_alarm_shares())
    return (
        f"# What is recognised as personal data\n\n{_PRINTED}\nEach example is tried by a test, in "
        f"a text, with `--phone-region {','.join(REGIONS)}`. Digits may be those of any script, "
        "full-width ones too.\n\n"
        f"{_table(head, lines)}\nOf {N_RANDOM:,} random numbers with this many digits, next to no "
        f"name, this many are taken for:\n\n{alarms}\n{_PRESIDIO}"
    )


PAGES: Mapping[str, Callable[[], str]] = {
    "personal-data.md": personal_data,
    "plan.md": plan,
    "commands.md": commands,
    "plugins.md": plugins,
    "metrics.md": metrics,
    "files.md": files_of_a_run,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
