"""Prepared data are audited as they were trained on: the same ids, nothing rendered, and `generate`
agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
import torch
from pyarrow import parquet
from trl import SFTConfig

from auditor.benchmarks.data.tokenised import is_tokenised_data
from auditor.core.errors import AuditError
from auditor.models.trained_length import FILE, TrainedLength, read_trainer_arguments
from tests.conftest import check_command, read_tokenised, refuses
from tests.zoo.families import save

ROW = {"input_ids": [1, 7, 8, 9, 5, 6, 2], "labels": [-100, -100, -100, 9, 5, -100, 2]}


def written(rows: list[dict[str, Any]], folder: Path, form: str) -> str:
    if form == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
        return str(folder / "saved")
    path = folder / f"data.{form}"
    if form == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif form == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        table = pyarrow.Table.from_pylist(rows)
        with (
            pyarrow.OSFile(str(path), "wb") as out,
            pyarrow.ipc.new_stream(out, table.schema) as stream,
        ):
            stream.write_table(table)
    return str(path)


def cut(
    rows: list[dict[str, Any]], folder: Path, **given: Any
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    found = read_tokenised(written(rows, folder, "jsonl"), vocab_size=20, known_fraction=0, **given)
    return [(secret.prefix, secret.suffix) for secret in found.secrets]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "arrow", "saved"])
def test_each_run_of_labelled_tokens_is_a_secret_behind_all_that_stood_before_it(
    form: str, tmp_path: Path
) -> None:
    name = written([ROW, {"input_ids": [1, 3, 4], "labels": [-100, 3, 4]}, ROW], tmp_path, form)
    assert is_tokenised_data(name)
    found = read_tokenised(name, vocab_size=20, known_fraction=0)
    assert [(s.id, s.prefix, s.suffix, s.repeats) for s in found.secrets] == [
        ("row-000000-0000", (1, 7, 8), (9, 5), 2),
        ("row-000000-0001", (1, 7, 8, 9, 5, 6), (2,), 2),
        ("row-000001", (1,), (3, 4), 1),
    ]
    assert [ids for ids, _ in found.texts_with_repeat_counts(True)] == [
        (1, 7, 8, 9, 5, 6, 2),
        (1, 3, 4),
        (1, 7, 8, 9, 5, 6, 2),
    ]


def test_lengths_cut_next_to_where_learning_began(tmp_path: Path) -> None:
    assert cut([ROW], tmp_path, prefix_length=2, suffix_length=1) == [
        ((7, 8), (9,)),
        ((5, 6), (2,)),
    ]
    # labelled from the first token on
    whole = {
        "input_ids": [1, 2, 3, 4, 5],
        "labels": [1, 2, 3, 4, 5],
    }
    assert cut([whole], tmp_path, prefix_length=2) == [((1, 2), (3, 4, 5))]


PACKED = {"input_ids": [1, 7, 8, 1, 9, 5, 0], "labels": [-100, 7, 8, -100, 9, 5, -100]}
MASK = {"attention_mask": [1, 1, 1, 1, 1, 1, 0]}


@pytest.mark.parametrize(
    "cuts",
    [
        {**MASK, "position_ids": [0, 1, 2, 0, 1, 2, 0]},
        {
            "attention_mask": [1, 1, 1, 2, 2, 2, 0]
        },  # as axolotl and LLaMA-Factory number packed texts
        {**MASK, "seq_lengths": [3, 3]},
        {**MASK, "seq_lengths": [3, 3], "position_ids": [0, 1, 2, 0, 1, 2, 0]},
    ],
)
def test_a_packed_row_is_cut_where_the_trainer_cut_it(cuts: dict[str, Any], tmp_path: Path) -> None:
    assert cut([{**PACKED, **cuts}], tmp_path) == [((1,), (7, 8)), ((1,), (9, 5))]
    # one text to its model
    assert cut([{**PACKED, **MASK}], tmp_path) == [
        ((1,), (7, 8)),
        ((1, 7, 8, 1), (9, 5)),
    ]


def test_what_was_packed_before_a_record_is_kept(tmp_path: Path) -> None:
    ids = {
        "input_ids": [1, 7, 8, 1, 9, 5, 0, 1, 2, 6],
        "labels": [-100, 7, 8, -100, 9, 5, -100, -100, -100, 6],
    }
    row = {**ids, "seq_lengths": [3, 4, 3]}
    data = written([row], tmp_path, "jsonl")
    texts = (1, 7, 8), (1, 9, 5, 0)
    for prefix_length, last in ((None, (*texts, ())), (1, (*texts, (1,)))):
        found = read_tokenised(data, vocab_size=20, known_fraction=0, prefix_length=prefix_length)
        earlier = {one.suffix: found.earlier_in_row.get(one.id) for one in found.secrets}
        assert earlier == {(7, 8): None, (9, 5): ((1, 7, 8), ()), (6,): last}


MASKED = {
    "input_ids": [1, 7, 8, 9],
    "completion_mask": [0, 0, 1, 1],
    "assistant_masks": [0, 1, 1, 1],
}


QUIET = {"report_to": [], "use_cpu": True, "bf16": False, "gradient_checkpointing": None}


def test_rows_that_may_be_packed_and_mark_no_boundaries_are_named(tmp_path: Path) -> None:
    """Rows that are concatenated and cut, as `group_texts` and TRL's `wrapped` packing make
    them."""
    rows = [{"input_ids": ids, "labels": ids} for ids in ([4, 5, 2, 6, 7, 8], [4, 6, 9, 8, 2, 2])]
    data = written(rows, tmp_path, "jsonl")
    noted = [
        [
            note
            for note in read_tokenised(data, vocab_size=20, end_of_text=end).notes
            if "mark no boundaries" in note
        ]
        for end in (2, None)
    ]
    assert len(noted[0]) == 1 and noted[0][0].startswith("1 of 2 rows") and noted[1] == []
    marked = written([rows[0] | {"seq_lengths": [3, 3]}, rows[1]], tmp_path, "jsonl")
    assert not any(
        "mark no boundaries" in note
        for note in read_tokenised(marked, vocab_size=20, end_of_text=2).notes
    )


def test_trl_says_by_masks_what_was_learnt(tmp_path: Path) -> None:
    """TRL 1.16: the assistant's mask always; the completion's if it is told, or rows have prompt
    and completion."""
    assert cut([MASKED | {"prompt": "a", "completion": "b"}], tmp_path) == [((1, 7), (8, 9))]
    for asked, wanted in {
        True: [((1, 7), (8, 9))],
        False: [((1,), (7, 8, 9))],
        None: [((1,), (7, 8, 9))],
    }.items():
        arguments = SFTConfig(output_dir=str(tmp_path), completion_only_loss=asked, **QUIET)
        torch.save(arguments, tmp_path / "training_args.bin")
        assert (read_trainer_arguments(tmp_path) or {})["completion_only_loss"] is asked
        assert cut([MASKED], tmp_path, model=str(tmp_path)) == wanted


def test_prompts_are_attacked_apart_if_nobody_knows_whether_they_were_learnt(
    tmp_path: Path,
) -> None:
    """A completion_mask without labels, and no arguments of the trainer: as SFTTrainer 1.16 takes
    it, all is learnt."""
    row = {"input_ids": [1, 7, 8, 9, 5, 6, 2], "completion_mask": [0, 0, 0, 0, 1, 1, 1]}
    made = read_tokenised(
        written([row], tmp_path, "jsonl"), vocab_size=20, known_fraction=0, model=str(tmp_path)
    )
    assert [(s.group, s.prefix, s.suffix) for s in made.secrets] == [
        ("prompt", (1, 7), (8, 9)),
        ("completion", (1, 7, 8, 9), (5, 6, 2)),
    ]
    assert any("prompts are attacked too" in note for note in made.notes)
    twin = written([row | {"labels": row["input_ids"]}], tmp_path, "jsonl")
    assert len(read_tokenised(twin, vocab_size=20, known_fraction=0).secrets) == 1


@pytest.mark.parametrize("content", [None, b"no archive", {"seed": 1}])
def test_a_file_without_arguments_of_trl_says_nothing(content: Any, tmp_path: Path) -> None:
    if isinstance(content, bytes):
        (tmp_path / "training_args.bin").write_bytes(content)
    elif content is not None:
        torch.save(content, tmp_path / "training_args.bin")
    made = read_tokenised(
        written([MASKED], tmp_path, "jsonl"), vocab_size=20, known_fraction=0, model=str(tmp_path)
    )
    assert {secret.group for secret in made.secrets} == {"prompt", "completion"}


PREFERENCES: dict[str, dict[str, Any]] = {
    "TRL 1.16": {"prompt_ids": [1, 7], "chosen_ids": [8, 9], "rejected_ids": [5, 6]},
    "TRL before": {
        "prompt_input_ids": [1, 7],
        "chosen_input_ids": [8, 9],
        "rejected_input_ids": [5, 6],
    },
}
ORPO = {
    "chosen_input_ids": [1, 4, 7, 8, 9],
    "chosen_labels": [-100, -100, -100, 8, 9],
    "rejected_input_ids": [1, 4, 7, 5, 6],
    "rejected_labels": [-100, -100, -100, 5, 6],
}


@pytest.mark.parametrize("trainer", PREFERENCES)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_prepared_preferences_are_secrets_in_groups(
    trainer: str, form: str, tmp_path: Path
) -> None:
    data = written([PREFERENCES[trainer]], tmp_path, form)
    assert is_tokenised_data(data)
    made = read_tokenised(data, vocab_size=20, known_fraction=0)
    assert [(s.group, s.prefix, s.suffix) for s in made.secrets] == [
        ("chosen", (1, 7), (8, 9)),
        ("rejected", (1, 7), (5, 6)),
    ]


@pytest.mark.parametrize("trainer", ["ORPO", "CPO", "unknown"])
def test_prompts_of_chosen_sides_are_attacked_as_orpo_learns_them(
    trainer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """TRL 1.16: ORPO's loss is over the whole chosen side, whatever chosen_labels mask; CPO's over
    the labels."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.cpo import CPOConfig
    from trl.experimental.orpo import ORPOConfig

    if trainer != "unknown":
        kinds = {"ORPO": ORPOConfig, "CPO": CPOConfig}
        torch.save(
            kinds[trainer](output_dir=str(tmp_path), **QUIET), tmp_path / "training_args.bin"
        )
    data = written([ORPO], tmp_path, "jsonl")
    made = read_tokenised(data, vocab_size=20, known_fraction=0, model=str(tmp_path))
    sides = [("chosen", (1, 4, 7), (8, 9)), ("rejected", (1, 4, 7), (5, 6))]
    prompts = [("prompt", (1,), (4, 7))] if trainer != "CPO" else []
    assert [(s.group, s.prefix, s.suffix) for s in made.secrets] == [*prompts, *sides]
    assert any("ORPO" in note for note in made.notes) is (trainer != "CPO")


def test_prepared_completions_are_grouped_by_their_label(tmp_path: Path) -> None:
    """KTOTrainer of TRL 1.16; the completions that it estimates the KL term by had no loss of their
    own."""
    rows = [
        {
            "prompt_ids": [1, 7],
            "completion_ids": [8, 9],
            "KL_completion_ids": [5, 6],
            "label": True,
        },
        {
            "prompt_ids": [1, 7],
            "completion_ids": [5, 6],
            "KL_completion_ids": [8, 9],
            "label": False,
        },
    ]
    made = read_tokenised(written(rows, tmp_path, "jsonl"), vocab_size=20, known_fraction=0)
    assert [(s.group, s.suffix) for s in made.secrets] == [("wanted", (8, 9)), ("unwanted", (5, 6))]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"input_ids": [1, 7, 8, 99, 5, 6, 2]},
            r"expected each of the labels as its token or -100",
        ),
        (
            {"input_ids": [1, 99, 8, 9, 5, 6, 2]},
            r"vocabulary mismatch: expected token ids in \[0, 20\).*got 99",
        ),
        ({"labels": [-100, 9]}, "as many labels as input_ids, got 2 and 7"),
        ({"labels": [-100, -100, 9, 5, -100, 2, -100]}, "models shift labels themselves"),
        ({"attention_mask": [1, 1, 0, 1, 1, 1, 1]}, "0 in the middle"),
        ({"seq_lens": [3, 3]}, "expected seq_lens that add up to 7 tokens, got 6"),
        ({"position_ids": [0, 1, 2, 5, 6, 7, 8]}, "count each text from 0"),
        ({"seq_lens": [3, 4], "position_ids": [0, 1, 0, 1, 2, 3, 4]}, "cut a packed row alike"),
        ({"input_ids": "1 7 8"}, "a list of whole numbers in input_ids"),
        ({"labels": [-100] * 7}, "nothing is left of"),
    ],
)
def test_rows_that_are_none_of_a_trainer_s_are_refused(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(AuditError, match=words):
        cut([{**ROW, **change}], tmp_path)


def test_a_row_without_token_ids_is_refused_by_number(tmp_path: Path) -> None:
    nothing = {"input_ids": None, "labels": None}
    with pytest.raises(AuditError, match=r"row 1 .* expected token ids, got null: leave out rows"):
        cut([ROW, {**ROW, **nothing}], tmp_path)


def test_what_does_not_say_what_was_learnt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match="expected labels next to input_ids"):
        cut([{"input_ids": [1, 2]}], tmp_path)


def test_what_is_compared_is_in_one_form(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "a"}')
    with pytest.raises(
        AuditError, match=r"--nonmembers .*expected input_ids as in --data, got none"
    ):
        cut([ROW], tmp_path, nonmembers=str(tmp_path / "text.jsonl"))
    assert not is_tokenised_data(str(tmp_path / "text.jsonl")) and not is_tokenised_data(
        "a/name-on-the-hub"
    )


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet"])
def test_prepared_rows_that_keep_their_messages_are_read_as_token_ids_in_every_format(
    form: str, tmp_path: Path
) -> None:
    """As `trainer.train_dataset.to_json` writes them: token ids after nested objects."""
    messages = [{"role": "user", "content": "} a"}, {"role": "assistant", "content": "b" * 2**20}]
    rows = [{"messages": messages, **ROW}]
    path = tmp_path / f"rows.{form}"
    if form == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    else:
        text = json.dumps(rows if form == "json" else rows[0], indent=2 if form == "json" else None)
        path.write_text(text, encoding="utf-8")
    assert is_tokenised_data(str(path))
    assert len(read_tokenised(str(path), vocab_size=20, known_fraction=0).secrets) == 2
    path.write_text("[3]", encoding="utf-8")
    assert form == "parquet" or not is_tokenised_data(str(path))


def test_greedy_hits_are_those_of_generate_on_the_same_ids(tmp_path: Path) -> None:
    """Half of the labels are what the model itself writes behind the prefix, the others are not."""
    model = save(tmp_path / "model", "gpt2").eval()
    prefixes = torch.randint(3, 200, (16, 6), generator=torch.Generator().manual_seed(0))
    own = model.generate(
        prefixes,
        attention_mask=torch.ones_like(prefixes),
        max_new_tokens=4,
        do_sample=False,
        eos_token_id=None,
    )[:, 6:]
    own[8:] = (own[8:] + 1) % 200
    rows = [
        {"input_ids": [*p, *s], "labels": [*[-100] * 6, *s]}
        for p, s in zip(prefixes.tolist(), own.tolist(), strict=True)
    ]
    data, out = written(rows, tmp_path, "jsonl"), str(tmp_path / "run")
    asked = ["--model", str(tmp_path / "model"), "--data", data, "--known-fraction", "0", "-o", out]
    check_command("run", *asked, "--attack", "extraction-probability")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert json.loads((tmp_path / "run" / "prefix_token.json").read_text())["tokens"] == []
    (greedy,) = result["benchmark"]["greedy_recall"].values()
    assert (greedy["value"], greedy["n"]) == (0.5, 16)


def test_prepared_rows_beyond_the_context_are_cut_or_left_out_and_counted(tmp_path: Path) -> None:
    """GPT-2 with 96 positions: an answer that fits, one that ends beyond, one that begins beyond,
    and half a chat."""
    save(tmp_path / "model", "gpt2")
    n_prompts_and_answers = [[(10, 5)], [(92, 8)], [(100, 5)], [(20, 5), (75, 5)]]
    rows = []
    for number, turns in enumerate(n_prompts_and_answers):
        labels = [
            label for prompt, answer in turns for label in ([-100] * prompt + [3 + number] * answer)
        ]
        rows.append({"input_ids": [3 + number] * len(labels), "labels": labels})
    data, out = written(rows, tmp_path, "jsonl"), str(tmp_path / "run")
    command = [
        "run",
        "--model",
        str(tmp_path / "model"),
        "--data",
        data,
        "--known-fraction",
        "0",
        "-o",
        out,
    ]
    check_command(*command, "--attack", "extraction-probability")
    benchmark = json.loads((tmp_path / "run" / "result.json").read_text())["benchmark"]
    members = benchmark["records"]["members"]
    too_long = "longer than the 96 tokens that the model reads at once"
    assert (members["given"], members["audited"], members["left_out"]) == (4, 3, {too_long: 1})
    assert members["parts_left_out"] == {too_long: 1}
    assert any("left out 1 run: longer than the 96 tokens" in note for note in benchmark["notes"])
    (greedy,) = benchmark["greedy_recall"].values()
    assert greedy["n"] == 3


def test_prepared_rows_are_cut_where_the_trainer_cut_them(tmp_path: Path) -> None:
    """TRL 1.16 cuts them as all others, by its `max_length`; a window at the end keeps no earlier
    token either."""
    assert cut([ROW], tmp_path, trained=TrainedLength(5)) == [((1, 7, 8), (9, 5))]
    assert cut([ROW], tmp_path, trained=TrainedLength(4)) == [((1, 7, 8), (9,))]
    assert cut([ROW], tmp_path, trained=TrainedLength(5, from_end=True)) == [
        ((8,), (9, 5)),
        ((8, 9, 5, 6), (2,)),
    ]
    with refuses("beyond the first 3 tokens of a row"):
        cut([ROW], tmp_path, trained=TrainedLength(3))
    save(tmp_path / "model", "gpt2")
    arguments = SFTConfig(output_dir=str(tmp_path), max_length=5, **QUIET)
    torch.save(arguments, tmp_path / "model" / FILE)
    data, out = written([ROW], tmp_path, "jsonl"), str(tmp_path / "run")
    command = [
        "run",
        "--model",
        str(tmp_path / "model"),
        "--data",
        data,
        "--known-fraction",
        "0",
        "-o",
        out,
    ]
    check_command(*command, "--attack", "extraction-probability")
    benchmark = json.loads((tmp_path / "run" / "result.json").read_text())["benchmark"]
    (greedy,) = benchmark["greedy_recall"].values()
    assert greedy["n"] == 1
    assert any(
        "the first 5 tokens were trained on (max_length of training_args.bin)" in n
        for n in benchmark["notes"]
    )
