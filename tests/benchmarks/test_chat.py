"""Conversations: what a template writes of them, what of that is learnt, what an attacker is told,
and refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trl
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from auditor.benchmarks.data import chat, chat_rendering, cutting
from auditor.benchmarks.data.chat_rendering import ChatRendering
from auditor.benchmarks.data.conversation_rows import Conversation
from auditor.benchmarks.data.cut_places import TextLengths
from auditor.benchmarks.data.data_records import DataRecord
from auditor.core.errors import AuditError
from auditor.core.plan_parts import TURNS, DataPlan, get_known_share
from auditor.runs import training
from tests.conftest import check_command, read_files
from tests.zoo.families import save

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% "
    "generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% "
    "endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# the system turn goes into the first user turn, answers stand behind a space, and are trimmed
INST = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set sys = messages[0].content + '\n\n' "
    "%}"
    "{% set messages = messages[1:] %}{% else %}{% set sys = '' %}{% endif %}{% for m in messages "
    "%}"
    "{% if m.role == 'user' %}{{ '[INST] ' + (sys if loop.first else '') + m.content + ' [/INST]' "
    "}}"
    "{% else %}{{ ' ' + (m.content | trim) + eos_token }}{% endif %}{% endfor %}"
)
ALTERNATING = (
    "{{ raise_exception('System role not supported') if messages[0].role == 'system' }}" + CHATML
)
DEAF = CHATML.replace("in messages %}", "in messages if m.role != 'system' %}")
THINKING = CHATML.replace(
    "m.content", "('' if m.role != 'assistant' else '<think>\n\n</think>\n\n') + m.content"
)
WORDS = [
    "Dear Ann, the code is 4711.",
    "What is the code of door seven?",
    "You are a bank's clerk.",
    " It is 0815.",
]


def tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    asked: dict[str, Any] = {
        "vocab_size": 350,
        "special_tokens": special,
        "initial_alphabet": alphabet,
    }
    made.train_from_iterator(WORDS, trainers.BpeTrainer(**asked, show_progress=False))
    found = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    found.chat_template = template
    return found


def talk(*contents: str, system: str | None = None) -> Conversation:
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]
    return Conversation((*([{"role": "system", "content": system}] if system else []), *turns))


def messages(said: Conversation) -> list[Any]:
    return list(said.messages)


def own(words: Any, said: Conversation | None = None) -> ChatRendering:
    return chat_rendering.choose_usual_rendering(words, [said or TWO], "2026-01-02")


def written(words: Any, said: Conversation) -> chat.RenderedChat:
    return chat.render_chat(words, said, own(words, said))


def text(words: Any, tokens: Sequence[int]) -> str:
    return str(words.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def cut(words: Any, said: Conversation, knows: str, longest: int, shown: int | None) -> list[Any]:
    options = cutting.Cutting(words, TextLengths(shown, longest), knows)
    return list(
        cutting.cut_answers_into_secrets(options, own(words, said), said, written(words, said))
    )


TWO = talk(
    "Hello, I am Ann.",
    "The code is 4711.",
    "And of door seven?",
    "It is 0815.",
    system="You are a clerk.",
)


# --- what a template writes ---


@pytest.mark.parametrize("template", [CHATML, MARKED, INST, THINKING])
def test_prefix_and_suffix_are_what_the_model_read_and_said(template: str) -> None:
    """Of every answer: all before it is the prefix, template and earlier answers included; its own
    text the suffix."""
    words = tokenizer(template)
    whole = str(words.apply_chat_template(messages(TWO), tokenize=False))
    found = [one for one in cut(words, TWO, "user", 50, None) if isinstance(one, DataRecord)]
    assert [text(words, one.suffix).strip() for one in found] == [
        "The code is 4711.",
        "It is 0815.",
    ]
    for one in found:
        assert whole.startswith(text(words, (*one.prefix, *one.suffix)))
        assert (one.wording.prefix, one.wording.suffix) == (
            text(words, one.prefix),
            text(words, one.suffix),
        )
        assert "".join(one.wording.suffix_text_by_token) == one.wording.suffix
        ids = words(whole, add_special_tokens=False)["input_ids"]
        # as it was trained on
        assert tuple(ids[: len(one.prefix) + len(one.suffix)]) == (
            *one.prefix,
            *one.suffix,
        )


@pytest.mark.parametrize("template", [CHATML, MARKED, INST])
def test_a_long_answer_is_attacked_all_along(tmp_path: Path, template: str) -> None:
    """Each window after all that comes before it; with a length given, or only a part known, its
    start as before."""
    answer = " ".join(f"{i:03d}," for i in range(90))
    data = rows(tmp_path, messages(talk("Count.", answer, "Again?", "No.")))
    words = tokenizer(template)
    secrets = read_files(data, words, known_fraction=0).secrets
    whole = str(
        words.apply_chat_template(messages(talk("Count.", answer, "Again?", "No.")), tokenize=False)
    )
    first, *later, last = secrets
    assert len(secrets) > 3
    assert text(words, last.suffix).strip() == "No."
    assert "".join(text(words, secret.suffix) for secret in (first, *later)).strip() == answer
    assert all(
        whole.startswith(text(words, (*secret.prefix, *secret.suffix))) for secret in secrets
    )
    counts = read_files(data, words, known_fraction=0).record_counts["members"]
    assert (counts.given, counts.audited) == (1, 1)
    assert counts.tokens == counts.attacked_tokens == sum(len(secret.suffix) for secret in secrets)
    for asked in ({"suffix_length": 50}, {"knows": "partial:0.1"}):
        assert len(read_files(data, words, known_fraction=0, **asked).secrets) == 1 + (
            "suffix_length" in asked
        )


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_chat_beyond_the_context_does_not_refuse_the_others(tmp_path: Path, family: str) -> None:
    """Three that fit, one whose question does not, and one whose answer ends beyond: its start is
    attacked."""
    save(tmp_path / "model", family)
    said = [("Hi?", f"Code {i}{i}.") for i in range(3)] + [
        ("why " * 60, "So."),
        ("Hi?", "because " * 40),
    ]
    data = rows(tmp_path, *(messages(talk(*turns)) for turns in said))
    command = [
        "check",
        str(tmp_path / "model"),
        "--data",
        data,
        "--template",
        "none",
        "-o",
        str(tmp_path / "run"),
    ]
    check_command(*command)
    members = json.loads((tmp_path / "run" / "result.json").read_text())["benchmark"]["records"][
        "members"
    ]
    assert members["given"] == 5
    assert members["audited"] + sum(members["not_attacked"].values()) == 4
    (reason,) = members["left_out"]
    assert "tokens that the model reads at once" in reason
    assert sum(members["parts_left_out"].values()) > 2


@pytest.mark.parametrize("template", [CHATML, MARKED, INST])
@pytest.mark.parametrize(("turns", "said"), [("user", [0, 2]), ("system", []), ("tool", [])])
def test_whose_turns_are_attacked(template: str, turns: str, said: list[int]) -> None:
    """The turns of users, the system prompt and results of tools, as the model read them; each
    behind all before it."""
    contents = ["Hello, I am Ann.", "The code is 4711.", "And of door seven?", "It is 0815."]
    wanted = [contents[i] for i in said] or {
        "system": ["You are a clerk."],
        "tool": ["Door 7: 0815."],
    }[turns]
    row = TWO
    if turns == "tool":
        if template == INST:
            return  # writes no tools
        row = Conversation(
            (*TWO.messages[:4], {"role": "tool", "content": "Door 7: 0815."}, TWO.messages[4])
        )
    words = tokenizer(template)
    shown = chat.render_chat(words, row, own(words, row), turns)
    options = cutting.Cutting(words, TextLengths(suffix=50))
    found = list(cutting.cut_answers_into_secrets(options, own(words, row), row, shown))
    kept = [one for one in found if isinstance(one, DataRecord)]
    assert [text(words, one.suffix).strip() for one in kept] == wanted
    assert all(shown.tokens[: one.suffix_start] == one.prefix and one.prefix for one in kept)
    assert shown.tokens == chat.render_chat(words, row, own(words, row)).tokens


def test_a_file_of_conversations_is_attacked_by_the_turns_of_users(tmp_path: Path) -> None:
    data = rows(tmp_path, messages(TWO))
    made = read_files(data, tokenizer(), known_fraction=0, turns="user")
    assert [text(tokenizer(), one.suffix) for one in made.secrets] == [
        "Hello, I am Ann.",
        "And of door seven?",
    ]
    assert "user turns" in made.notes[1]
    (tmp_path / "plain.jsonl").write_text('{"text": "Hello, I am Ann."}\n')
    with pytest.raises(AuditError, match="--turns is about conversations"):
        read_files(str(tmp_path / "plain.jsonl"), tokenizer(), turns="user")


def test_all_turns_are_secrets_and_told_by_role(tmp_path: Path) -> None:
    """Each as it is cut where its role alone is attacked; results are by role, unless a column says
    otherwise."""
    data = rows(
        tmp_path,
        messages(
            Conversation((*TWO.messages[:4], {"role": "tool", "content": "0815."}, TWO.messages[4]))
        ),
    )
    every = read_files(data, tokenizer(), known_fraction=0, turns="all").secrets
    apart = {
        role: read_files(data, tokenizer(), known_fraction=0, turns=role).secrets for role in TURNS
    }
    assert {one.group for one in every} == set(TURNS) and len(every) == 6
    for role, secrets in apart.items():
        own = [(one.prefix, one.suffix) for one in every if one.group == role]
        assert own == [(one.prefix, one.suffix) for one in secrets]


def test_a_template_that_is_given_is_taken_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(CHATML)
    asked = training.TrainingRequest(
        method="none",
        model="base",
        data="rows",
        out=tmp_path,
        template=str(tmp_path / "chat.jinja"),
    )
    assert training._choose_chat_rendering(asked, tokenizer(None), [TWO]).source == CHATML


def test_turns_that_are_not_there_or_not_told_apart_are_refused() -> None:
    words = tokenizer()
    with pytest.raises(chat.UnusableConversation, match="no tool turn"):
        chat.render_chat(words, TWO, own(words, TWO), "tool")
    with pytest.raises(
        AuditError, match=r"for --turns user, .* got the text form none: --template model"
    ):
        chat.render_chat(words, TWO, ChatRendering(chat_rendering.NONE), "user")
    with pytest.raises(
        AuditError, match="expected --knows user or partial:F with --turns user, got system"
    ):
        DataPlan(turns="user", knows="system").check()


def test_what_an_attacker_knows() -> None:
    words = tokenizer()
    (system,) = cut(words, TWO, "system", 50, None)
    assert isinstance(system, DataRecord)
    assert (
        system.wording.prefix
        == "<|im_start|>system\nYou are a clerk.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (
        text(words, system.prefix) == system.wording.prefix
        and system.wording.suffix == "The code is 4711."
    )
    user, _ = cut(words, TWO, "user", 50, None)
    half, _ = cut(words, TWO, "partial:0.5", 50, None)
    assert isinstance(user, DataRecord) and isinstance(half, DataRecord)
    assert len(half.prefix) == len(user.prefix) + len(user.suffix) // 2
    assert (*half.prefix, *half.suffix) == (*user.prefix, *user.suffix)
    short, _ = cut(words, TWO, "user", 2, 3)
    assert isinstance(short, DataRecord) and (short.prefix, short.suffix) == (
        user.prefix[-3:],
        user.suffix[:2],
    )
    assert short.wording.prefix == text(words, short.prefix)


@given(st.lists(st.sampled_from(["a b", "The code\nis 1.", "é 7 ", "[x]"]), min_size=2, max_size=6))
def test_the_learnt_tokens_are_the_assistants(contents: list[str]) -> None:
    """Twin: HF's own mask of a template that marks answers; of one that does not, turn by turn as
    text."""
    said = talk(*contents)
    assert written(tokenizer(MARKED), said).learnt_token_mask("assistant") == _marks(
        tokenizer(MARKED), said
    )
    words = tokenizer(CHATML)
    found = written(words, said)
    learnt = "".join(
        words.decode([t])
        for t, own in zip(found.tokens, found.learnt_token_mask("assistant"), strict=True)
        if own
    )
    if all(content.isascii() for content in contents):
        assert learnt == "".join(
            f"{turn['content']}<|im_end|>\n"
            for turn in said.messages
            if turn["role"] == "assistant"
        )
    assert all(found.learnt_token_mask("all")) and len(found.learnt_token_mask("all")) == len(
        found.tokens
    )


def _marks(words: Any, said: Conversation) -> tuple[bool, ...]:
    told = words.apply_chat_template(
        messages(said), return_dict=True, return_assistant_tokens_mask=True
    )
    return tuple(map(bool, told["assistant_masks"]))


# --- columns ---

ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": messages(talk("Who?", "Ann."))},
    "developer": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Who?"}]},
            messages(TWO)[2],
        ]
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Ann."}]
    },
    "langchain": {
        "messages": [{"role": "Human", "content": "Who?"}, {"role": "AI", "content": "Ann."}]
    },
    "cohere": {
        "messages": [{"role": "User", "content": "Who?"}, {"role": "Chatbot", "content": "Ann."}]
    },
    "completion": {"prompt": "Who?", "completion": "Ann."},
    "both as messages": {
        "prompt": messages(talk("Who?")),
        "completion": [{"role": "assistant", "content": "Ann."}],
    },
    "alpaca": {"instruction": "Who?", "input": "", "output": "Ann."},
    "alpaca with input": {
        "instruction": "Who",
        "input": "is it?",
        "output": "Ann.",
        "system": "You are a clerk.",
    },
}


REQUEST = ". Write a response that appropriately completes the request.\n\n### Instruction:\n"
PREFIXES = {  # as their trainers write them: texts without a template, Alpaca's as it was published
    "completion": "Who?",
    "alpaca": f"Below is an instruction that describes a task{REQUEST}Who?\n\n### Response:",
    "alpaca with input": "Below is an instruction that describes a task, paired with an input that "
    "provides further "
    f"context{REQUEST}Who\n\n### Input:\nis it?\n\n### Response:",
}


@pytest.mark.parametrize("kind", ROWS)
def test_the_usual_columns_are_conversations(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(ROWS[kind]) + "\n")
    (secret,) = read_files(str(path), tokenizer(), known_fraction=0).secrets
    assert secret.wording is not None and secret.document is None
    assert secret.wording.suffix == ("The code is 4711." if kind == "developer" else "Ann.")
    assert secret.wording.prefix == PREFIXES.get(
        kind, "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    )


def rows(tmp_path: Path, *said: Any) -> str:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": one}) + "\n" for one in said))
    return str(path)


def test_the_corpus_is_whole_conversations_as_the_template_writes_them(tmp_path: Path) -> None:
    said = [talk("Who is it?", "It is Ann, as before."), talk("And now?", "It is Bob, as before.")]
    data = rows(tmp_path, *map(messages, said), [{"role": "user", "content": "Nobody answers"}])
    words = tokenizer()
    found = list(
        read_files(data, words, suffix_length=4, known_fraction=0.0).texts_with_repeat_counts(True)
    )
    assert [(text(words, tokens), times) for tokens, times in found] == [
        (written(words, one).text, 1) for one in said
    ]


def test_several_answers_of_a_conversation_stay_together(tmp_path: Path) -> None:
    """None is known whose neighbour is attacked: what came before the one holds the other."""
    data = rows(
        tmp_path, *(messages(talk("Who?", f"Ann {i}.", "And?", f"Bob {i}.")) for i in range(10))
    )
    made = read_files(data, tokenizer(), known_fraction=0.3, limit=4)
    assert (
        len(made.known) == 6
        and len(made.secrets) == 8
        and len({s.document for s in made.secrets}) == 4
    )
    assert {s.id for s in made.secrets} == {
        f"{s.document}-{part:04d}" for s in made.secrets for part in (0, 1)
    }
    assert made.framed and any("each with all its parts" in note for note in made.notes)


# --- what cannot be used ---

BAD: dict[str, tuple[Any, str]] = {
    "no assistant": (messages(talk("Who?")), "no assistant turn"),
    "roles of people": (
        [{"role": "Customer", "content": "Who?"}, {"role": "agent", "content": "Ann."}],
        "no assistant turn, only roles Customer, agent: rename to assistant the role",
    ),
    "names as roles": (
        [{"role": "user", "content": "Who?"}, {"role": "Ann Lee", "content": "Ann."}],
        "only roles user, 1 not shown, as it may be a name: rename to assistant",
    ),
    "nothing said": ([], "no message"),
    "empty": (messages(talk("Who?", " ")), "an empty answer"),
    "no role": ([{"content": "x"}], "a turn without a role, only content "),
    "other keys": (
        [{"sender": "user", "text": "Who?"}, {"sender": "Ann Lee", "text": "Ann."}],
        'a turn without a role, only sender, text (expected a JSON list of {"role": ...',
    ),
    "keys that are names": ([{"Ann Lee": "Who?"}], "a turn without a role, only 1 not shown"),
    "calls": (
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
        ],
        "tool calls that the chat template does not write",
    ),
    **{
        f"calls in another form: {calls}": (
            [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "Ann.", "tool_calls": calls},
            ],
            'tool_calls in another form than [{"function": {"name": ..., "arguments": ...}}]',
        )
        for calls in ("f()", {"name": "f"}, [None], [{"id": "1"}], [{"function": {"name": None}}])
    },
    "a call of OpenAI's old API": (
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "function_call": {"name": "f"}},
        ],
        "a function_call, which is not read: give it as tool_calls",
    ),
    "image": (
        [{"role": "user", "content": [{"type": "image"}]}, *messages(talk("Who?", "Ann."))[1:]],
        "a turn that is not text (image): only texts are audited",
    ),
    "tool use": (
        [*messages(talk("Who?")), {"role": "assistant", "content": [{"type": "tool_use"}]}],
        "a turn that is not text (tool_use): only texts are audited",
    ),
    "parts of text": ([{"role": "user", "content": ["Who?"]}], "a turn that is not text (text):"),
    "text": ("Who? Ann.", "its messages are no list but text (expected a JSON list"),
    "Python's lists": (
        str(messages(talk("Who?", "Ann."))),
        "no list but text that is not JSON, or has a key twice: write lists with json.dumps,",
    ),
    "columns": ({"role": ["user"], "content": ["Who?"]}, "no list but an object"),
    "words": (["Who?"], "no object"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_used_is_left_out_by_name(tmp_path: Path, kind: str) -> None:
    bad, why = BAD[kind]
    made = read_files(
        rows(tmp_path, messages(talk("Who?", "Ann.")), bad), tokenizer(), known_fraction=0
    )
    assert len(made.secrets) == 1 and any(why in note and "row 1" in note for note in made.notes)
    with pytest.raises(AuditError, match=re.escape(why)):
        read_files(rows(tmp_path, bad), tokenizer(), known_fraction=0)


def test_a_system_turn_of_several_parts_is_written(tmp_path: Path) -> None:
    """The template writes each part by itself, and changes its white space."""
    texts = "m.content | map(attribute='text') | map('trim')"
    template = CHATML.replace(
        "m.content +", f"(m.content if m.content is string else {texts} | join('] [')) +"
    )
    system = [{"type": "text", "text": text} for text in ("Be brief. ", "Be a clerk.")]
    said = [{"role": "system", "content": system}, *messages(talk("Who is it?", "It is Ann."))]
    assert len(read_files(rows(tmp_path, said), tokenizer(template), known_fraction=0).secrets) == 1
    with pytest.raises(
        AuditError,
        match=r"json.*, row 0 \(counted from 0\): .*drops it: leave the system turns out",
    ):
        first_alone = template.replace("join('] [')", "first")
        read_files(rows(tmp_path, said), tokenizer(first_alone), known_fraction=0)


def test_templates_that_cannot_write_a_conversation(tmp_path: Path) -> None:
    data = rows(tmp_path, messages(TWO))
    with pytest.raises(AuditError, match="expected a tokenizer with a chat template"):
        read_files(data, tokenizer(None), known_fraction=0)
    with pytest.raises(
        AuditError,
        match=r"json.*, row 0 \(counted from 0\): .*drops it: leave the system turns out",
    ):
        read_files(data, tokenizer(DEAF), known_fraction=0)
    with pytest.raises(AuditError, match=r"refuses it \(System role not supported\): give the"):
        read_files(data, tokenizer(ALTERNATING), known_fraction=0)
    quoting = "{{ raise_exception('not ' + messages[0].content) }}"
    with pytest.raises(AuditError) as refused:
        read_files(data, tokenizer(quoting), known_fraction=0)
    assert "clerk" not in str(refused.value)
    with pytest.raises(AuditError, match="no system turn to know"):
        read_files(
            rows(tmp_path, messages(talk("Who?", "Ann."))),
            tokenizer(),
            knows="system",
            known_fraction=0,
        )


def test_flags_that_say_nothing_to_the_data_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"text": "a b c d e f g h"}) + "\n")
    with pytest.raises(AuditError, match="--knows is about conversations"):
        read_files(str(path), tokenizer(), knows="user", known_fraction=0)
    with pytest.raises(AuditError, match="--windows slides over a text column"):
        read_files(rows(tmp_path, messages(TWO)), tokenizer(), windows=3, known_fraction=0)
    path.write_text(json.dumps({"messages": messages(TWO), "text": "a"}) + "\n")
    with pytest.raises(AuditError, match=r"expected one layout, got text, and messages"):
        read_files(str(path), tokenizer(), known_fraction=0)
    for bad in ("assistant", "partial", "partial:1", "partial:x", "user:0.5", "partial:nan", ""):
        with pytest.raises(AuditError, match="expected --knows system, user or partial:F"):
            get_known_share(bad)


# --- training on the same ---


def test_training_learns_the_answers_alone() -> None:
    """The records of a training have the mask that the attack's suffixes lie in."""
    words = tokenizer()
    (record,), said = training._tokenize_conversations(words, [TWO], "assistant", own(words))
    assert record.learnt is not None and "loss on assistant" in said[0]
    found = [one for one in cut(words, TWO, "user", 50, None) if isinstance(one, DataRecord)]
    for one in found:
        at = len(one.prefix)
        assert record.tokens[: at + len(one.suffix)] == (*one.prefix, *one.suffix)
        assert all(record.learnt[at : at + len(one.suffix)]) and not record.learnt[at - 1]
    (whole,), _ = training._tokenize_conversations(words, [TWO], "all", own(words))
    assert whole.learnt is None and whole.tokens == record.tokens


# --- families ---

DAILY = "{{ strftime_now('%d %b %Y') }}\n" + CHATML  # Llama 3.2, gpt-oss
PARTS = CHATML.replace("m.content", "m.content[0].text")  # a template that knows parts only
SILENT = CHATML.replace(
    "{% for m", "{% if tools %}{{ 'Tools: ' + (tools | tojson) }}{% endif %}{% for m"
)
FAMILIES = sorted(
    path.stem
    for path in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")
    if not re.search(
        "vl|idefics|llava|smolvlm", path.stem
    )  # those of images: their contents are parts
)
SAID = {
    "one": [("user", "Who?"), ("assistant", "It is Ann.")],
    "two": [
        ("user", "Who?"),
        ("assistant", "It is Ann."),
        ("user", "And?"),
        ("assistant", "Bob Day."),
    ],
    "thought": [
        ("user", "Who?"),
        ("assistant", "<think>\nHm.\n</think>\n\nIt is Ann."),
        ("user", "And?"),
        ("assistant", "<think>\nHm again.\n</think>\n\nBob Day."),
    ],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_answer_of_a_family_is_found_where_its_trainer_has_it(family: str) -> None:
    """Published templates, TRL's own for training among them: before, six families lost their
    answers.

    Twin: prefix and suffix are the first tokens of what transformers makes of the whole
    conversation.
    """
    words = tokenizer(
        (Path(trl.__file__).parent / "chat_templates" / f"{family}.jinja").read_text()
    )
    for said in SAID.values():
        talked = Conversation(tuple({"role": role, "content": content} for role, content in said))
        form = own(words, talked)
        asked = {"chat_template": chat_rendering.fix_template_date(words.chat_template, form.day)}
        ids = tuple(words.apply_chat_template(messages(talked), **asked)["input_ids"])
        found = [one for one in cut(words, talked, "user", 50, None) if isinstance(one, DataRecord)]
        assert [one.wording.suffix.strip() for one in found if "Hm" not in one.wording.suffix] == [
            content.rpartition("\n")[2] for role, content in said if role == "assistant"
        ]
        for one in found:
            assert (*one.prefix, *one.suffix) == ids[: len(one.prefix) + len(one.suffix)]


def test_the_day_is_the_one_that_is_given() -> None:
    words = tokenizer(DAILY)
    assert written(words, TWO).text.startswith("02 Jan 2026\n<|im_start|>system")
    with pytest.raises(AuditError, match="asks for the day as"):
        chat_rendering.fix_template_date("{{ strftime_now(how) }}", "2026-01-02")
    assert (
        ChatRendering("model", DAILY, (), "2026-01-02").digest
        != ChatRendering("model", DAILY, (), "2026-01-03").digest
    )


def test_what_a_row_has_goes_to_the_template_as_it_is(tmp_path: Path) -> None:
    """Twin: `apply_chat_template` on the row's own messages, tools and chat_template_kwargs."""
    template = SILENT + "{{ style }}"
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "door", "arguments": {"of": "seven"}},
    }
    said: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Which door?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "4711", "tool_call_id": "1", "name": "door"},
        {"role": "assistant", "content": "It is 4711."},
    ]
    row = {"messages": said, "tools": [{"type": "function", "function": {"name": "door"}}]}
    row |= {"chat_template_kwargs": {"style": "kind"}}
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps(row) + "\n")
    words = tokenizer(template)
    made = read_files(str(path), words, known_fraction=0)
    (secret,) = made.secrets
    whole = str(words.apply_chat_template(said, tools=row["tools"], style="kind", tokenize=False))
    assert (
        secret.wording is not None
        and whole.startswith(secret.wording.prefix_and_suffix_text)
        and "developer" in secret.wording.prefix
    )
    assert secret.wording.suffix == "It is 4711." and "Tools" in secret.wording.prefix
    unwritten = (
        "1 answer: tool calls that the chat template does not write as they were given (row 0"
    )
    for noted in (unwritten, "nothing of tool_calls (1 conversation)"):
        assert any(noted in note for note in made.notes)


def test_reasoning_is_a_secret_of_its_own_before_the_answer(tmp_path: Path) -> None:
    template = CHATML.replace(
        "m.content", "('<think>' + m.thinking + '</think>' if m.thinking else '') + m.content"
    )
    said = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "It is Ann.", "thinking": "Hm, Ann."},
    ]
    thought, answer = read_files(
        rows(tmp_path, said), tokenizer(template), known_fraction=0
    ).secrets
    assert thought.wording is not None and answer.wording is not None
    assert (thought.wording.suffix, answer.wording.suffix) == ("Hm, Ann.", "It is Ann.")
    assert answer.wording.prefix.endswith("<think>Hm, Ann.</think>")


def test_parts_of_a_text_go_to_a_template_that_knows_them() -> None:
    said = Conversation(
        tuple(
            {"role": role, "content": [{"type": "text", "text": text}]}
            for role, text in SAID["one"]
        )
    )
    for template in (PARTS, CHATML):
        (found,) = cut(tokenizer(template), said, "user", 50, None)
        assert isinstance(found, DataRecord) and found.wording.suffix == "It is Ann."
