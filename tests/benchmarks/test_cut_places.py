"""Where texts are cut: every length from 12 tokens on, long ones all along, and after what many
texts begin with."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from auditor.benchmarks.data.chat_rendering import NONE, ChatRendering
from auditor.benchmarks.data.cut_places import (
    BY_OWN_LENGTH,
    CutPlace,
    TextLengths,
    find_shared_beginnings,
)
from auditor.benchmarks.data.data_records import DataRecord, RecordSource
from auditor.benchmarks.data.nonmember_baseline import (
    ANSWER_OF_MEMBER,
    STANDS_IN_MEMBER,
    match_nonmember_lengths,
)
from auditor.benchmarks.data.splitting import SplitOptions, count_row_copies
from auditor.core.secret_table import SecretTable
from auditor.models.trained_length import TrainedLength
from tests.benchmarks.test_chat import CHATML
from tests.benchmarks.test_files import BYTES, build, codes, write
from tests.conftest import refuses

HEAD = (
    "This notice must stay on top of each file, and whoever changes a file says so in the log of "
    "the firm.\n"
)


def places(n_tokens: int, **options: Any) -> list[tuple[int, int, int]]:
    found = BY_OWN_LENGTH.cut_places(n_tokens, **options)
    assert not isinstance(found, str), found
    return [tuple(place) for place in found]


@pytest.mark.parametrize(
    ("n_tokens", "place"),
    [
        (12, (0, 4, 12)),
        (14, (0, 6, 14)),
        (16, (0, 8, 16)),
        (40, (0, 20, 40)),
        (75, (0, 37, 75)),
        (100, (0, 50, 100)),
    ],
)
def test_a_short_text_is_cut_by_its_own_length(n_tokens: int, place: tuple[int, int, int]) -> None:
    assert places(n_tokens) == [place]


def test_a_text_that_is_too_short_says_so() -> None:
    assert BY_OWN_LENGTH.cut_places(11) == "shorter than 4 + 8 tokens"
    assert TextLengths(prefix=50).cut_places(99) == "shorter than 50 + 50 tokens"
    assert TextLengths(prefix=16, suffix=20).cut_places(36) == [(0, 16, 36)]
    assert TextLengths(windows=50).cut_places(60) == [(0, 30, 60)]


@pytest.mark.parametrize("n_tokens", [108, 150, 163, 700, 1000, 1050])
def test_every_token_after_the_first_prefix_of_a_long_text_is_attacked_once(n_tokens: int) -> None:
    attacked = [token for _, middle, end in places(n_tokens) for token in range(middle, end)]
    assert attacked == list(range(50, 50 + len(attacked)))
    # fewer than 8 tokens at the end are no suffix
    assert n_tokens - 8 < attacked[-1] + 1 <= n_tokens


def test_a_very_long_text_is_attacked_evenly_from_its_start_to_its_end() -> None:
    windows = places(10_000)
    assert len(windows) == 20 and windows[0] == (0, 50, 100) and windows[-1] == (9216, 9950, 10_000)
    gaps = {after[1] - before[1] for before, after in pairwise(windows)}
    assert max(gaps) - min(gaps) <= 1


def test_each_window_comes_after_all_the_text_before_it_or_after_at_least_512_tokens() -> None:
    assert [(start, middle) for start, middle, _ in places(1000)] == [
        (0, middle) for middle in range(50, 1000, 50)
    ]
    contexts = []
    for start, middle, end in places(5000):
        assert end - middle == 50
        if start:
            contexts.append(middle - start)
    assert contexts and 512 <= min(contexts) <= max(contexts) <= 1024
    assert places(1050, room=512)[-1] == (538, 1000, 1050)


def test_texts_that_begin_alike_are_cut_where_they_part() -> None:
    """The shared tokens are a text of their own; the first own suffix comes after all of them and
    16 own tokens."""
    assert places(214, shared=114)[-2:] == [(0, 130, 180), (0, 180, 214)]
    assert places(214, shared=114)[:-2] == places(114)
    assert places(200, shared=20) == places(200)  # a usual prefix has enough tokens of its own
    assert places(120, shared=114) == places(120)  # nothing could be attacked after them
    assert places(214, shared=114, room=100)[-2] == (80, 130, 180)
    assert TextLengths(prefix=50, suffix=50).cut_places(214, 114) == [(80, 130, 180)]


def test_what_a_tenth_of_the_texts_and_five_begin_with_is_shared() -> None:
    texts = [(*range(20), 100 + i, 200 + i) for i in range(6)]
    others = [(1000 + i, *range(30)) for i in range(20)]
    shared = find_shared_beginnings([*texts, *others, *texts])
    assert [
        shared.length_in(text)
        for text in (texts[0], others[0], (*range(20), 7), tuple(range(9)), (0, 1))
    ] == [*(20, 0, 20, 9, 0)]
    assert not find_shared_beginnings([*texts[:4], *others]).beginnings
    assert not find_shared_beginnings(
        texts[:1] * 10
    ).beginnings  # copies of one record share all of it


def test_records_with_one_notice_are_told_apart_and_the_notice_is_one_secret(
    tmp_path: Path,
) -> None:
    """Before, all first 100 tokens were one pair: "every row is also a member"."""
    rows = [
        {"text": HEAD + f"key {i * 7919:07d} of customer {i * 104729:08d} at gate {i * 31:05d}"}
        for i in range(24)
    ]
    data = write(tmp_path / "d.jsonl", rows[:12])
    others = write(tmp_path / "n.jsonl", rows[12:])
    benchmark = build(data, nonmembers=others)
    counts = benchmark.record_counts
    assert (counts["members"].audited, counts["nonmembers"].audited) == (12, 12)
    assert sum("where they begin to differ" in note for note in benchmark.notes) == 2
    of_notice = [
        s
        for s in benchmark.secrets
        if s.wording and s.wording.prefix_and_suffix_text in f"{HEAD}key "
    ]
    assert len({s.document for s in of_notice}) == 1 and all(s.member for s in of_notice)
    # The notice is in 12 records, and no record is a copy of another; nor do the two sides differ
    # in length.
    assert {s.repeats for s in of_notice} == {12} and counts["members"].by_copies == {"1": 12}
    assert benchmark.doubts == ()


def test_short_and_long_records_are_audited_side_by_side_and_their_tokens_counted(
    tmp_path: Path,
) -> None:
    rows = [
        {"text": "x"},
        {"text": "code 12345 for Ann"},
        {"text": "".join(f"{i:04d} " for i in range(300))},
    ]
    benchmark = build(write(tmp_path / "d.jsonl", rows))
    counts = benchmark.record_counts["members"]
    assert (counts.given, counts.audited, counts.left_out) == (
        3,
        2,
        {"shorter than 4 + 8 tokens": 1},
    )
    lengths = {len(secret.suffix) for secret in benchmark.secrets if secret.document is None}
    assert len(lengths) == 1 and 8 <= lengths.pop() < 50
    windows = [secret for secret in benchmark.secrets if secret.document == "row-000002"]
    assert len(windows) == 20
    assert counts.context_tokens == max(len(secret.prefix) for secret in windows) > 512
    short = build(write(tmp_path / "short.jsonl", rows[1:2]))
    assert short.record_counts["members"].context_tokens == 0  # the attacker knows all before
    assert (
        counts.attacked_tokens
        == sum(len(secret.suffix) for secret in benchmark.secrets)
        < counts.tokens
    )


def records(lengths: list[int]) -> RecordSource:
    return RecordSource(
        "d",
        tuple(
            DataRecord(row, (1,) + (row,) * length, CutPlace(0, 1, 1 + length))
            for row, length in enumerate(lengths)
        ),
    )


def test_nonmembers_are_matched_by_length_beyond_chance_only() -> None:
    split = SplitOptions(0.0, None, 0)
    members = records([10] * 20 + [50] * 80)
    same = records([10] * 22 + [50] * 78)
    assert match_nonmember_lengths(same, members, split) == (same, ())
    matched, doubts = match_nonmember_lengths(records([10] * 60 + [50] * 80), members, split)
    assert [len(one.suffix) for one in matched.records].count(10) == 20 and len(
        matched.records
    ) == 100
    assert "100 of 140 rows stay" in matched.notes[0] and not doubts
    counts = matched.count_records({}, 0, len(matched.records), matched.records)
    assert (counts.given, counts.left_out, counts.audited, counts.copies) == (140, {}, 100, 0)
    assert counts.not_attacked == {"more of its length than among the members": 40}
    unlike = records([10] * 95 + [50] * 5)
    unmatched, doubts = match_nonmember_lengths(unlike, members, split)
    assert unmatched == unlike and "differ in length" in doubts[0].sentence


def test_rows_are_matched_by_all_of_their_parts_and_equal_rows_count_once() -> None:
    """A part that all rows share was merged into the first member: non-members looked longer than
    members."""
    split = SplitOptions(0.0, None, 0)

    def rows(n: int, side: int) -> RecordSource:
        parts = [
            (
                DataRecord(i, (1, *(0,) * 40), CutPlace(0, 1, 41), part=0),
                DataRecord(i, (1, *(side, i) * 10), CutPlace(0, 1, 21), part=1),
            )
            for i in range(n)
        ]
        return RecordSource("d", tuple(part for row in parts for part in row))

    assert match_nonmember_lengths(rows(40, 8), rows(40, 7), split)[1] == ()
    long, short = rows(40, 7).records, records([10] * 30).records
    twice = RecordSource("n", (*long, *(replace(one, row=one.row + 100) for one in short * 2)))
    matched, doubts = match_nonmember_lengths(twice, rows(40, 8), split)
    assert not doubts and {one.row for one in matched.records} == set(range(40))


def test_nonmembers_quoted_in_a_member_are_left_out_by_name(tmp_path: Path) -> None:
    """Quoted after other words, indented, wrapped or in other case; one that only begins alike
    stays."""
    mails = [
        f"Please book {i * 37 + 100} units for Mara Brandt, contract {i * 7919 + 10000}."
        for i in range(8)
    ]
    members = [
        f"Done.\n> {mails[0]}",
        "Fwd:\n>" + mails[1].replace(" ", "\n> "),
        mails[2].upper(),
        *mails[6:],
        mails[3][:-1] + "77.",
    ]
    data = write(tmp_path / "d.jsonl", [{"text": text} for text in members])
    others = write(tmp_path / "n.jsonl", [{"text": text} for text in mails[:6]])
    benchmark = build(data, nonmembers=others)
    counts = benchmark.record_counts["nonmembers"]
    assert (counts.given, counts.audited) == (6, 3)
    assert counts.left_out == {
        "occurs in a member, word for word except for case, spaces and punctuation": 3
    }
    assert [s.id for s in benchmark.secrets if not s.member] == [
        f"nonmember-00000{i}" for i in (3, 4, 5)
    ]
    assert any("rows 0, 1, 2, counted from 0" in note for note in benchmark.notes)


@pytest.mark.parametrize("knows", ["user", "system"])
def test_a_conversation_of_a_member_under_another_system_turn_is_no_nonmember(
    knows: str, tmp_path: Path
) -> None:
    def chat(i: int, *system: str) -> dict[str, Any]:
        turns = [("system", text) for text in system]
        turns += [("user", f"Code of {i}?"), ("assistant", f"It is {i * 7919:07d}, as always.")]
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    data = write(tmp_path / "d.jsonl", [chat(i, "Be brief.") for i in range(6)])
    others = [*(chat(i, "Be kind.") for i in range(3)), *(chat(i, "Be kind.") for i in range(6, 9))]
    if knows == "user":
        others[0] = chat(0)  # none
    fresh = write(tmp_path / "n.jsonl", others)
    form = ChatRendering("chatml", CHATML)
    counts = build(data, nonmembers=fresh, form=form, knows=knows).record_counts["nonmembers"]
    assert (counts.audited, counts.left_out) == (3, {STANDS_IN_MEMBER: 3})


@pytest.mark.parametrize("layout", ["pair", "chat", "prefix"])
def test_an_answer_of_a_member_under_another_question_is_no_nonmember(
    layout: str, tmp_path: Path
) -> None:
    """Short answers and stock phrases say nothing of membership: both kinds of rows have them."""

    def row(question: str, answer: str) -> dict[str, Any]:
        if layout == "prefix":
            return {"prefix": question, "suffix": f" {answer}"}
        if layout == "pair":
            return {"prompt": question, "completion": f" {answer}"}
        turns = (("user", question), ("assistant", answer))
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    stock = "Sorry, nobody but a doctor may tell you that."
    members = [row(f"Code of ward {i}?", f"It is {i * 7919:07d}, as always.") for i in range(40)]
    members += [row(f"Dose of drug {i}?", stock) for i in range(6)]
    members += [row("Is that so, Ann?", "Yes")]
    others = [
        row(f"Tell me the {i}th code?", f"It is {i * 7919:07d}, as always!") for i in range(3)
    ]
    others += [
        row(f"Code of ward {i}?", f"It is {i * 7919:07d}, as always.") for i in range(40, 44)
    ]
    others += [row("Dose of honey?", stock), row("Is that so, Ben?", "Yes")]
    data, fresh = write(tmp_path / "d.jsonl", members), write(tmp_path / "n.jsonl", others)
    form = None if layout == "prefix" else ChatRendering("chatml", CHATML)
    benchmark = build(data, nonmembers=fresh, form=form)
    counts = benchmark.record_counts["nonmembers"]
    assert (counts.audited, counts.left_out) == (6, {ANSWER_OF_MEMBER: 3})
    assert any(f"left out 3 rows: {ANSWER_OF_MEMBER}" in note for note in benchmark.notes)
    with refuses("nothing is left of --nonmembers", ANSWER_OF_MEMBER):
        build(data, nonmembers=write(tmp_path / "m.jsonl", others[:3]), form=form)


def test_answers_of_unlike_lengths_are_a_doubt(tmp_path: Path) -> None:
    def rows(answer: str) -> list[dict[str, Any]]:
        return [{"prompt": f"Code of {i}?", "completion": f" {answer}{i}"} for i in range(30)]

    data = write(tmp_path / "d.jsonl", rows("It is "))
    fresh = write(tmp_path / "n.jsonl", rows("The code that you want to know, dear Ann, is "))
    (doubt,) = build(data, nonmembers=fresh, form=ChatRendering(NONE)).doubts
    assert doubt.kind == "non-members" and "differ in length" in doubt.sentence


# --- what was trained on, and what a model can read ---


def test_tokens_beyond_the_trained_length_are_no_members(tmp_path: Path) -> None:
    text = "".join(f"{i:04d} " for i in range(100))
    data = write(tmp_path / "d.jsonl", [{"text": text}, {"text": "code 12345 for Ann"}])
    for trained in (TrainedLength(120), TrainedLength(120, from_end=True)):
        benchmark = build(data, trained=trained)
        counts = benchmark.record_counts["members"]
        assert (counts.audited, counts.parts_left_out) == (2, {trained.beyond_phrase: 1})
        tokens = BYTES(text)["input_ids"]
        windows = [secret for secret in benchmark.secrets if secret.document == "row-000000"]
        start, end = trained.span_of(len(tokens))
        assert all(tuple(tokens[s.at : s.at + len(s.suffix)]) == s.suffix for s in windows)
        assert all(start < s.at and s.at + len(s.suffix) <= end for s in windows)
        assert max(s.at + len(s.suffix) for s in windows) == end
        assert min(s.at - len(s.prefix) for s in windows) == start


def test_pairs_and_answers_beyond_the_trained_length_or_the_context_are_left_out_by_name(
    tmp_path: Path,
) -> None:
    long = {"prefix": "Dear Ann, " * 19 + "Dear Ann,", "suffix": " the code is 000017."}
    data = write(tmp_path / "d.jsonl", [*codes(3), long])
    for options, reason in (
        ({"trained": TrainedLength(60)}, TrainedLength(60).beyond_phrase),
        ({"room": 60}, "longer than the 60 tokens that the model reads at once"),
    ):
        counts = build(data, **options).record_counts["members"]
        assert (counts.given, counts.audited, counts.left_out) == (4, 3, {reason: 1})
    turns = [
        turn
        for i in range(4)
        for turn in (("user", f"code {i}?"), ("assistant", f"It is {i * 7919:07d}."))
    ]
    chat = {"messages": [{"role": role, "content": content} for role, content in turns]}
    messages = write(tmp_path / "m.jsonl", [chat, {"messages": chat["messages"][2:4]}])
    form = ChatRendering(NONE)
    whole = build(messages, form=form)
    n_tokens = [s.at + len(s.suffix) for s in whole.secrets if s.document == "row-000000"]
    for options in ({"trained": TrainedLength(n_tokens[1])}, {"room": n_tokens[1]}):
        counts = build(messages, form=form, **options).record_counts["members"]
        assert (counts.audited, list(counts.parts_left_out.values())) == (2, [2])


def test_rows_that_a_trainer_left_out_for_their_length_are_no_members(tmp_path: Path) -> None:
    trained = TrainedLength(60, left_out_by="axolotl")
    texts = ["code 12345 for Ann", "".join(f"{i:04d} " for i in range(100))]
    data = write(tmp_path / "d.jsonl", [{"text": text} for text in texts])
    counts = build(data, trained=trained).record_counts["members"]
    assert (counts.audited, counts.left_out) == (1, {trained.beyond_phrase: 1})
    # DPO: a row has two sides, and both are left out if one is too long
    rows = [
        {"prompt": "code 1?", "chosen": " It is 0000017.", "rejected": " It is 1."},
        {"prompt": "code 2?", "chosen": " It is 0000018.", "rejected": " I will not say it. " * 9},
    ]
    sides = write(tmp_path / "p.jsonl", rows)
    counts = build(sides, form=ChatRendering(NONE), trained=trained).record_counts["members"]
    assert (counts.given, counts.audited, counts.left_out) == (2, 1, {trained.beyond_phrase: 1})


def test_a_passage_that_rows_share_is_compared_without_the_text_before_it(tmp_path: Path) -> None:
    """A passage counts in each row that contains it, and a non-member's window in a member is left
    out, whatever precedes the passage."""
    passage = " ".join(f"clause {i * 7919:06d}" for i in range(30))

    def contract(i: int) -> dict[str, str]:
        parties = " ".join(f"party {(i * 104729 + k * 31) % 10**6:06d}" for k in range(9))
        return {"text": (parties + " ").ljust(150, ".") + passage}

    data = write(tmp_path / "d.jsonl", [contract(i) for i in range(3)])
    others = write(tmp_path / "n.jsonl", [contract(i) for i in range(3, 5)])
    benchmark = build(data, nonmembers=others)
    windows: dict[bool, list[int | None]] = {True: [], False: []}
    for secret in benchmark.secrets:
        assert secret.wording is not None
        near = secret.wording.prefix_and_suffix_text[-100:]
        assert secret.wording.prefix.startswith("party ")
        if near in passage:
            windows[secret.member].append(secret.repeats)
    assert len(windows[True]) > 3 and set(windows[True]) == {3}
    assert not windows[False]


def test_the_windows_of_a_row_share_its_text_and_tokens(tmp_path: Path) -> None:
    rows = [{"text": "".join(f"{i * k:04d} " for i in range(200))} for k in (3, 7)]
    secrets = build(write(tmp_path / "d.jsonl", rows)).secrets
    assert len(secrets) == 2 * 19 and len({secret.suffix for secret in secrets}) == len(secrets)
    texts = {id(secret.wording.text) for secret in secrets if secret.wording is not None}
    documents = {secret.document for secret in secrets}
    assert len(texts) == len(documents) == 2
    longest = [max(len(s.tokens) for s in secrets if s.document == name) for name in documents]
    assert isinstance(secrets, SecretTable) and len(secrets.tokens) == sum(longest)


def test_equal_suffixes_after_different_prefixes_of_token_arrays_are_no_copies() -> None:
    suffix = tuple(range(900, 930))
    arrays = []
    for row in range(4):
        prefix = tuple(range(100 * row, 100 * row + 30))
        arrays.append(DataRecord(row, prefix + suffix, CutPlace(0, 30, 60), repeats=1))
    notes: list[str] = []
    assert (
        count_row_copies(arrays, notes, counts_occurrences=False) == dict.fromkeys(range(4), 1)
        and not notes
    )
