"""What a check asks, and how: the most copied records first, until the time is up, each text read
once."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from auditor.attacks.likelihood_ranking import PerplexityRanking
from auditor.conclusions.outcomes import read_secret_values
from auditor.core.nouns import Secret
from auditor.core.plan import Plan
from auditor.core.result import AuditResult
from auditor.models import huggingface, self_check
from auditor.models.huggingface import HuggingFaceModel, traffic
from auditor.plugins import registry
from auditor.plugins.benchmark import Benchmark
from auditor.records.folder import RunFolder
from auditor.reports import coverage
from auditor.runs import asking, personal_data, quick_check
from auditor.runs.asking import TimeLimit
from auditor.runs.reporter import Reporter
from auditor.runs.run import plan_audit, run_audit
from auditor.runs.site import Site
from auditor.runs.sweep_cache import SweepCache
from tests.conftest import save_tiny

MEMBERS, OTHERS = 30, 20
COPIED = 3  # of the members, in four copies
# tokens that are read of a record: the last is not
TEXT, SUFFIX = (
    len("ward 0 bed 00 code 000") - 1,
    len("code 000"),
)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quick")
    save_tiny(folder / "model")
    for name, first, count in (("private", 0, MEMBERS), ("fresh", 100, OTHERS)):
        codes = (
            f"ward {i % 7} bed {i * 37 % 97:02d} code {i * 7919 % 997:03d}"
            for i in range(first, first + count)
        )
        rows = [json.dumps({"prefix": text[:14], "suffix": text[14:]}) + "\n" for text in codes]
        copies = rows[5 : 5 + COPIED] * 3 if name == "private" else []
        (folder / f"{name}.jsonl").write_text("".join([*rows, *copies]))
    return folder


def planned(
    given: Path, nonmembers: bool = True, shared: SweepCache | None = None
) -> tuple[Plan, quick_check.Limits]:
    fresh = str(given / "fresh.jsonl") if nonmembers else None
    plan = quick_check.build_quick_plan(
        model=str(given / "model"), data=str(given / "private.jsonl"), nonmembers=fresh
    )
    # so that no copied record is set aside
    plan = plan.with_fields(known_fraction=0.0)
    return quick_check.prepare_check(plan, Reporter(), shared or SweepCache())


Numbers = dict[tuple[str, str], dict[str, float]]


def checked(
    plan: Plan, folder: RunFolder, seconds: float = 1e6, shared: SweepCache | None = None
) -> tuple[AuditResult, list[AuditResult]]:
    """The last result, and those that were published before it."""
    meanwhile = list[AuditResult]()
    limit = TimeLimit(time.perf_counter(), seconds)
    site = Site(plan, shared=shared or SweepCache())
    quick_check.enable_hidden_state_caches(site)
    planned = plan_audit(site)
    return run_audit(planned, folder, limit=limit, publish=meanwhile.append), meanwhile


def numbers_of_each_record(folder: Path) -> Numbers:
    """By cell and quantity, the number of each record."""
    rows = read_secret_values(folder)
    return {
        (str(cell), name): dict(zip(row.ids, values.tolist(), strict=True))
        for cell, row in rows.items()
        for name, values in row.values.items()
        if name != "conformal_extracted"
    }


def assert_same_numbers(one: Numbers, other: Numbers) -> None:
    assert one.keys() == other.keys() and len(one) > 5
    for key, values in one.items():
        assert values == pytest.approx(other[key], abs=1e-5, rel=1e-5, nan_ok=True), key


def stopped_after(monkeypatch: pytest.MonkeyPatch, seconds: Iterable[float]) -> None:
    """The time that is left at each look at the clock."""
    left = iter(seconds)
    monkeypatch.setattr(TimeLimit, "seconds_left", lambda self: next(left, -1.0))


def leave_self_check_uncounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks as much of few as of many."""
    check = self_check.configure_serving

    def uncounted(model: HuggingFaceModel, *of: Any, **more: Any) -> tuple[str, ...]:
        before = traffic.tokens
        notes = check(model, *of, **more)
        traffic.tokens = before
        return notes

    monkeypatch.setattr(self_check, "configure_serving", uncounted)


def test_a_check_without_time_still_asks_the_most_copied_record(
    given: Path, tmp_path: Path
) -> None:
    plan, _ = planned(given)
    result, _ = checked(
        plan, RunFolder.create(tmp_path / "run", "quick", plan.to_json()), seconds=0.0
    )
    assert result.benchmark.members == 1 == result.benchmark.nonmembers
    counts = result.benchmark.records["members"]
    assert counts.audited == 1 and counts.not_attacked[asking.NO_TIME] == MEMBERS - 1
    row = next(finding for finding in result.findings if finding.strata)
    assert [(s.copies, s.population, s.extracted.n) for s in row.strata] == [
        (4, COPIED, 1),
        (1, 27, 0),
    ]
    assert coverage.describe_asked_records(result) == (
        "1 of 30 records were asked: 1 of the 3 that occur more than once, none of the 27 others."
    )


def test_personal_data_are_looked_for_after_the_first_records_and_only_in_those_asked(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the suffixes of all records were read before the first record was asked."""
    sizes, find = list[int](), personal_data.find_personal_data

    def counted(
        benchmark: Benchmark, regions: Sequence[str] = ()
    ) -> personal_data.PersonalDataOfSecrets:
        sizes.append(len(benchmark.secrets))
        return replace(find(benchmark, regions), notes=("looked for",))

    monkeypatch.setattr(personal_data, "find_personal_data", counted)
    monkeypatch.setattr(asking, "MOST", 2)
    plan, _ = planned(given)
    result, meanwhile = checked(plan, RunFolder.create(tmp_path / "run", "quick", plan.to_json()))
    assert sizes[0] == 2 * asking.MOST and sizes[-1] > sizes[0]
    assert all(one.benchmark.notes.count("looked for") == 1 for one in (*meanwhile, result))


def test_numbers_depend_neither_on_batches_nor_on_sessions(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = planned(given)
    whole, meanwhile = checked(plan, RunFolder.create(tmp_path / "whole", "quick", plan.to_json()))
    assert (
        whole.benchmark.members == MEMBERS and not whole.benchmark.records["members"].not_attacked
    )
    assert not meanwhile  # all in one batch
    with monkeypatch.context() as patch:
        patch.setattr(asking, "MOST", 7)
        small = RunFolder.create(tmp_path / "small", "quick", plan.to_json())
        meanwhile = checked(plan, small)[1]
    assert [one.benchmark.members for one in meanwhile] == [7, 14, 28]
    first = RunFolder.create(tmp_path / "twice", "quick", plan.to_json())
    part, _ = checked(plan, first, seconds=0.0)
    first.close()
    resumed, _ = checked(plan, RunFolder.reopen(tmp_path / "twice"))
    assert part.benchmark.members < resumed.benchmark.members == MEMBERS
    expected = numbers_of_each_record(tmp_path / "whole")
    assert_same_numbers(numbers_of_each_record(tmp_path / "small"), expected)
    assert_same_numbers(numbers_of_each_record(tmp_path / "twice"), expected)
    assert resumed.benchmark.greedy_recall == whole.benchmark.greedy_recall
    ours, theirs = ([m for f in one.findings for m in f.measurements] for one in (resumed, whole))
    assert [m.value for m in ours] == pytest.approx(
        [m.value for m in theirs], abs=1e-4, rel=1e-4, nan_ok=True
    )
    assert resumed.targets[0].perplexity == whole.targets[0].perplexity


def test_a_check_that_goes_on_reads_nobody_again(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = SweepCache()
    plan, _ = planned(given, shared=shared)
    leave_self_check_uncounted(monkeypatch)
    folder = RunFolder.create(tmp_path / "run", "quick", plan.to_json())
    checked(plan, folder, seconds=0.0, shared=shared)
    folder.close()
    before = traffic.tokens
    checked(plan, RunFolder.reopen(tmp_path / "run"), shared=SweepCache())
    asked = MEMBERS + OTHERS - 2
    assert traffic.tokens - before == pytest.approx(asked * (TEXT + SUFFIX - 1), rel=0.1)


@pytest.mark.parametrize("nonmembers", [True, False])
def test_each_record_is_read_once_and_completed_once(
    given: Path, tmp_path: Path, nonmembers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = SweepCache()
    plan, _ = planned(given, nonmembers=nonmembers, shared=shared)
    leave_self_check_uncounted(monkeypatch)
    before = traffic.tokens
    checked(plan, RunFolder.create(tmp_path / "run", "quick", plan.to_json()), shared=shared)
    # what was read is not read again for it
    completed = (MEMBERS + nonmembers * OTHERS) * (TEXT + SUFFIX - 1)
    assert traffic.tokens - before == pytest.approx(completed, rel=0.1)


def test_a_run_reads_each_record_once(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = planned(given)
    plan = plan.with_fields(
        attack=("membership", "extraction-probability"),
        attack_options={"membership": {"lowercase": False, "score": "min_k_plus"}},
        setting="white-box",
    )
    leave_self_check_uncounted(monkeypatch)

    def run_audit_again(name: str) -> tuple[int, Numbers]:
        before = traffic.tokens
        folder = RunFolder.create(tmp_path / name, "quick", plan.to_json())
        run_audit(plan_audit(Site(plan)), folder)
        return traffic.tokens - before, numbers_of_each_record(tmp_path / name)

    n_tokens, numbers = run_audit_again("once")
    assert n_tokens <= (MEMBERS + OTHERS) * (TEXT + SUFFIX - 1)  # less what all texts begin with
    monkeypatch.setattr(huggingface, "_WEIGHTS_PER_STATES", 1e9)
    monkeypatch.setattr(huggingface, "_LEAST_BYTES", 0)
    n_without_room, plain = run_audit_again("without room")
    assert n_without_room > 2 * n_tokens
    assert_same_numbers(numbers, plain)


def test_it_stops_when_the_next_records_would_take_longer_than_is_left(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = planned(given)
    monkeypatch.setattr(asking, "MOST", 7)
    stopped_after(monkeypatch, [150.0] * 7)
    folder = RunFolder.create(tmp_path / "run", "quick", plan.to_json())
    result, meanwhile = checked(plan, folder, seconds=200.0)
    assert asking.MOST < result.benchmark.members < MEMBERS and meanwhile
    kept = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"guesses.jsonl", "observations.jsonl", "secrets.parquet"} <= kept


def test_a_part_is_as_large_as_can_be_read_and_completed_in_the_time_that_is_left() -> None:
    pace = asking.Pace()
    assert pace.count_fitting(5, 0, -1.0) == 5  # nothing is known yet: at least one part is asked
    # 10 s to read one, perhaps 3 s to complete each, and 30 s more
    pace.reading = 10.0
    assert pace.count_fitting(9, 2, 36.0 + 53.0) == 4 and pace.count_fitting(9, 2, 36.0) == 0
    # 1 s for each of the 2 records, and 10 s more
    pace = asking.Pace(reading=2.0, completing=12.0, n_completed=2)
    # 4 more records on top of 6: 4 x 2 s to read, 10 + 10 s to complete all.
    assert pace.count_fitting(9, 6, 28.0) == 4
    assert pace.count_fitting(3, 6, 28.0) == 3
    assert pace.count_fitting(9, 6, 16.0) == 0


def test_the_first_number_is_said_before_any_record_is_completed(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = planned(given)
    folder = RunFolder.create(tmp_path / "run", "quick", plan.to_json())
    said = list[str]()

    def announce(self: Reporter, text: str) -> None:
        assert not (tmp_path / "run" / "guesses.jsonl").exists()
        said.append(text)

    monkeypatch.setattr(Reporter, "announce", announce)
    checked(plan, folder, seconds=0.0)
    assert said == ["first number: 0 of the first 1 record recited word for word"]


def test_numbers_of_the_first_batch_are_told_as_its_records_are_read(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = planned(given)
    monkeypatch.setattr(asking, "_PART_SECONDS", 0.0)  # one record a part
    said = list[str]()
    monkeypatch.setattr(Reporter, "announce", lambda self, text: said.append(text))
    checked(plan, RunFolder.create(tmp_path / "run", "quick", plan.to_json()))
    assert [text.partition(" recited")[0] for text in said] == [
        "first number: 0 of the first 2 records",
        *(f"so far: 0 of the first {count} records" for count in (4, 8, 16)),
    ]


def test_only_one_number_is_called_the_first(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of a large vocabulary fit in memory for one record at a time."""
    plan, _ = planned(given)
    monkeypatch.setattr(asking, "_PART_SECONDS", 0.0)
    monkeypatch.setattr(asking, "_LOGIT_BYTES", 0)
    announced = list[str]()
    monkeypatch.setattr(Reporter, "announce", lambda self, text: announced.append(text))
    checked(plan, RunFolder.create(tmp_path / "run", "quick", plan.to_json()))
    assert [text.partition(" of the first")[0] for text in announced[:3]] == [
        "first number: 0",
        "so far: 0",
        "so far: 0",
    ]


@pytest.mark.parametrize(("document", "extent"), [(None, ""), ("row-0", ", at least in part")])
def test_the_first_number_says_if_records_have_several_parts(
    document: str | None, extent: str
) -> None:
    announced = list[str]()
    secrets = [Secret("row-0-1", (1,), (2,), document=document)]
    reporter = SimpleNamespace(announce=announced.append)
    target_run: Any = SimpleNamespace(
        target=SimpleNamespace(secrets=secrets),
        audit=SimpleNamespace(site=SimpleNamespace(reporter=reporter)),
    )
    asking._announce_recited_records(target_run, {"row-0": True}, 0)
    ending = f"1 of the first 1 record recited word for word{extent}"
    assert announced == [f"first number: {ending}"]


def test_before_its_first_result_a_check_keeps_time_for_numbers_and_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stopped_after(monkeypatch, [112.0, 60.0])
    limit = TimeLimit(0.0, 120.0)
    assert limit.estimate_reserve() == pytest.approx(4.0)  # half of the 8 s until the first record
    assert limit.estimate_reserve() == pytest.approx(12.0)


def test_progress_counts_the_records_of_its_own_batch(
    given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = planned(given)
    monkeypatch.setattr(asking, "MOST", 7)
    steps = list[tuple[int, int]]()
    monkeypatch.setattr(
        Reporter, "progress", lambda self, what, done, total: steps.append((done, total))
    )
    checked(plan, RunFolder.create(tmp_path / "run", "quick", plan.to_json()))
    assert len(steps) > 5 and all(0 < done <= total for done, total in steps)


def test_a_plug_in_says_itself_that_a_check_uses_it(
    given: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(PerplexityRanking):
        name = "mine"
        quick: ClassVar[Mapping[str, Any]] = {"samples": 2}
        least_nonmembers: ClassVar[int] = OTHERS + 1

    known = registry.list_methods()
    monkeypatch.setattr(registry, "list_methods", lambda: {**known, "mine": Mine})
    asked = quick_check.build_quick_plan(
        model=str(given / "model"),
        data=str(given / "private.jsonl"),
        nonmembers=str(given / "fresh.jsonl"),
        seed=0,
    )
    assert asked.attacks.attack[-1] == "mine" and asked.attacks.attack_options["mine"] == {
        "samples": 2
    }
    plan, limits = planned(given)
    assert plan.attacks.attack == ("perplexity", "extraction-probability", "membership")
    assert limits == (
        f"Mine takes {OTHERS + 1} members and {OTHERS + 1} non-members, got 30 and {OTHERS}.",
    )
    Mine.least_nonmembers = OTHERS
    assert planned(given)[0].attacks.attack[-1] == "mine"


def test_a_deep_check_is_the_usual_audit_of_the_same_records(given: Path) -> None:
    shallow = quick_check.build_quick_plan(
        model=str(given / "model"),
        data=str(given / "private.jsonl"),
        nonmembers=str(given / "fresh.jsonl"),
        seed=7,
    )
    plan = quick_check.build_slow_plan(shallow)
    methods = plan_audit(Site(plan)).selection.methods_by_name
    assert "ethicist" in methods and {
        "membership",
        "extraction-probability",
        "near-verbatim",
    } <= set(methods)
    assert methods["ethicist"].samples > 1  # type: ignore[union-attr]
    changed = {
        name
        for name, value in plan.map_field_values().items()
        if value != shallow.map_field_values()[name]
    }
    assert changed == {
        "attack",
        "attack_options",
        "setting",
        "known_fraction",
        "known_limit",
        "limit",
    }
    usual = quick_check.Plan().map_field_values()
    assert all(
        plan.map_field_values()[name] == usual[name]
        for name in ("setting", "known_fraction", "known_limit", "limit")
    )


def test_personal_data_are_ranked_if_there_are_no_nonmembers_and_records_hold_some(
    given: Path, tmp_path: Path
) -> None:
    def asked(data: Path, nonmembers: bool) -> tuple[tuple[str, ...], quick_check.Limits]:
        fresh = str(given / "fresh.jsonl") if nonmembers else None
        plan = quick_check.build_quick_plan(
            model=str(given / "model"), data=str(data), nonmembers=fresh
        )
        plan, limits = quick_check.prepare_check(plan, Reporter(), SweepCache())
        return plan.attacks.attack, limits

    marked = tmp_path / "marked.jsonl"
    rows = [json.loads(line) for line in (given / "private.jsonl").read_text().splitlines()]
    for row in rows:
        row["suffix"] += "11"
        row["pii"] = {"code": [row["suffix"][-5:]]}
    marked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    without = "Without --nonmembers, records like these that it never saw, membership is "
    attacks, limits = asked(marked, nonmembers=False)
    assert "identifiers" in attacks
    # Their ranks are evidence of membership: the limits do not say that there is none.
    assert limits == (f"{without}tested only by identifiers (rank among fresh values).",)
    attacks, limits = asked(marked, nonmembers=True)
    assert "identifiers" not in attacks and not limits
    attacks, limits = asked(given / "private.jsonl", nonmembers=False)
    assert "identifiers" not in attacks and limits == (f"{without}not tested.",)
