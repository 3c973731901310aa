"""Whatever is fed to a command that it cannot take is refused in one sentence, exit 2, with nothing written.

In process. What only a loaded model can refuse is in the tests of models; most of this is refused before there is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from auditor.cli import call

Said = pytest.CaptureFixture[str]


@pytest.fixture
def refuses(tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command that must be refused; returns its sentence. {t} in an argument is the test's own folder."""
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def asked(*arguments: str) -> str:
        before = sorted(path for path in tmp_path.rglob("*") if "cache" not in path.parts)
        capsys.readouterr()
        code = call([argument.replace("{t}", str(tmp_path)) for argument in arguments])
        told = capsys.readouterr()
        lines = [line for line in told.err.splitlines() if line.strip() and " s  " not in line]
        assert (code, len(lines), told.out) == (2, 1, ""), told.err[-2000:]
        assert lines[0].startswith("error: ") and "Traceback" not in told.err
        after = sorted(path for path in tmp_path.rglob("*") if "cache" not in path.parts)
        assert before == after
        return lines[0]

    return asked


# --- plans, policies --------------------------------------------------------------------------------------------------

PLANS = [
    *("attack = 'exact'\nseeds = [0, 1]", "attack = [1]", "attack = []", "attack = [['exact']]", "attack = {a = 1}"),
    *(
        "defense = 3",
        "attack_options = 5",
        "attack_options = {exact = 5}",
        "attack_options = {exact = {samples = nan}}",
    ),
    *("attack_options = [1]\nseeds = [0, 1]", "attack_options = {ethicist = {alpha = nan}}"),
    *("attack_options = {ethicist = {alpha = inf}}", "attack_options = {ethicist = {samples = [1]}}"),
    *("attack_options = {ethicist = {samples = 2.5}}", "attack_options = {ethicist = {samples = true}}"),
    *("attack_options = {ethicist = {tune_on = []}}", "attack_options = {ethicist = {tune_on = {}}}"),
    *("defense = ['pmixed']\ndefense_options = {pmixed = {epsilon = nan}}", "model = 5", "model = ['a']\ndata = 'b'"),
    *("seed = 'a'", "seed = 1.5", "seed = true", "seed = -1", "seeds = 5", "seeds = []", "seeds = ['a']"),
    *("seeds = [true]", "seeds = [-1, 0]", "seeds = [0, 0]", "seed = 0\nseeds = [1]", "limit = 0", "limit = '5'"),
    *("samples = nan", "samples = -1", "samples = 1000000000", "setting = 5", "setting = ['worst']", "plugin = 5"),
    *("plugin = 'mine.py'", "plugin = [5]", "plugin = ['\\u0000']", "batch_size = 0", "batch_size = 'auto'"),
    *("known_fraction = 'nan'", "lab_recipe = 5", "lab_recipe = {batch = -1}", "lab_recipe = {batch = 0}"),
    *("lab_recipe = {hidden = 0}", "lab_recipe = {heads = 0}", "lab_recipe = {heads = 3}", "lab_recipe = {x = 1}"),
    *("lab_recipe = {public_rate = nan}", "lab_recipe = {public_rate = 'inf'}", "lab_recipe = {canaries = 5}"),
    *("lab_recipe = {canaries = [['12', 1]]}", "lab_recipe = {canaries = [['123456', -1]]}"),
    *("lab_recipe = {canaries = [['123456', 100000000]]}", "lab_recipe = {batch = 1.5}", "lab_recipe = {batch = true}"),
    *("lab_recipe = {secrets_per_repeat = 100000000}", "lab_recipe = {layers = 100000000}", "lab_recipe = [1]"),
    *("sweep = 5", "[sweep]\nseed = [1, 2]", "[sweep]\n'lab_recipe.batch' = []", "[sweep]\n'lab_recipe.batch' = 5"),
    *("[sweep]\n'lab_recipe.batch' = [-1, 0]", "[sweep]\n'exact.x' = [1]", "[sweep]\nattack = [5, 6]"),
    *("[sweep]\nattack_options = [1, 2]", "[sweep]\n'.' = [1]", "[sweep]\n'ethicist.alpha' = [nan, 1.0]"),
    *("[sweep]\n'ethicist.samples' = [1, 'x']", "[sweep]\n'lab_recipe.batch' = [[1], [2]]", "variant = 5"),
    *("[[variant]]", "[[variant]]\nname = 5", "[[variant]]\nname = ['a']", "[[variant]]\nname = 'a'\nx = 1"),
    *("[[variant]]\nname = 'a'\n[[variant]]\nname = 'a'", "[[variant]]\nname = 'a'\nattack_options = 5"),
    *("[[variant]]\nname = 'a'\nattack = 5", "[[variant]]\nname = 'a'\nlab_recipe = 5", "= 1", "a = ", "x = 1"),
    *("device = 'cuda'", "model_args = {a = 1}", "canaries = 5", "sizes = 'huge'", "command = 5"),
    *(
        "lab_recipe = 5\n[sweep]\n'lab_recipe.batch' = [1, 2]",
        "attack_options = 5\n[sweep]\n'ethicist.alpha' = [1.0, 2.0]",
    ),
    *("attack_options = {ethicist = 5}\n[sweep]\n'ethicist.alpha' = [1.0, 2.0]", "attack = 5\nseeds = [1, 2]"),
    *("attack = [{a = 1}]\nseeds = [0, 1]", "defense = [[1]]\nseeds = [0, 1]", "plugin = {a = 1}\nseeds = [0, 1]"),
    *("seed = 99999999999999999999", "lab_recipe = {seed = -1}"),
]


@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_plans_that_ask_for_nothing_there_is(plan: str, tmp_path: Path, refuses: Any) -> None:
    (tmp_path / "plan.toml").write_text(plan)
    refuses("run", "--config", "{t}/plan.toml", "-o", "{t}/x")


POLICIES = [
    *(
        "rules = 5",
        "rules = [5]",
        "rules = []",
        "rules = ['']",
        "rules = ['recall <= nan']",
        "rules = [['recall <= 1']]",
    ),
    *("rule = 5", "rule = [5]", "[[rule]]", "[[rule]]\nmetric = 5\nmax = 1", "[[rule]]\nmetric = 'recall'"),
    *("[[rule]]\nmetric = 'recall'\nmax = 'x'", "[[rule]]\nmetric = 'recall'\nmax = [1]", "[[rule]]\nrule = 5"),
    *("[[rule]]\nmetric = 'recall'\nmax = 0.1\ncount = -1", "[[rule]]\nmetric = 'recall'\nmax = 0.1\ntarget = 5"),
    *("inconclusive = 5\nrules = ['recall <= 0.1']", "inconclusive = []\nrules = ['recall <= 0.1']", "x = 1"),
    *(f"rules = ['recall(count={'9' * 5000}) <= 0.1']", f"[[rule]]\nmetric = 'recall'\nmax = 1{'0' * 400}"),
]


@pytest.mark.parametrize("policy", POLICIES, ids=range(len(POLICIES)))
def test_policies_that_rule_nothing(policy: str, tmp_path: Path, refuses: Any) -> None:
    (tmp_path / "p.toml").write_text(policy)
    refuses("gate", "{t}", "--policy", "{t}/p.toml")


# --- options and sizes ------------------------------------------------------------------------------------------------

OPTIONS = [
    *(["run", "-A", f"alpha={v}"] for v in ("nan", "inf", "-inf", "", "x", "1e400", "True")),
    *(["run", "-A", f"samples={v}"] for v in ("nan", "0", "-1", "1e3", "100000000", "9" * 5000)),
    *(["run", "-A", v] for v in ("", "=", "=1", ".=1", "x.y=1", "alpha", "alphas=1", "ethicist.=1")),
    *(["run", "-d", "pmixed", "-D", f"{v}"] for v in ("epsilon=nan", "epsilon=0", "epsilon=-1", "delta=0", "q=nan")),
    *(
        ["run", "-d", "pmixed", "-D", f"{v}"]
        for v in ("delta=1", "delta=nan", "alpha=1", "alpha=0", "q=2", "queries=-1")
    ),
    *(["run", "--batch-size", v] for v in ("0", "-1", "²", "1.5", "9" * 5000)),
    *(["run", "--seeds", v] for v in ("", "-", "1-0", "0-999999999", "9" * 5000, "a", "0,,1", "0-9-9")),
    *(["run", "--sweep", v] for v in ("", "a", "=1", "seed=1,2", "lab_recipe.batch=1:2:1e-9", "lab_recipe.batch=-1,0")),
    ["run", "--sweep", "lab_recipe.batch=1:9999:1", "--seeds", "0-99"],
    *(["run", flag, "0"] for flag in ("--limit", "--samples", "--known-limit", "--prefix-length", "--suffix-length")),
    *(
        ["run", flag, "x"]
        for flag in ("--setting", "--attack", "--defense", "--seed", "--limit", "--plugin", "--config")
    ),
    *(["gate", "--plan", v] for v in ("", "recall", "recall=nan:1", "recall=0.2:0.1", "recall=0.1:0.1000001")),
    *(["gate", "--plan", "recall=0.1:0.2", "--power", v] for v in ("nan", "0", "1", "-1", "2")),
    *(["gate", "--plan", "recall=0.1:0.2", "--rules", v] for v in ("0", "-1", "9" * 400)),
    *(["gate", "{t}", "--max", v] for v in ("", "recall", "recall=", "recall=nan", "=1", "recall(count=x)=1")),
    *(
        ["canaries", "make", "-o", "{t}/m.json", "--counts", v]
        for v in ("", "0", "-1", "1,,2", "100000000", "9" * 5000)
    ),
    *(["canaries", "make", "-o", "{t}/m.json", "--each", v] for v in ("0", "-1", "100000000", "9" * 30, "x")),
    *(["canaries", "make", "-o", "{t}/m.json", "--controls", v] for v in ("-1", "100000000")),
    *(
        ["canaries", "make", "-o", "{t}/m.json", "--format", v]
        for v in (
            "",
            "{",
            "{}",
            "{a}",
            "{digits:0}",
            "{digits:1000000000}",
            "{digits!r:6}",
            "{digits:6:7}",
            "{words:٣}",
        )
    ),
    ["canaries", "make", "-o", "{t}/m.json", "--format", "{digits:900}" * 2],
    ["canaries", "make", "-o", "{t}/m.json", "--format", "{digits:1}"],
    ["utility", "--restarts", "0"],
    *(["utility", "--mask-share", v] for v in ("nan", "0", "1", "-1")),
    *(["utility", "--max-length", v] for v in ("0", "1", "-1")),
    *(["utility", flag, "x"] for flag in ("--kind", "--on", "--sweep", "--defense")),
    ["utility", "--reveal", "-1"],
    ["reproduce", "nobody"],
    ["reproduce", "ethicist", "--plan", "x"],
    ["reproduce", "ethicist", "--scale", "x"],
    ["reproduce", "ethicist", "--seeds", "x"],
]


@pytest.mark.parametrize("arguments", OPTIONS, ids=lambda words: " ".join(words)[:60])
def test_options_that_mean_nothing(arguments: list[str], refuses: Any) -> None:
    refuses(*arguments)
