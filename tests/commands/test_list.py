"""`audit list`, as a whole and of one plug-in, and what a shell completes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from auditor.cli import app, run_command_line
from auditor.commands import listing
from auditor.plugins import registry
from auditor.plugins.catalogue import load_plugin_classes
from auditor.plugins.options import get_option_defaults, list_allowed_values
from tests.conftest import check_command

Said = pytest.CaptureFixture[str]
ROOT = Path(__file__).resolve().parents[2]
FOUND = registry.list_plugin_classes()
FLAGS = {"Attack": "-A {}.", "Probe": "-A {}.", "Defense": "-D {}.", "Trainer": "-D "}


def test_it_names_every_plug_in_in_few_lines(capsys: Said) -> None:
    check_command("list")
    lines = capsys.readouterr().out.splitlines()
    in_terminal = [line.plain for line in listing.list_overview_lines(FOUND, 100)]
    # in a pipe nothing is cut
    assert max(map(len, in_terminal[:-1])) <= 100 < max(map(len, lines[:-1]))
    # no word is cut
    assert all(whole.startswith(cut) for whole, cut in zip(lines, in_terminal, strict=True))
    named = next(line for line in lines if line.startswith("controls ")).count(",") + 1
    methods = {name for kind in FLAGS for name in FOUND[kind]}
    forms = [name for name, cls in FOUND["Defense"].items() if cls.form]
    assert len(forms) >= 7 and len(lines) <= 45
    # a line each, but for forms and models, controls, and how to read on
    assert len(lines) == len(methods) - named - len(forms) + 3
    assert {name for kind in FOUND.values() for name in kind} <= set(
        re.findall(r"[\w-]+", "\n".join(lines))
    )


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in FLAGS for name in FOUND[kind]])
def test_of_one_it_shows_options_needs_claim_source_and_page(
    kind: str, name: str, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("auditor.commands.list.load_plugin_classes", lambda before: FOUND)
    cls = FOUND[kind][name]
    check_command("list", name)
    shown = capsys.readouterr().out
    given = {
        option: str(value).lower() if isinstance(value, bool) else value
        for option, value in get_option_defaults(cls).items()
    }
    assert all(
        f"{FLAGS[kind].format(name)}{option}={value}" in shown for option, value in given.items()
    )
    assert all(
        f"({'|'.join(map(str, values))})" in shown for values in list_allowed_values(cls).values()
    )
    pages = [line.split()[1] for line in shown.splitlines() if line.startswith("page ")]
    assert (
        f"docs/how-to/{name}.md" in pages or not (ROOT / "docs" / "how-to" / f"{name}.md").exists()
    )
    assert any(f"`{name}`" in (ROOT / page).read_text(encoding="utf-8") for page in pages)
    sources = [
        line.split(maxsplit=1)[1] for line in shown.splitlines() if line.startswith("source ")
    ]
    assert all(f'name = "{name}"' in Path(source).read_text(encoding="utf-8") for source in sources)
    assert all(need in shown for need in getattr(cls, "needs", ()))


def test_classes_from_the_cache_name_the_same_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path))
    for _ in ("made", "read"):
        classes = load_plugin_classes(lambda: None)
        pages = {
            name: cls.page for kind in ("Attack", "Probe") for name, cls in classes[kind].items()
        }
        assert pages == {
            name: cls.page for kind in ("Attack", "Probe") for name, cls in FOUND[kind].items()
        }
    assert pages["epsilon-audit"] == "how-to/audit-an-epsilon"


def test_a_slip_is_refused_with_the_nearest_name(capsys: Said) -> None:
    assert (
        run_command_line(["list", "ethicis"]) == 2
        and "did you mean 'ethicist'" in capsys.readouterr().err
    )


def ask_of_a_shell(typed: str) -> dict[str, str]:
    """The environment in which a shell asks how these words may go on."""
    at = str(len(typed.split()) - 1)
    return {"_AUDIT_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": at}


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("audit run --attack eth", {"ethicist"}),
        ("audit run -A ethicist.sa", {"ethicist.samples="}),
        ("audit run -D pmixed.eps", {"pmixed.epsilon="}),
        ("audit train dp", {"dp-sgd"}),
        ("audit rep", {"report", "reproduce"}),
    ],
)
def test_a_shell_completes_commands_plug_ins_and_options(
    typed: str, wanted: set[str], capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ask_of_a_shell(typed).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer puts its own there
    with pytest.raises(SystemExit):
        app(prog_name="audit")
    assert set(capsys.readouterr().out.split()) == wanted


def test_the_installed_command_answers_a_shell() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "auditor.cli"],
        env={**os.environ, **ask_of_a_shell("audit train dp")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["dp-sgd"]
