"""What trainers read of a row next to its turns: nulls of a table, columns, marks of no loss, tool
calls, sides."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas
import pytest
from datasets import Dataset
from trl import extract_prompt

from auditor.benchmarks.data import chat, chat_rendering, conversation_rows
from auditor.benchmarks.data.columns import read_data_table
from auditor.benchmarks.data.conversation_rows import (
    LAYOUTS,
    Conversation,
    parse_conversation,
)
from auditor.benchmarks.data.files import (
    Files,
    TableReader,
    read_unit_texts,
    sample_data_conversations,
)
from auditor.benchmarks.data.tables import read_record_table
from auditor.core.errors import AuditError
from auditor.core.plan_parts import DataPlan
from auditor.runs import training
from tests.benchmarks.test_chat import CHATML, MARKED, messages, talk, text, tokenizer
from tests.conftest import read_files

# A template that writes tools, as Llama 3's also an empty list, its options, and tool calls.
TOOLS = (
    "{% if tools is not none %}{{ 'Tools: ' + (tools | tojson) + '\n' }}{% endif %}"
    "{% if think is defined %}{{ 'think: ' ~ think ~ '\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + ' ' }}"
    "{{ (c.function.arguments | tojson) + '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def tool(name: str, **properties: str) -> dict[str, Any]:
    return {
        "function": {
            "name": name,
            "parameters": {key: {"type": kind} for key, kind in properties.items()},
        }
    }


def calling(arguments: Any, answer: str = "It is Ann.") -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "door", "arguments": arguments}}
    return [
        {"role": "user", "content": "Which door?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4711"},
        {"role": "assistant", "content": answer},
    ]


def variants(words: Any, data: str) -> list[tuple[str, ...]]:
    rows = sample_data_conversations(TableReader(DataPlan(data=data)), "--data", data, 9)
    assert rows is not None
    return [
        form.variants
        for form in chat_rendering.list_candidate_chat_renderings(words, rows)
        if form.base == "model"
    ]


def suffixes(made: Files) -> list[str]:
    return [text(made.tokenizer, secret.suffix) for secret in made.secrets if secret.member]


# --- nulls of a table ---


@pytest.mark.parametrize("kept", ["jsonl", "parquet"])
def test_the_form_filled_writes_what_a_table_of_arrow_hands_to_a_trainer(
    kept: str, tmp_path: Path
) -> None:
    """Twin: the rows of `datasets.Dataset.from_list` through the chat template, as TRL 1.16 gives
    them to it."""
    rows = [
        {"messages": messages(talk("Who?", "Ann.")), "tools": [tool("a", who="string")]},
        {"messages": calling({"n": 5}), "tools": [tool("b", amount="int", to="string")]},
        {"messages": calling({"m": "x"}), "tools": [tool("b", to="string")]},
    ]
    for row, options in zip(rows, ({"think": True}, {"style": 1}, None), strict=True):
        row["chat_template_kwargs"] = options
    words, table = tokenizer(TOOLS), Dataset.from_list(copy.deepcopy(rows))
    data = write(tmp_path / "d.jsonl", rows)
    if kept == "parquet":
        table.to_parquet(data := str(tmp_path / "d.parquet"))
    trained = [
        words.apply_chat_template(
            row["messages"],
            tools=row["tools"],
            tokenize=False,
            **(row["chat_template_kwargs"] or {}),
        )
        for row in table
    ]
    assert ("filled",) in variants(words, data)
    form = chat_rendering.parse_chat_rendering("model+filled", None, words)
    table_read = read_data_table("--data", data)
    said = [one for _, one in table_read.parse_conversations()]
    written = [
        chat.render_chat(words, one, form).text for one in said if isinstance(one, Conversation)
    ]
    assert written == trained and "null" in written[0] and "think: None" in written[1]
    if kept == "parquet":  # a trainer that leaves nulls out, or that read the same rows from JSON
        assert ("no-nulls",) in variants(words, data)
        bare = chat_rendering.parse_chat_rendering("model+no-nulls", None, words)
        assert not any(
            "null" in chat.render_chat(words, one, bare).text
            for one in said
            if isinstance(one, Conversation)
        )


@pytest.mark.parametrize(
    "sides",
    [{"completion": []}, {"chosen": [], "rejected": [{"role": "assistant", "content": ""}]}],
)
def test_an_empty_completion_leaves_no_turn_of_the_prompt_with_a_loss(
    sides: dict[str, Any],
) -> None:
    prompt = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    layout = conversation_rows.PREFERENCES if "chosen" in sides else ("prompt", "completion")
    first, *_ = conversation_rows.parse_conversations(layout, {"prompt": prompt, **sides})
    assert len(first.messages) == 3 and not first.is_learnt
    assert all(conversation_rows.NO_LOSS in message for message in first.messages)


def test_a_form_that_writes_the_same_is_not_tried(tmp_path: Path) -> None:
    """Nulls that a template does not write, arguments that are objects, no column: one form."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": "Who?", "name": "n"},
                {"role": "assistant", "content": "Ann."},
            ]
        },
        {"messages": messages(talk("And?", "Bob."))},
    ]
    assert variants(tokenizer(), write(tmp_path / "d.jsonl", rows)) == [()]


def test_non_members_are_filled_with_the_keys_of_the_data(tmp_path: Path) -> None:
    """Members and non-members are compared in one form: keys of one side would tell them apart."""
    member = {"messages": messages(talk("Who?", "Ann.")), "tools": [tool("a", who="string")]}
    other = {"messages": messages(talk("Who?", "Bob.")), "tools": [tool("a", to="string")]}
    form = chat_rendering.parse_chat_rendering("model+filled", None, words := tokenizer(TOOLS))
    data, fresh = write(tmp_path / "d.jsonl", [member]), write(tmp_path / "n.jsonl", [other])
    made = read_files(data, words, nonmembers=fresh, known_fraction=0, form=form)
    prefix = next(text(words, secret.prefix) for secret in made.secrets if not secret.member)
    assert '"parameters": {"who": null, "to": {"type": "string"}}' in prefix


# --- columns next to the turns ---


def test_a_system_column_is_tried_with_and_without(tmp_path: Path) -> None:
    """TRL 1.16 leaves the column out; axolotl and ms-swift put it in. A system turn is no
    choice."""
    row = {"system": "You are a clerk.", "messages": messages(talk("Who?", "Ann."))}
    data, words = write(tmp_path / "d.jsonl", [row]), tokenizer()
    assert variants(words, data) == [(), ("no-system-column",)]
    form = chat_rendering.parse_chat_rendering("model+no-system-column", None, words)
    (secret,) = read_files(data, words, known_fraction=0, form=form).secrets
    assert text(words, secret.prefix) == words.apply_chat_template(
        row["messages"][:1], tokenize=False, add_generation_prompt=True
    )
    assert variants(
        words,
        write(tmp_path / "t.jsonl", [{"messages": messages(talk("Who?", "Ann.", system="S."))}]),
    ) == [()]


def test_an_empty_list_of_tools_is_kept_and_tried_without(tmp_path: Path) -> None:
    """TRL 1.16 hands the empty list to the template, and Llama 3's writes a preamble then."""
    data = write(tmp_path / "d.jsonl", [{"tools": [], "messages": messages(talk("Who?", "Ann."))}])
    words = tokenizer(TOOLS)
    assert variants(words, data) == [(), ("no-empty-tools",)]
    (secret,) = read_files(data, words, known_fraction=0).secrets
    assert text(words, secret.prefix).startswith("Tools: []\n")
    assert (
        parse_conversation(
            ("messages",), {"messages": messages(talk("a", "b")), "tools": "[]"}, keep_nulls=False
        ).tools
        == []
    )


@pytest.mark.parametrize(
    "given", [[["Who?", "Ann."], ["And?", "Bob."]], '[["Who?", "Ann."], ["And?", "Bob."]]']
)
def test_a_history_comes_before_its_instruction(given: Any, tmp_path: Path) -> None:
    """LLaMA-Factory's Alpaca layout: earlier answers were learnt as the last one was."""
    row = {"instruction": "Who else?", "input": "", "output": "Carl.", "history": given}
    data, words = (
        write(tmp_path / "d.jsonl", [row, {**row, "history": None, "output": "Dan."}]),
        tokenizer(),
    )
    for template in ("model", "alpaca", "alpaca+line", "none"):
        form = chat_rendering.parse_chat_rendering(template, None, words)
        made = read_files(data, words, known_fraction=0, form=form)
        assert [answer.strip() for answer in suffixes(made)] == ["Ann.", "Bob.", "Carl.", "Dan."]
    turns = talk("Who?", "Ann.", "And?", "Bob.", "Who else?", "Carl.")
    form = chat_rendering.parse_chat_rendering("model", None, words)
    whole = words.apply_chat_template(messages(turns), tokenize=False)
    third = read_files(data, words, known_fraction=0, form=form).secrets[2]
    assert whole.startswith(text(words, (*third.prefix, *third.suffix)))
    with pytest.raises(AuditError, match="a history that is no list of questions and answers"):
        read_files(
            write(tmp_path / "b.jsonl", [{**row, "history": [["Who?"]]}]), words, known_fraction=0
        )


def test_rows_without_an_instruction_are_left_out_of_alpaca_by_the_file(tmp_path: Path) -> None:
    """The refusal named neither the file nor the rows, though only the non-members were chats."""
    words = tokenizer()
    row = {"instruction": "Who else?", "input": "", "output": "Carl."}
    data = write(tmp_path / "d.jsonl", [row])
    fresh = write(tmp_path / "n.jsonl", [{"messages": messages(talk("Who?", "Ann."))}])
    form = chat_rendering.parse_chat_rendering("alpaca", None, words)
    expected = r"nothing is left of --nonmembers .*1 row: without instruction and output, which"
    with pytest.raises(AuditError, match=expected):
        read_files(data, words, known_fraction=0, form=form, nonmembers=fresh)


# --- what a row says of its own training ---

MARKS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"weight": 0}, {"weight": 1}),
    ({"weight": 0.0}, {"weight": 0.5}),
    ({"train": False}, {"train": True}),
    ({"train": 0}, {"train": 1}),
    ({"trainable": False}, {"trainable": None}),
    ({"training": False}, {"training": True}),
    ({"loss": False}, {"loss": True}),
    ({"loss_scale": 0}, {"loss_scale": 2.0}),
    (
        {"training_detail": [{"begin_offset": 0, "end_offset": 9, "train": False}]},
        {"training_detail": [{"train": 1}]},
    ),
]


def test_a_row_without_a_usable_answer_is_left_out_for_all_reasons(tmp_path: Path) -> None:
    turns = messages(talk("Who?", "Ann is it.", "And?", "")) + messages(talk("So?", ""))
    turns[1]["weight"] = 0
    rows = [{"messages": turns}, {"messages": messages(talk("Who?", "Bob is it."))}]
    made = read_files(write(tmp_path / "d.jsonl", rows), tokenizer(CHATML), known_fraction=0)
    (reason,) = made.record_counts["members"].left_out
    assert reason.startswith("the row marks it as not trained on")
    assert reason.endswith(", or an empty answer")


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize(("mark", "other"), MARKS, ids=str)
def test_an_answer_that_had_no_loss_is_no_member(
    mark: dict[str, Any], other: dict[str, Any], template: str, tmp_path: Path
) -> None:
    """OpenAI, Mistral, Together, axolotl, verl, ms-swift: it is read, and neither attacked nor
    trained on."""
    turns = messages(talk("Who?", "Ann is it.", "And?", "Bob is it."))
    turns[1], turns[3] = turns[1] | mark, turns[3] | other
    data, words = (
        write(tmp_path / "d.jsonl", [{"messages": turns}, {"messages": turns[:2]}]),
        tokenizer(template),
    )
    made = read_files(data, words, known_fraction=0)
    assert suffixes(made) == ["Bob is it."]
    assert text(words, made.secrets[0].prefix).count("Ann is it.") == 1
    assert (
        sum("marks it as not trained on" in note and "left out 1" in note for note in made.notes)
        == 2
    )
    assert not any("writes nothing of" in note for note in made.notes)
    (said, _), _ = read_unit_texts(data)
    form = chat_rendering.parse_chat_rendering("model", None, words)
    for whose in ("assistant", "all"):
        (record,), _ = training._tokenize_conversations(words, [said], whose, form)  # type: ignore[list-item]
        assert record.learnt is not None
        learnt = "".join(
            words.decode([t]) for t, own in zip(record.tokens, record.learnt, strict=True) if own
        )
        assert "Bob is it." in learnt and "Ann" not in learnt


def test_a_row_that_had_no_loss_is_no_member_and_chooses_no_form(tmp_path: Path) -> None:
    rows = [
        {"messages": messages(talk("Who?", f"{name} is it.")), "weight": weight}
        for name, weight in ABC
    ]
    data = write(tmp_path / "d.jsonl", rows)
    made = read_files(data, tokenizer(), known_fraction=0)
    assert suffixes(made) == ["Ann is it.", "Carl is it."]
    chosen = sample_data_conversations(TableReader(DataPlan(data=data)), "--data", data, 9)
    assert chosen is not None and len(chosen) == 2


ABC = [("Ann", 1), ("Bob", 0), ("Carl", None)]


def test_marks_of_a_csv_are_text(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text(
        "prompt,completion,weight\nWho? ,Ann.,1\nWho? ,Bob.,0\nWho? ,Carl.,\n"
    )
    made = read_files(str(tmp_path / "d.csv"), tokenizer(), known_fraction=0)
    assert [answer.strip() for answer in suffixes(made)] == ["Ann.", "Carl."]


def test_answers_within_a_prompt_have_no_loss_by_default(tmp_path: Path) -> None:
    """TRL 1.16: completion_only_loss is on if rows have a prompt and a completion, whatever is in
    the prompt."""
    before = messages(talk("Hello", "Good day.", "Who?"))
    row = {"prompt": before, "completion": messages(talk("", "Ann.", "And?", "Bob."))[1:]}
    data, words = write(tmp_path / "d.jsonl", [row]), tokenizer()
    made = read_files(data, words, known_fraction=0)
    assert suffixes(made) == ["Ann.", "Bob."]
    assert any("completion_only_loss" in note for note in made.notes)
    (said,), _ = read_unit_texts(data)
    form = chat_rendering.parse_chat_rendering("model", None, words)
    for whose, is_learnt in (("assistant", False), ("all", True)):
        (record,), _ = training._tokenize_conversations(words, [said], whose, form)  # type: ignore[list-item]
        mask = record.learnt or [True] * len(record.tokens)
        learnt = "".join(
            words.decode([t]) for t, own in zip(record.tokens, mask, strict=True) if own
        )
        assert ("Good day." in learnt) is is_learnt and "Ann." in learnt and "Bob." in learnt


# --- tool calls ---


@pytest.mark.parametrize("content", ["", "I look it up."])
def test_tool_calls_are_secrets_and_learnt(content: str, tmp_path: Path) -> None:
    turns = calling({"of": "Ann Day"})
    turns[1]["content"] = content
    data, words = write(tmp_path / "d.jsonl", [{"messages": turns}]), tokenizer(TOOLS)
    made = read_files(data, words, known_fraction=0)
    call = '<call>door {"of": "Ann Day"}</call>'
    assert suffixes(made) == [*([content] if content else []), call, "It is Ann."]
    (said,), _ = read_unit_texts(data)
    form = chat_rendering.parse_chat_rendering("model", None, words)
    (record,), _ = training._tokenize_conversations(words, [said], "assistant", form)  # type: ignore[list-item]
    assert record.learnt is not None
    learnt = "".join(
        words.decode([t]) for t, own in zip(record.tokens, record.learnt, strict=True) if own
    )
    assert learnt.replace("\n", "") == f"{content}{call}<|im_end|>It is Ann.<|im_end|>"


def test_a_header_that_tool_calls_change_is_no_obstacle(tmp_path: Path) -> None:
    """gpt-oss and others begin a turn of calls in another way than one of words."""
    template = TOOLS.replace("m.role + '\n'", "m.role + (' calls' if m.tool_calls else '') + '\n'")
    data, words = (
        write(tmp_path / "d.jsonl", [{"messages": calling({"of": "Ann"})}]),
        tokenizer(template),
    )
    call, answer = suffixes(read_files(data, words, known_fraction=0))
    assert '<call>door {"of": "Ann"}</call>' in call and answer == "It is Ann."


def test_arguments_as_json_text_are_tried_decoded(tmp_path: Path) -> None:
    """OpenAI's files hold them as text; axolotl decodes them, TRL 1.16 does not."""
    given, words = calling('{"of": "Ann"}'), tokenizer(TOOLS)
    data = write(tmp_path / "d.jsonl", [{"messages": given}])
    assert variants(words, data) == [(), ("decoded-arguments",)]
    form = chat_rendering.parse_chat_rendering("model+decoded-arguments", None, words)
    decoded = words.apply_chat_template(calling({"of": "Ann"}), tokenize=False)
    secret = read_files(data, words, known_fraction=0, form=form).secrets[-1]
    assert decoded.startswith(text(words, (*secret.prefix, *secret.suffix)))


@pytest.mark.parametrize("thought", ["", "<think>Of doors.</think>"])
@pytest.mark.parametrize(
    "roles", [("function_call", "observation"), ("tool_call", "tool_response")]
)
def test_turns_of_calling_roles_are_calls_of_tools(
    roles: tuple[str, str], thought: str, tmp_path: Path
) -> None:
    """LLaMA-Factory's ShareGPT (its names) and ms-swift (its own): JSON text, written as a template
    writes calls."""
    call = {"name": "door", "arguments": {"of": "Ann"}}
    contents = ("Which door?", thought + json.dumps(call), "4711", "It is Ann.")
    names = ("human", roles[0], roles[1], "gpt")
    given = [{"from": name, "value": value} for name, value in zip(names, contents, strict=True)]
    data, words = write(tmp_path / "d.jsonl", [{"conversations": given}]), tokenizer(TOOLS)
    made = read_files(data, words, known_fraction=0)
    assert [one for one in suffixes(made) if one != "Of doors."] == [
        '<call>door {"of": "Ann"}</call>',
        "It is Ann.",
    ]
    openai = calling({"of": "Ann"})
    openai[1]["content"] = thought
    whole, last = words.apply_chat_template(openai, tokenize=False), made.secrets[-1]
    assert whole.startswith(text(words, (*last.prefix, *last.suffix)))
    assert variants(words, data) == [(), ("given-roles",)] if not thought else True
    form = chat_rendering.parse_chat_rendering("model+given-roles", None, words)
    as_text = suffixes(read_files(data, words, known_fraction=0, form=form))
    assert json.dumps(call) in as_text and as_text[-1] == "It is Ann."


@pytest.mark.parametrize("value", ["no JSON", "[]", '{"name": "door"}', "4", '["door"]'])
def test_a_calling_turn_that_is_no_call_stays_text(value: str, tmp_path: Path) -> None:
    given = [{"from": "human", "value": "Which?"}, {"from": "function_call", "value": value}]
    made = read_files(
        write(tmp_path / "d.jsonl", [{"conversations": given}]), tokenizer(TOOLS), known_fraction=0
    )
    assert suffixes(made) == [value]


def test_bare_tools_are_tried_wrapped(tmp_path: Path) -> None:
    """LLaMA-Factory and ms-swift put a bare function under the key of OpenAI's API; TRL 1.16 does
    not."""
    bare, words = tool("door", of="string")["function"], tokenizer(TOOLS)
    row = {"messages": messages(talk("Who?", "Ann.")), "tools": json.dumps([bare])}
    data = write(tmp_path / "d.jsonl", [row])
    assert variants(words, data) == [(), ("wrapped-tools",)]
    form = chat_rendering.parse_chat_rendering("model+wrapped-tools", None, words)
    (secret,) = read_files(data, words, known_fraction=0, form=form).secrets
    wrapped = [{"type": "function", "function": bare}]
    written = words.apply_chat_template(row["messages"], tools=wrapped, tokenize=False)
    assert written.startswith(text(words, (*secret.prefix, *secret.suffix)))
    assert variants(words, write(tmp_path / "w.jsonl", [row | {"tools": wrapped}])) == [()]


# --- preferences ---

ASKED = messages(talk("Who?"))
GOOD, BAD = messages(talk("", "Ann."))[1:], messages(talk("", "Bob."))[1:]
PREFERENCES: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "Who? ", "chosen": "Ann.", "rejected": "Bob."},
    "texts, prompt within": {"chosen": "Who? Ann.", "rejected": "Who? Bob."},
    "messages": {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
    "messages, prompt within": {"chosen": [*ASKED, *GOOD], "rejected": [*ASKED, *BAD]},
    "a prompt that is there twice": {
        "prompt": "Who?",
        "chosen": [*ASKED, *GOOD],
        "rejected": [*ASKED, *BAD],
    },
    "a text before answers": {"prompt": "Who?", "chosen": GOOD, "rejected": BAD},
    "messages before texts": {"prompt": ASKED, "chosen": "Ann.", "rejected": "Bob."},
    "LLaMA-Factory": {"instruction": "Who?", "input": "", "chosen": "Ann.", "rejected": "Bob."},
    "one message": {"prompt": ASKED, "chosen": GOOD[0], "rejected": BAD[0]},
}


@pytest.mark.parametrize("kind", PREFERENCES)
def test_both_sides_of_a_preference_are_secrets_in_groups(kind: str, tmp_path: Path) -> None:
    row, words = PREFERENCES[kind], tokenizer()
    made = read_files(write(tmp_path / "d.jsonl", [row]), words, known_fraction=0)
    assert [(secret.group, text(words, secret.suffix).strip()) for secret in made.secrets] == [
        ("chosen", "Ann."),
        ("rejected", "Bob."),
    ]
    assert len({secret.document for secret in made.secrets}) == 1
    prefixes = {text(words, secret.prefix).strip() for secret in made.secrets}
    assert len(prefixes) == 1 and "Who?" in prefixes.pop()
    if "prompt" not in row and "chosen" in row and "instruction" not in row:  # the twin of TRL
        assert extract_prompt(row)["chosen"] in (GOOD, "Ann.", " Ann.")


def test_a_prompt_is_not_lost_where_both_answers_begin_alike(tmp_path: Path) -> None:
    row = {"prompt": ASKED, "chosen": "It is Ann.", "rejected": "It is Bob."}
    words = tokenizer()
    made = read_files(write(tmp_path / "d.jsonl", [row]), words, known_fraction=0)
    assert suffixes(made) == ["It is Ann.", "It is Bob."]
    assert all("Who?" in text(words, secret.prefix) for secret in made.secrets)


def test_turns_of_a_prompt_have_no_loss_in_preference_training(tmp_path: Path) -> None:
    before = messages(talk("Hello", "Good day.", "Who?"))
    row = {"prompt": before, "chosen": GOOD, "rejected": BAD}
    made = read_files(write(tmp_path / "d.jsonl", [row]), tokenizer(), known_fraction=0)
    assert suffixes(made) == ["Ann.", "Bob."]
    assert any("2 answers: a turn of the prompt" in note for note in made.notes)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (
            {"prompt": "Who?", "completion": None},
            "its answer is neither a text nor a list but null",
        ),
        ({"prompt": 7, "completion": "Ann."}, "its prompt is neither a text nor a list but a numb"),
        (
            {"prompt": json.dumps(ASKED), "completion": "Ann."},
            "its prompt is a list of messages written as text: give lists, as in JSONL, or ",
        ),
        (
            {"prompt": "Who?", "completion": str(GOOD)},
            "its answer is a list of messages written as text",
        ),
        (
            {"prompt": "Who?", "chosen": None, "rejected": "Ann."},
            "its chosen side is neither a text nor a list but null",
        ),
        (
            {"chosen": "Who? Ann.", "rejected": 7},
            "its rejected side is neither a text nor a list but a number",
        ),
        (
            {"instruction": "Who?", "chosen": "Ann.", "rejected": None},
            "its rejected side is neither a text nor a list but null",
        ),
    ],
)
def test_a_cell_of_another_type_is_named(bad: dict[str, Any], why: str, tmp_path: Path) -> None:
    good = {"prompt": "Who? ", "chosen": "Ann.", "rejected": "Bob."}
    if "completion" in bad:
        good = {"prompt": "Who?", "completion": "Ann."}
    data = write(tmp_path / "d.jsonl", [good, bad])
    made = read_files(data, tokenizer(), known_fraction=0)
    counts = made.record_counts["members"]
    assert counts.audited == 1 and len(counts.left_out) == 1
    assert why in next(iter(counts.left_out)) and any(why in note for note in made.notes)


@pytest.mark.parametrize("column", ["messages", "conversations"])
@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("is_large", [False, True])
def test_messages_as_json_text_are_read_as_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str, ending: str, is_large: bool
) -> None:
    limit = None
    if is_large:
        limit = 3
        monkeypatch.setattr("auditor.benchmarks.data.large_tables.LARGE", 4)
        monkeypatch.setattr("auditor.benchmarks.data.large_tables.SAMPLE", 4)
    talks = [messages(talk(f"Who is at door {i}?", f"It is Ann {i}.")) for i in range(8)]
    options = {"chat_template_kwargs": {"style": 1}}
    data = write(tmp_path / "d.jsonl", [{column: turns, **options} for turns in talks])
    cells = {
        column: [*map(json.dumps, talks[:-1]), json.dumps(talks[-1], indent=1)],
        "chat_template_kwargs": ["", *[json.dumps({"style": 1})] * 7],
    }
    table = pandas.DataFrame(cells)
    other = tmp_path / f"d.{ending}"
    if ending == "csv":
        table.to_csv(other, index=False)
    else:
        table.to_parquet(other)
    expected = read_files(data, tokenizer(), known_fraction=0, limit=limit)
    made = read_files(str(other), tokenizer(), known_fraction=0, limit=limit)
    assert len(made.secrets) == (limit or 8) and made.secrets == expected.secrets


def test_a_history_or_a_mark_of_another_type_is_no_bug(tmp_path: Path) -> None:
    row = {"instruction": "Who?", "input": "", "output": "Ann."}
    data = write(tmp_path / "d.jsonl", [row, {**row, "history": 5}])
    made = read_files(data, tokenizer(), known_fraction=0)
    assert len(made.secrets) == 1 and any("a history that is no list" in n for n in made.notes)
    said = messages(talk("Who?", "Ann."))
    said[1]["training_detail"] = 5
    data = write(tmp_path / "m.jsonl", [{"messages": said}])
    assert suffixes(read_files(data, tokenizer(), known_fraction=0)) == ["Ann."]


@pytest.mark.parametrize("values", [(True, False), ("true", "False")])
def test_labels_of_completions_are_groups(values: tuple[Any, Any], tmp_path: Path) -> None:
    """KTO: rows of label false were trained against; the text form is chosen by the others."""
    rows = [
        {"prompt": "Who? ", "completion": name, "label": label}
        for name, label in zip(("Ann.", "Bob."), values, strict=True)
    ]
    data = write(tmp_path / "d.jsonl", rows)
    made = read_files(data, tokenizer(), known_fraction=0)
    assert [
        (secret.group, text(tokenizer(), secret.suffix).strip()) for secret in made.secrets
    ] == [
        ("wanted", "Ann."),
        ("unwanted", "Bob."),
    ]
    chosen = sample_data_conversations(TableReader(DataPlan(data=data)), "--data", data, 9)
    assert chosen is not None and [said.plain[1] for said in chosen] == ["Ann."]
    with pytest.raises(AuditError, match="got preferences"):
        read_unit_texts(data)


def test_labels_that_are_no_truth_values_are_no_groups(tmp_path: Path) -> None:
    """TRL 1.16's KTO takes 1 and 0 as true and false; a column with other numbers holds something
    else."""
    for labels, groups in {
        (1, 0): ["wanted", "unwanted"],
        (1, 2): [None, None],
        (0, "no"): [None, None],
    }.items():
        rows = [
            {"prompt": "Who? ", "completion": name, "label": label}
            for name, label in zip(("Ann.", "Bob."), labels, strict=True)
        ]
        made = read_files(write(tmp_path / "d.jsonl", rows), tokenizer(), known_fraction=0)
        assert [secret.group for secret in made.secrets] == groups
    turns = [{"messages": messages(talk("Who?", "Ann.")), "label": 0}]
    (secret,) = read_files(
        write(tmp_path / "m.jsonl", turns), tokenizer(), known_fraction=0
    ).secrets
    assert secret.group is None


def test_earlier_turns_of_a_labelled_conversation_had_no_loss(tmp_path: Path) -> None:
    """LLaMA-Factory's KTO: the last turn is the completion."""
    row = {"messages": messages(talk("Hello", "Good day.", "Who?", "Ann.")), "label": True}
    made = read_files(write(tmp_path / "d.jsonl", [row]), tokenizer(), known_fraction=0)
    assert suffixes(made) == ["Ann."] and made.secrets[0].group == "wanted"


def test_every_layout_is_named_where_none_is_there(tmp_path: Path) -> None:
    with pytest.raises(AuditError) as refused:
        read_files(
            write(tmp_path / "d.jsonl", [{"prompt": "Who?", "solution": "Ann."}]), tokenizer()
        )
    assert all("+".join(layout) in str(refused.value) for layout in LAYOUTS)
    assert "prompts only" in str(refused.value) and "rename" not in str(refused.value)


def test_an_answer_in_another_column_is_named_with_its_prompt(tmp_path: Path) -> None:
    answered = [{"prompt": "Who was it?", "response": "It was Ann."}]
    with pytest.raises(AuditError, match="rename to completion what was trained on: response"):
        read_files(write(tmp_path / "d.jsonl", answered), tokenizer())
    asked = [{"question": "Who was it?", "answer": "It was Ann."}]
    with pytest.raises(
        AuditError,
        match=r"got question, answer: rename .* or a question and its answer to prompt and",
    ):
        read_files(write(tmp_path / "q.jsonl", asked), tokenizer())


# --- columns that nobody reads ---

UNREAD = {
    "id": "row 1 of 2",
    "source": "web",
    "turns": [["Who?", "Ann."]],
    "facts": {"of": "Ann"},
    "scores": [1, 2],
    "words": "Ann is it.",
    "history": [["Who?", "Ann."]],
}


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "saved"])
def test_columns_with_texts_that_nobody_reads_are_named(form: str, tmp_path: Path) -> None:
    """Texts of several words, and lists and objects with texts; no single words, numbers, or
    columns that are read."""
    row = {
        "messages": messages(talk("Who?", "Ann.")),
        **UNREAD,
        "label": True,
        "system": "You are a clerk.",
    }
    if form == "csv":
        row = {key: value for key, value in row.items() if isinstance(value, str)} | {
            "text": "a b c d e f g h " * 4
        }
    data = write(tmp_path / "d.jsonl", [row]) if form == "jsonl" else str(tmp_path / f"d.{form}")
    table = Dataset.from_list([row])
    if form == "csv":
        table.to_csv(data, index=False)
    elif form == "parquet":
        table.to_parquet(data)
    elif form == "saved":
        table.save_to_disk(data)
    made = read_files(
        data, tokenizer(), prefix_length=4, suffix_length=4, known_fraction=0, group_column="id"
    )
    wanted = ("words", "system") if form == "csv" else ("turns", "facts", "words", "history")
    assert made.unread_columns == wanted


KINDS: dict[str, tuple[Any, bool]] = {
    "turns": ([{"who": "a", "what": "b"}], True),
    "lists": (["Ann"], True),
    "nested": ([[["Ann"]]], True),
    "json": ('{"who":"Ann"}', True),
    "chinese": ("我的电话号码是一二三四五", True),
    "long": ("x" * 81, True),
    "image": ("photo.png", True),
    "Audio": ({"bytes": None, "path": None}, True),
    "label": ("is it Ann", True),
    "split": ("train", False),
    "city": ("東京", False),
    "uuid": ("0f8fad5b-d9cb-469f-a165-70867728950e", False),
    "vector": ([0.5, 1], False),
    "images": ([], False),
    "empty": (None, False),
}


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved"])
def test_a_column_of_any_kind_of_text_is_named_wherever_it_begins(
    form: str, tmp_path: Path
) -> None:
    """Also if its first 250 rows are empty."""
    rows: list[dict[str, Any]] = [
        {"text": "a b c d e f g h " * 4, **dict.fromkeys(KINDS)} for _ in range(250)
    ]
    rows[-1] |= {name: value for name, (value, _) in KINDS.items()}
    data = write(tmp_path / "d.jsonl", rows) if form == "jsonl" else str(tmp_path / f"d.{form}")
    if form == "parquet":
        Dataset.from_list(rows).to_parquet(data)
    elif form == "saved":
        Dataset.from_list(rows).save_to_disk(data)
    table = read_record_table("--data", data, ("text",))
    assert set(table.texts) == {"text", *(name for name, (_, is_text) in KINDS.items() if is_text)}


def test_bytes_of_a_picture_are_named(tmp_path: Path) -> None:
    rows = [{"text": "a b c d", "scan": {"bytes": b"PNG", "path": None}}]
    Dataset.from_list(rows).to_parquet(data := str(tmp_path / "d.parquet"))
    assert read_record_table("--data", data, ("text",)).texts == ("text", "scan")


def test_columns_that_a_layout_reads_are_not_named(tmp_path: Path) -> None:
    row = {
        "instruction": "Who is it?",
        "input": "a b",
        "output": "Ann is.",
        "history": [["a b", "c"]],
        "system": "a b",
    }
    assert (
        read_files(write(tmp_path / "d.jsonl", [row]), tokenizer(), known_fraction=0).unread_columns
        == ()
    )
    sides = {"prompt": "Who is it?", "chosen": " It is Ann.", "rejected": " It is Bob."}
    assert (
        read_files(
            write(tmp_path / "p.jsonl", [sides]), tokenizer(), known_fraction=0
        ).unread_columns
        == ()
    )
