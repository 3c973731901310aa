"""What a run would take, from a little of what it asks: held against the run itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from auditor.core.errors import AuditError
from auditor.core.nouns import Secret
from auditor.core.plan import Plan
from auditor.core.secret_table import build_secret_table
from auditor.models.huggingface import traffic
from auditor.privacy.gradient_canaries import write_gradient_canaries
from auditor.privacy.promises import write_privacy_record
from auditor.runs import estimate, machine
from auditor.runs.estimate import CostEstimate, RunPartCost, build_run_cost_table
from auditor.runs.reporter import Reporter
from auditor.testing import _PROMISE, KEPT
from tests.conftest import check_command, save_tiny

Said = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with records of one shape."""
    folder = tmp_path_factory.mktemp("estimate")
    save_tiny(folder / "model")
    for name, first in (("private", 0), ("fresh", 40)):
        rows = [
            (f"ward {i % 7} bed {i * 37 % 97:02d} code", f" {i * 7919 % 997:03d}")
            for i in range(first, first + 30)
        ]
        lines = [json.dumps({"prefix": prefix, "suffix": suffix}) + "\n" for prefix, suffix in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def words(given: Path, *more: str) -> list[str]:
    flags = {"--model": "model", "--data": "private.jsonl", "--nonmembers": "fresh.jsonl"}
    return [
        "run",
        *(word for flag, name in flags.items() for word in (flag, str(given / name))),
        *more,
    ]


def plan(given: Path, **more: Any) -> Plan:
    files = {"model": "model", "data": "private.jsonl", "nonmembers": "fresh.jsonl"}
    return Plan.from_fields(**{name: str(given / file) for name, file in files.items()}, **more)


def part(found: CostEstimate, name: str) -> RunPartCost:
    return next(cost for cost in found.costs if cost.name == name)


# --- from a little to the whole ---


class Ticks:
    """A clock that moves when something is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ticks]:
    made = Ticks()
    monkeypatch.setattr(estimate, "time", made)
    monkeypatch.setattr(machine, "reset_peak_memory", lambda: None)
    yield made


class Free(estimate._RunPartTimer):
    """Asks parts of no scene."""

    def __init__(self, seconds: float, left: int) -> None:
        self.end, self.left, self.costs, self.held = seconds, left, [], 1000
        self.device = None  # type: ignore[assignment]


def measure_estimate(
    ticks: Ticks,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    of: int,
    at_once: int = 10,
    others: int = 0,
    **more: Any,
) -> RunPartCost:
    """A part of which a batch takes half a second and each text a tenth, in `seconds`; 50 bytes a
    text."""
    peak = [0.0]
    monkeypatch.setattr(machine, "measure_peak_memory", lambda device: peak[0] / 1e6)

    def work(n: int) -> None:
        texts = min(n, of)
        ticks.now += 0.5 * -(-texts // at_once) + 0.1 * texts
        traffic.rows += 3 * texts
        traffic.tokens += 12 * texts
        peak[0] = 1000 + 50 * min(texts, at_once)

    asker = Free(seconds, 1 + others)
    asker.time_parts_within_share([RunPartCost("part", of, at_once=at_once, work=work, **more)])
    (cost,) = asker.costs
    return cost


def test_costs_are_worked_out_of_what_a_batch_and_what_a_text_takes(
    ticks: Ticks, monkeypatch: Any
) -> None:
    cost = measure_estimate(ticks, monkeypatch, 2.4, 1000)
    assert (cost.n_timed, cost.n_texts) == (3, 1000)
    assert (cost.rows, cost.tokens) == (3000, 12000)
    assert cost.seconds == pytest.approx(0.5 * 100 + 0.1 * 1000)
    assert cost.memory == pytest.approx(1000 + 50 * 10)


def test_a_part_with_little_time_is_asked_twice_all_the_same(
    ticks: Ticks, monkeypatch: Any
) -> None:
    """One attempt does not tell what a batch costs from what a text does: it would make 36 seconds
    of these 9."""
    cost = measure_estimate(ticks, monkeypatch, 20.0, 60, others=100)
    assert cost.n_timed == 2
    assert cost.seconds == pytest.approx(0.5 * 6 + 0.1 * 60)


def test_what_was_done_whole_is_told_as_it_was(ticks: Ticks, monkeypatch: Any) -> None:
    cost = measure_estimate(ticks, monkeypatch, 60.0, 13)
    assert cost.n_timed == 13
    assert cost.seconds == pytest.approx(0.5 * 2 + 0.1 * 13)


def test_a_rehearsal_is_counted_as_often_as_it_would_be_done(
    ticks: Ticks, monkeypatch: Any
) -> None:
    once, often = (
        measure_estimate(ticks, monkeypatch, 1e3, 8, times=times) for times in (1.0, 20.0)
    )
    assert (often.seconds, often.rows) == pytest.approx((20 * once.seconds, 20 * once.rows))
    assert often.memory == once.memory


def test_the_time_is_kept_and_what_was_not_asked_is_not_a_zero(
    ticks: Ticks, monkeypatch: Any
) -> None:
    assert measure_estimate(ticks, monkeypatch, 3.0, 10**6).n_timed and ticks.now <= 3.0
    late = measure_estimate(ticks, monkeypatch, 0.0, 5)
    assert late.reason == "not asked: the 30 seconds were over" and late.seconds != late.seconds
    found = CostEstimate((late,), (("x", 2.0),), 30.0, 1000)
    assert found.parts_without_estimate == (late,) and found.seconds == 2.0
    note = build_run_cost_table(found).note
    assert note.startswith("at least 2.0 s") and "; not timed: 1 part of the run" in note
    # of parts without a time nobody knows what would shorten them
    assert "half as long" not in note


def test_it_says_how_many_non_members_a_rate_of_false_positives_takes() -> None:
    takes = "99 for 1% (390 to bound it), 999 for 0.1% (3,911 to bound it), there are 100"
    said = [
        build_run_cost_table(
            CostEstimate((), (("x", 2.0),), 30.0, 1000, (300, 100), rates=rates)
        ).note
        for rates in (True, False)
    ]
    assert takes in said[0] and "non-members" not in said[1]


def cost(name: str, of: int, seconds: float, *cut: str) -> RunPartCost:
    return RunPartCost(name, of, of, seconds=seconds, cut=cut)


def test_it_says_which_flag_would_halve_it() -> None:
    """300 members and 100 others: 10 s of loading, 100 s of sampling, 40 s of a probe, 10 s of
    held-out text."""
    sampling = cost("perplexity", 400, 100.0, "--limit", "--samples")
    parts = (sampling, cost("membership", 400, 40.0, "--limit"), cost("held-out", 100, 10.0))
    found = CostEstimate(parts, (("x", 10.0),), 30.0, 1000, (300, 100), 20)
    assert found.seconds == 160
    # 20 s stay, so 140 s of 400 secrets have to become 60 s of 171: 85 members and 85 others.
    # 100 s of 20 samples become 20 s of 4
    assert found.flags_that_halve_time == (
        "--limit 85",
        "--samples 4",
    )
    assert build_run_cost_table(found).note.endswith(
        "; --limit 85 or --samples 4 would take half as long"
    )
    # Behind an ensemble 60 are asked: a limit above that does not make it shorter.
    few = CostEstimate((cost("perplexity", 60, 100.0, "--limit"),), (), 30.0, 1000, (300, 100))
    assert few.flags_that_halve_time == ("--limit 15",)


def test_the_rows_add_up_to_the_total() -> None:
    """Reading half a million rows was most of an estimate, and in none of its rows."""
    parts = (
        cost("perplexity", 400, 90.0),
        RunPartCost("membership", 400, reason="not asked: the 30 seconds were over"),
    )
    found = CostEstimate(
        parts, (("loading the model", 2.0), ("reading and cutting the rows", 326.0)), 30.0, 1000
    )
    table = build_run_cost_table(found)
    assert [(row[0], row[-1]) for row in table.rows] == [
        ("loading the model", "2.0 s"),
        ("reading and cutting the rows", "5 min 26 s"),
        ("perplexity", "1 min 30 s"),
        ("membership", ""),
        ("computing the numbers and writing the reports", ""),
    ]
    # What is in no row is not in the total either, and is said to be so.
    assert table.rows[-1][1] == "after that, not timed"
    assert found.seconds == 418.0 and table.note.startswith(
        "at least 6 min 58 s until the last record is asked"
    )


def test_where_no_flag_halves_it_that_is_said() -> None:
    for parts in (
        (cost("tuning", 50, 100.0),),
        (cost("tuning", 50, 100.0), cost("it", 40, 50.0, "--limit", "--samples")),
    ):
        found = CostEstimate(parts, (("x", 5.0),), 30.0, 1000, (40, 0), 10)
        assert found.flags_that_halve_time == ()
        assert build_run_cost_table(found).note.endswith(
            "no smaller --limit or --samples would take half as long"
        )


# --- against the run ---

OPTIONS: dict[str, Any] = {
    "attack": ("ethicist", "perplexity", "extraction-probability"),
    "attack_options": {"": {"samples": 5}, "ethicist": {"prompt_length": 2, "epochs": 3}},
    "setting": "white-box",
}


def test_rows_and_tokens_are_those_of_the_run(given: Path, tmp_path: Path) -> None:
    """With time for all of it, an estimate counts what the run asks, but for what the run tunes
    further."""
    found = estimate.estimate_run_cost(plan(given, **OPTIONS), Reporter(), 1e6)
    own = [
        "-A",
        "samples=5",
        "-A",
        "ethicist.prompt_length=2",
        "-A",
        "ethicist.epochs=3",
        "--setting",
        "white-box",
    ]
    attacks = [word for name in OPTIONS["attack"] for word in ("--attack", name)]
    check_command(*words(given), *own, *attacks, "-o", tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    rows = {f["attack"]: f["rows"] for f in result["findings"]}
    assert part(found, f"{given.name}/model: perplexity (white-box)").rows == rows["perplexity"]
    assert not found.parts_without_estimate
    # Greedy recall stores the members' scores.
    assert part(found, f"tokens of the secrets under {given.name}/model").n_texts == 30
    tuning = part(found, f"{given.name}/model: ethicist (white-box), tuning")
    assert tuning.n_texts == tuning.n_timed == result["benchmark"]["known"]
    uncounted = {"choosing a prefix token"}
    names = {cost.name for cost in found.costs if not cost.name.endswith("tuning")} - uncounted
    told = {
        name for name in result["timings"] if name != "prepare" and not name.startswith("build ")
    }
    assert names == told
    assert found.estimated_peak_memory_bytes > 0 and found.seconds > 0
    assert part(found, f"{given.name}/model: perplexity (white-box)").cut == (
        "--limit",
        "--samples",
    )
    assert part(found, f"{given.name}/model: extraction-probability (white-box)").cut == (
        "--limit",
    )
    assert (
        found.samples == 5
        and sum(found.secrets)
        == part(found, f"{given.name}/model: extraction-probability (white-box)").n_texts
    )


def save_wide(folder: Path, seed: int) -> str:
    """A model whose states of the texts fit into half of the memory of its weights."""
    save_tiny(folder)
    config = AutoConfig.from_pretrained(folder)
    config.hidden_size = 64
    config.intermediate_size = 256
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def test_texts_that_several_measures_read_are_counted_once(given: Path, tmp_path: Path) -> None:
    """As in the run, where each part alone would read them again: 1.5 times the tokens."""
    model, base = save_wide(tmp_path / "model", 1), save_wide(tmp_path / "base", 2)
    attacks = ("membership", "extraction-probability", "perplexity")
    options = {"attack": attacks, "attack_options": {"": {"samples": 5}}, "setting": "white-box"}
    planned = plan(given, **options).with_fields(model=model, reference=base)
    found = estimate.estimate_run_cost(planned, Reporter(), 1e6)
    before = traffic.tokens
    flags = ["--model", model, "--reference", base, "-A", "samples=5", "--setting", "white-box"]
    for name in attacks:
        flags += ["--attack", name]
    check_command(*words(given)[:1], *words(given)[3:], *flags, "-o", tmp_path / "run")
    tokens = sum(cost.tokens for cost in found.costs)
    assert 0.8 < tokens / (traffic.tokens - before) < 1.2


def test_a_decoding_with_one_answer_is_counted_once(given: Path) -> None:
    greedy = {
        "attack": ("perplexity",),
        "attack_options": {"": {"temperature": 0.0}},
        "setting": "white-box",
    }
    found = estimate.estimate_run_cost(plan(given, **greedy), Reporter(), 1e6)
    own = part(found, f"{given.name}/model: perplexity (white-box)")
    n_secrets, suffix = sum(found.secrets), len(" 100")
    assert own.rows == n_secrets * suffix and own.cut == ("--limit",)
    assert found.samples is None and not any(
        "--samples" in flag for flag in found.flags_that_halve_time
    )
    both = {**greedy, "attack": ("perplexity", "zlib"), "attack_options": {"zlib": {"samples": 4}}}
    both["attack_options"]["perplexity"] = {"temperature": 0.0}
    assert estimate.estimate_run_cost(plan(given, **both), Reporter(), 1e6).samples == 4


def test_an_audit_of_a_claim_says_what_it_could_show(given: Path, tmp_path: Path) -> None:
    """Before it runs: of the claimed epsilon, by the claim's own noise."""
    audited = shutil.copytree(given / "model", tmp_path / "audited")
    write_privacy_record(audited, _PROMISE)
    write_gradient_canaries(audited, KEPT)
    files = {"model": str(audited), "data": str(given / "private.jsonl")}
    planned = Plan.from_fields(**files, attack=("gradient-audit",))
    (ceiling,) = estimate.estimate_run_cost(planned, Reporter(), 1e6).ceilings
    assert ceiling.startswith(
        f"gradient-audit of {tmp_path.name}/audited: of the claimed ε 3 this audit could show at "
        "most about 0.00"
    )
    found = CostEstimate((), (("x", 2.0),), 30.0, 1000, ceilings=(ceiling,))
    assert build_run_cost_table(found).note.endswith(f"half as long; {ceiling}")


def test_the_command_shows_a_table_and_writes_nothing(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    check_command(*words(given, "--attack", "perplexity", "--samples", "3", "--estimate"))
    said = capsys.readouterr().out
    assert "starting and imports" in said
    assert (
        "forward rows" in said
        and f"{given.name}/model: perplexity (white-box)" in said
        and "about" in said
    )
    assert "would take half as long" in " ".join(said.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--estimate", "-o", "x"), "--estimate runs and writes nothing: give no --out with it"),
        (
            ("--estimate", "--reveal"),
            "--estimate runs and writes nothing: give no --reveal with it",
        ),
        (
            ("--estimate", "--submission", "x.csv"),
            "--estimate runs and writes nothing: give no --submission with it",
        ),
        (("--estimate", "--seeds", "0-1"), "--estimate takes a single run, got a grid of runs"),
    ],
)
def test_what_an_estimate_would_ignore_is_refused(
    given: Path, more: tuple[str, ...], said: str, capsys: Said
) -> None:
    check_command(*words(given, *more), code=2)
    assert said in capsys.readouterr().err


def test_there_is_no_estimate_of_resumed_remote_unbuilt_and_refused_runs(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    check_command("run", "--resume", "runs/latest", "--estimate", code=2)
    assert "--estimate runs and writes nothing: give no --resume with it" in capsys.readouterr().err
    remote = Plan.from_fields(
        model="openai:m", base_url="http://127.0.0.1:1/v1", data="x.jsonl", attack=("perplexity",)
    )
    with pytest.raises(
        AuditError, match="expected a model that is loaded here with --estimate, got openai:m"
    ):
        estimate.estimate_run_cost(remote, Reporter())
    with pytest.raises(
        AuditError, match="--attack exposure cannot run: the data contain no canaries"
    ):
        estimate.estimate_run_cost(plan(given, attack=("exposure",)), Reporter())
    with pytest.raises(AuditError, match=r"expected the lab's \w+ in .*: run the audit once"):
        estimate.estimate_run_cost(Plan(), Reporter())


def test_the_windows_of_a_text_are_drawn_together() -> None:
    windows = []
    for text in range(5):
        for end in range(2, 8):
            tokens = tuple(range(text, text + end))
            windows.append(Secret(f"{text} {end}", tokens, (9,)))
    lone = [Secret(f"lone {i}", (i,), (9,)) for i in range(40, 50)]
    # The second window of a text starts with the first, suffix and all.
    nested = [Secret(w.id, (9, *w.prefix), ()) for w in windows]
    for items in (build_secret_table([*nested, *lone]), [*nested, *lone]):
        for n in (1, 3, 6, 20):
            drawn = estimate._draw_fixed_subset(items, n, "test")
            assert len(drawn) == n
            texts = [secret.id.split()[0] for secret in drawn if secret.id[0] != "l"]
            counts = sorted(texts.count(text) for text in {*texts})
            assert counts[1:] == [6] * (len(counts) - 1)  # at most one text in part
    empty = build_secret_table([Secret("a", (), ()), Secret("b", (), ()), *nested])
    assert len({*empty.text_numbers.tolist()}) == 2 + 5
