"""Flags over a TOML file over defaults; what nobody has is refused with the nearest name."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from auditor.core.errors import AuditError
from auditor.core.plan import Plan
from auditor.plugins.attack import Attack
from auditor.plugins.options import build_plugin
from auditor.runs.plan import (
    make_plan,
    merge_plugin_options,
    parse_plugin_options,
    read_plan_file,
    refuse_unused_options,
)

OUTSIDE: dict[str, Any] = {"model": "m", "data": "d"}


def toml(tmp_path: Path, text: str) -> dict[str, Any]:
    (tmp_path / "plan.toml").write_text(text)
    return read_plan_file(tmp_path / "plan.toml")


# --- flags over TOML over defaults ---


def test_defaults() -> None:
    plan = make_plan({}, {})
    assert plan == Plan() and plan.target.uses_builtin_lab
    assert (plan.attacks.attack, plan.defenses.defense, plan.attacks.setting, plan.seed) == (
        ("ethicist",),
        (),
        "both",
        0,
    )
    assert not make_plan(OUTSIDE, {}).target.uses_builtin_lab


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    config = toml(
        tmp_path,
        'seed = 3\nlimit = 50\nattack = ["zlib"]\nsetting = "white-box"\nknown_fraction = 0.5\n'
        + FILES,
    )
    plan = make_plan(
        config,
        {"seed": 4, "limit": None, "attack": [], "setting": "text-only", "known_fraction": None},
    )
    assert (
        plan.seed,
        plan.data.limit,
        plan.attacks.attack,
        plan.attacks.setting,
        plan.data.known_fraction,
    ) == (
        4,
        50,
        ("zlib",),
        "text-only",
        0.5,
    )


FILES = 'model = "m"\ndata = "d"\n'


@pytest.mark.parametrize(
    ("name", "zero"), [("seed", 0), ("known_fraction", 0.0), ("trust_remote_code", False)]
)
def test_a_flag_that_is_zero_was_given(name: str, zero: Any) -> None:
    assert (
        make_plan(
            {**OUTSIDE, name: 1 if name != "trust_remote_code" else True}, {name: zero}
        ).map_field_values()[name]
        == zero
    )


def test_options_are_merged_one_by_one(tmp_path: Path) -> None:
    config = toml(
        tmp_path,
        "[attack_options.ethicist]\nsamples = 5\nepochs = 3\n[defense_options.pmixed]\nq = 0.5\n",
    )
    flags = {
        "attack_options": parse_plugin_options(
            "-A", ["ethicist.samples=7", "top_p=0.9"], ["ethicist"]
        )
    }
    plan = make_plan(config, flags)
    assert plan.attacks.attack_options == {
        "ethicist": {"samples": "7", "epochs": 3},
        "": {"top_p": "0.9"},
    }
    assert plan.defenses.defense_options == {"pmixed": {"q": 0.5}}
    # the file's own stay as they were
    assert config["attack_options"] == {"ethicist": {"samples": 5, "epochs": 3}}


def test_automatic_batches_win_over_the_files_size() -> None:
    """`--batch-size auto` is a flag like any other."""
    from auditor.commands.options import parse_batch_size_flag

    assert (
        make_plan(
            {**OUTSIDE, "batch_size": 7}, {"batch_size": parse_batch_size_flag("auto")}
        ).batch_size
        is None
    )


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "attack": st.lists(st.text(min_size=1), min_size=1).map(tuple),
            "attack_options": st.dictionaries(
                st.text(), st.dictionaries(st.text(), st.text() | st.integers())
            ),
            "setting": st.sampled_from(["text-only", "white-box", "both"]),
            "seed": st.integers(0, 2**63 - 1),
            "limit": st.integers(1, 9) | st.none(),
            "known_fraction": st.floats(0, 1),
            # Names of credentials are refused; none of them ends in an underscore.
            "model_args": st.dictionaries(st.text().map("{}_".format), st.text()),
        },
    )
)
def test_a_plan_survives_its_file(values: dict[str, Any]) -> None:
    plan = Plan.from_fields(**OUTSIDE, **values)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


# --- what is refused ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("atack = []", r"unknown field in .*plan.toml: 'atack'; did you mean 'attack'\?"),
        ("batch-size = 3", "did you mean 'batch_size'"),
        ('command = "rm"', "unknown field"),
        ("seed = ", "is not TOML"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(AuditError, match=message):
        toml(tmp_path, text)


def test_missing_and_binary_files(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match="cannot read the plan"):
        read_plan_file(tmp_path / "none.toml")
    with pytest.raises(AuditError, match="cannot read the plan"):
        read_plan_file(tmp_path)
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(AuditError, match="is not TOML"):
        read_plan_file(tmp_path / "x.toml")


def test_a_plan_is_read_as_utf_8_in_every_locale(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('data = "é"', encoding="utf-8")
    code = (
        "import pathlib; from auditor.runs.plan import read_plan_file as read; "
        "print(ascii(read(pathlib.Path('plan.toml'))['data']))"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    printed = subprocess.check_output(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, **ascii_only}, text=True
    )
    assert printed.strip() == ascii("é")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model": "m"}, "got --model without --data"),
        ({"data": "d"}, "got --data without --model"),
        *[
            ({name: "x"}, f"--{name} goes with --model")
            for name in ("known", "nonmembers", "public", "reference", "revision")
        ],
        ({"limit": 0}, "expected --limit >= 1, got 0"),
        ({"prefix_length": 0}, "expected --prefix-length >= 1, got 0"),
        ({"suffix_length": -3}, "expected --suffix-length >= 1, got -3"),
        ({"samples": -1}, "expected --samples >= 1, got -1"),
        ({"batch_size": 0}, "expected --batch-size >= 1, got 0"),
        ({"attack": []}, "at least one --attack"),
        (
            {"setting": "best"},
            "plan.setting: expected .text-only., .white-box. or .both., got .best.",
        ),
        ({"seed": "7"}, "plan.seed: expected int, got '7'"),
        ({"seed": 7.5}, "plan.seed: expected int"),
        ({"limit": True}, "plan.limit: expected int, got True"),
        ({"attack": "ethicist"}, "plan.attack: expected a list"),
        ({"attack": [1]}, r"plan.attack\[0\]: expected str"),
        ({"attack_options": {"samples": 5}}, "plan.attack_options.samples: expected an object"),
    ],
)
def test_bad_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(AuditError, match=message):
        make_plan(values, {})


@pytest.mark.parametrize(
    "values",
    [
        {"known_fraction": 0.5},
        {"device": "cuda"},
        {"dtype": "bfloat16"},
        {"model_args": {"a": "b"}},
        {"trust_remote_code": True},
    ],
    ids=lambda values: next(iter(values)),
)
def test_the_lab_refuses_what_it_would_ignore(values: dict[str, Any]) -> None:
    with pytest.raises(AuditError, match="lab"):
        make_plan(values, {})


# --- options ---


@pytest.mark.parametrize(
    ("item", "parsed"),
    [
        ("samples=5", {"": {"samples": "5"}}),
        ("zlib.samples=5", {"zlib": {"samples": "5"}}),
        ("ensemble=./runs/a=b.c", {"": {"ensemble": "./runs/a=b.c"}}),
        ("pm-ixed.ensemble=/x.y/z", {"pm-ixed": {"ensemble": "/x.y/z"}}),
        ("samples=", {"": {"samples": ""}}),
    ],
)
def test_forms_of_an_option(item: str, parsed: dict[str, dict[str, str]]) -> None:
    assert parse_plugin_options("-A", [item], ["zlib", "pm-ixed"]) == parsed


@pytest.mark.parametrize("item", ["samples", "=5", "", "="])
def test_other_forms_are_refused(item: str) -> None:
    with pytest.raises(AuditError, match=r"expected -A \[name\.\]option=value, got"):
        parse_plugin_options("-A", [item], ["zlib"])


def test_a_name_nobody_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        AuditError, match=r"unknown name in -A zlob\.samples=5: 'zlob'; did you mean 'zlib'"
    ):
        parse_plugin_options("-A", ["zlob.samples=5"], ["zlib", "ethicist"])
    with pytest.raises(AuditError, match="unknown name"):
        parse_plugin_options("-A", [".samples=5"], ["zlib"])


def test_own_options_win_over_general_ones_and_those_over_the_benchmarks() -> None:
    options = {
        "": {"samples": "2", "epochs": "2", "foreign": "2"},
        "a": {"epochs": "3"},
        "b": {"samples": "9"},
    }
    defaults = {"samples": 1, "epochs": 1, "rate": 1}
    chosen = merge_plugin_options("a", options, defaults, ["samples", "epochs", "rate"])
    assert chosen == {"samples": "2", "epochs": "3", "rate": 1}


def test_a_general_option_must_be_somebodys() -> None:
    fields = {"ethicist": ["samples", "epochs"], "zlib": ["samples"]}
    refuse_unused_options("-A", {"": {"epochs": "1"}, "zlib": {"samples": "2"}}, fields)
    with pytest.raises(AuditError, match="unknown option in -A: 'epoch'; did you mean 'epochs'"):
        refuse_unused_options("-A", {"": {"epoch": "1"}}, fields)
    with pytest.raises(
        AuditError, match=r"-A perplexity\.… names a plug-in that this run does not use"
    ):
        refuse_unused_options("-A", {"perplexity": {"samples": "1"}}, fields)


@dataclasses.dataclass(frozen=True)
class Mine(Attack):
    """An attack with one option of each kind."""

    name = "mine"
    samples: int = 1
    rate: float = 1.0
    fast: bool = False
    folder: str = ""


def built(**options: Any) -> Mine:
    attack = build_plugin("attack", {"mine": Mine}, "mine", options)
    assert isinstance(attack, Mine)
    return attack


def test_values_become_what_the_option_is() -> None:
    assert built(samples="3", rate="1e-3", fast="True", folder="7") == Mine(3, 1e-3, True, "7")
    assert built(samples=3, rate=1, fast=True) == Mine(3, 1.0, True)
    assert type(built(rate=1).rate) is float


@pytest.mark.parametrize(
    "options",
    [
        {"samples": "3.0"},
        {"samples": "many"},
        {"samples": ""},
        {"rate": "fast"},
        {"fast": "1"},
        {"fast": "yes"},
        {"samples": 2.7},  # from TOML: a number cut to another is a number guessed at
        {"samples": True},
        {"rate": True},
        {"folder": 7},
    ],
    ids=str,
)
def test_no_value_is_guessed_at(options: dict[str, Any]) -> None:
    with pytest.raises(AuditError, match=r"expected mine\."):
        built(**options)


def test_names_and_options_nobody_has() -> None:
    with pytest.raises(AuditError, match="unknown attack 'mime'; did you mean 'mine'"):
        build_plugin("attack", {"mine": Mine}, "mime", {})
    with pytest.raises(AuditError, match="unknown attack 'xyzzy'; known: mine"):
        build_plugin("attack", {"mine": Mine}, "xyzzy", {})
    with pytest.raises(
        AuditError, match="unknown option of attack mine: 'sample'; did you mean 'samples'"
    ):
        built(sample=3)


def test_auto_is_the_default_of_a_count_and_a_value_of_its_own_elsewhere() -> None:
    held = {"batch_size": 4, "device": "cuda", "prefix_token": "bos"}
    flags = {
        "batch_size": "auto",
        "device": "auto",
        "prefix_token": "auto",
        "model": "m",
        "data": "d",
    }
    made = make_plan(held, flags)
    assert (made.batch_size, made.loading.device, made.data.prefix_token) == (
        None,
        "auto",
        "auto",
    )
