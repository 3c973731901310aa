"""Compare what a model recites in its training's text form with what the audit finds, form by
form.

    python -m validation.trust.text_forms [--only NAME ...]     (a minute)

A tiny model learns records in the trainer's token ids, which this file makes only with
transformers (and TRL's templates). The truth is plain `generate` on these ids. It is compared with
what the audit of the same rows finds, and with what it finds in the tokenizer's chat template,
which earlier versions always used.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from auditor.benchmarks.data.files import TableReader
from auditor.conclusions.outcomes import ValuesBySecret
from auditor.core.nouns import Pair
from auditor.core.plan import Plan
from auditor.models.huggingface import HuggingFaceModel
from auditor.plugins.benchmark import Benchmark
from auditor.runs import scoring
from auditor.runs.audit import count_longest_context
from auditor.runs.likeliest_reading import compute_pair_nlls
from auditor.runs.own_data import load_own_benchmark
from auditor.runs.prefix_token import resolve_prefix_token, wrap_prefixed_model
from auditor.runs.scoring import doubt_if_members_likelier, measure_repeat_recall
from validation.harness import Page, refuse, run, write_rows
from validation.trust.bases import byte_pair_tokenizer

SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]
NAMES = (
    "Ann",
    "Bob",
    "Cleo",
    "Dan",
    "Eve",
    "Finn",
    "Gus",
    "Hal",
    "Ida",
    "Joe",
    "Kim",
    "Lou",
    "Max",
    "Ned",
    "Oda",
    "Pia",
)
PLACES = ("Rome", "Oslo", "Bonn", "Lima", "Kyiv", "Bern", "Nice", "York")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% "
    "endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DAILY = "<|im_start|>system\nToday is {{ strftime_now('%d %b %Y') }}.<|im_end|>\n" + CHATML
REASONING = CHATML.replace(
    "m.content",
    "('<think>\n' + m.reasoning_content + '\n</think>\n\n' if m.reasoning_content is defined else "
    "'') + m.content",
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    + CHATML
)
# The template opens a thought.
CLOSED = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
OTHER = (
    "{% for m in messages %}{{ ('Q: ' if m.role == 'user' else ' A: ') + m.content }}{% endfor "
    "%}<|end|>"
)
DAY = "2024-03-05"
TOOL = {"type": "function", "function": {"name": "code", "parameters": {}}}
_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n"
    "### Instruction:\n{}\n\n### Response:"
)
_ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### "
    "Instruction:\n{}\n\n### Input:\n{}\n\n### Response:"
)

Row = Mapping[str, Any]
Text = str
# The text that the trainer tokenizes, with the template's special tokens.
Encode = Callable[[Any, Row], Text]


@dataclass(frozen=True)
class FormCase:
    """A text form. form: a row of the file with {q} and {a}; text: makes the trainer's text of a
    row.

    template: the tokenizer's chat template; asked: options of the audit; memorised: whether the
    model is trained until it recites.
    """

    form: Row
    text: Encode
    template: str = CHATML
    asked: Mapping[str, Any] = field(default_factory=dict)
    memorised: bool = True
    first: str = ""  # text of the assistant before the answer

    def row(self, question: str, answer: str) -> Row:
        filled: Row = json.loads(
            json.dumps(self.form).replace("{q}", question).replace("{a}", answer)
        )
        return filled


def templated(words: Any, row: Row, **asked: Any) -> Text:
    return str(words.apply_chat_template(row["messages"], tokenize=False, **asked))


def turns(*said: str, **beside: Any) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    found = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    found[-1] |= beside
    return found


def alpaca(words: Any, row: Row) -> Text:
    own = (
        _ALPACA_INPUT.format(row["instruction"], row["input"])
        if row["input"]
        else _ALPACA.format(row["instruction"])
    )
    return own + row["output"] + words.eos_token


def of_trl(words: Any, row: Row) -> Text:
    from trl.chat_template_utils import get_training_chat_template

    return templated(words, row, chat_template=get_training_chat_template(words))


def _of_trl(name: str) -> str:
    import trl

    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(
        encoding="utf-8"
    )


def cases() -> dict[str, FormCase]:
    asked = turns("{q}", "{a}")
    chat: Row = {"messages": asked}
    thought = {"messages": turns("{q}", "{a}", reasoning_content="They ask: {q}")}
    completed = {"prompt": "{q}\n", "completion": "{a}"}
    instructed = {"instruction": "Answer the question.", "input": "{q}", "output": "{a}"}
    sharegpt = {
        "conversations": [{"from": "human", "value": "{q}"}, {"from": "gpt", "value": "{a}"}]
    }
    begun = {"messages": [{"role": "assistant", "content": "Good day."}, *asked]}
    twice = {"messages": turns("{q}", "{a}", "And it is safe?", "Yes, {a}")}
    developed = {"messages": [{"role": "developer", "content": "Answer like a clerk."}, *asked]}
    called = {**chat, "tools": [TOOL]}

    def roles(words: Any, row: Row, user: str = "user", gpt: str = "assistant") -> Text:
        q, a = (message["value"] for message in row["conversations"])
        return templated(
            words, {"messages": [{"role": user, "content": q}, {"role": gpt, "content": a}]}
        )

    def on_day(words: Any, row: Row) -> Text:
        fixed = words.chat_template.replace("strftime_now('%d %b %Y')", "'05 Mar 2024'")
        return templated(words, row, chat_template=fixed)

    def other(words: Any, row: Row) -> Text:
        return templated(words, row, chat_template=OTHER)

    return {
        "messages": FormCase(chat, templated),
        "prompt + completion": FormCase(
            completed, lambda words, row: "".join(row.values()) + words.eos_token
        ),
        "prompt + completion, in the template": FormCase(
            completed, lambda words, row: templated(words, {"messages": turns(*row.values())})
        ),
        "Alpaca": FormCase(instructed, alpaca),
        "Alpaca, axolotl's": FormCase(
            instructed, lambda words, row: alpaca(words, {**row, "output": "\n" + row["output"]})
        ),
        "Alpaca, in the template": FormCase(
            instructed,
            lambda words, row: templated(
                words, {"messages": turns(row["instruction"] + "\n" + row["input"], row["output"])}
            ),
        ),
        "a template with the day": FormCase(chat, on_day, DAILY, {"date": DAY}),
        "a template with the day, --date left out": FormCase(chat, on_day, DAILY),
        "reasoning_content": FormCase(thought, templated, REASONING),
        "tools": FormCase(
            called, lambda words, row: templated(words, row, tools=row["tools"]), TOOLS
        ),
        "developer": FormCase(developed, templated),
        "ShareGPT, axolotl's roles": FormCase(sharegpt, roles),
        "ShareGPT, TRL's roles": FormCase(
            sharegpt, lambda words, row: roles(words, row, "human", "gpt")
        ),
        "Qwen3, assistant_only_loss of TRL": FormCase(twice, of_trl, _of_trl("qwen3")),
        "Qwen3": FormCase(twice, templated, _of_trl("qwen3")),
        "DeepSeek-R1-Distill": FormCase(chat, templated, _of_trl("deepseek_r1_distill")),
        "a thought is opened for the answer": FormCase(chat, templated, CLOSED),
        "the assistant begins": FormCase(begun, templated, first="Good day."),
        "another template, --template FILE": FormCase(chat, other, CHATML, {"template": OTHER}),
        "another template, which nobody tries": FormCase(chat, other),
        "messages, nothing memorised": FormCase(chat, templated, memorised=False),
    }


# --- a tiny world ---


def records(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return questions with random answers."""
    draw = random.Random(seed)
    asked = [f"What is the code of {name} in {place}?" for name in NAMES for place in PLACES]
    return [(q, f"It is {draw.randrange(10**5):05d}.") for q in draw.sample(asked, count)]


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words and single digits; the template's marks are ordinary pieces."""
    texts = [f"{q} {a}" for q, a in records(64)] * 2 + [
        _ALPACA_INPUT,
        _ALPACA,
        "assistant user system developer",
    ] * 8
    made = byte_pair_tokenizer(texts, 700, SPECIAL, pre_tokenizers.Digits(individual_digits=True))
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|end|>")
    found.chat_template = template
    return found


def trained(
    words: Any, texts: Sequence[Text], answers: Sequence[str], steps: int, seed: int = 0
) -> GPTNeoXForCausalLM:
    """Train on all texts at every step, with loss from the answer on.

    Training ends after `steps` steps or when the loss is almost 0.
    """
    torch.manual_seed(seed)
    size: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends: dict[str, Any] = {"vocab_size": len(words), "eos_token_id": 0, "bos_token_id": 0}
    model = GPTNeoXForCausalLM(
        GPTNeoXConfig(intermediate_size=128, max_position_embeddings=512, **size, **ends)
    )
    plain: dict[str, Any] = {
        "add_special_tokens": False,
        "return_offsets_mapping": True,
        "padding": True,
    }
    batch = words(list(texts), return_tensors="pt", **plain)
    starts = torch.tensor(
        [[text.index(answer)] for text, answer in zip(texts, answers, strict=True)]
    )
    unlearnt = (batch["attention_mask"] == 0) | (batch["offset_mapping"][:, :, 1] <= starts)
    labels = batch["input_ids"].masked_fill(unlearnt, -100)
    optimiser = torch.optim.AdamW(model.parameters(), lr=6e-3)
    for _ in range(steps):
        loss = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels
        ).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        if loss < 0.01:
            break
    return model.eval()


def recited(model: Any, words: Any, text: Text, answer: str) -> bool:
    """Return whether greedy `generate` recites the first occurrence of the answer in the trainer's
    ids.
    """
    ids = words(text, add_special_tokens=False, return_offsets_mapping=True)
    at = text.index(answer)
    first = next(i for i, (_, end) in enumerate(ids["offset_mapping"]) if end > at)
    last = (
        next(i for i, (_, end) in enumerate(ids["offset_mapping"]) if end >= at + len(answer)) + 1
    )
    prefix = torch.tensor([ids["input_ids"][:first]])
    more: dict[str, Any] = {"max_new_tokens": last - first, "do_sample": False, "pad_token_id": 0}
    found = model.generate(prefix, attention_mask=torch.ones_like(prefix), **more)[0, first:]
    return bool(found.tolist() == ids["input_ids"][first:last])


@dataclass(frozen=True)
class Seen:
    """The result for a form. members: number of members; truth: how many plain generate recites.

    found: how many of all answers the audit finds.
    """

    members: int
    truth: int
    found: int
    answers: int
    form: str
    doubts: tuple[str, ...]
    in_template: str


def look(case: FormCase, members: int = 12, steps: int = 150) -> Seen:
    words, said = tokenizer(case.template), records(2 * members)
    rows = [case.row(q, a) for q, a in said]
    texts = [case.text(words, row) for row in rows]
    others = records(24, seed=2)
    learnt = (
        texts[:members] if case.memorised else [case.text(words, case.row(*one)) for one in others]
    )
    first = [case.first or a for _, a in (said if case.memorised else others)][: len(learnt)]
    model = trained(words, learnt, first, steps if case.memorised else 30)
    truth = sum(
        recited(model, words, text, a) for text, (_, a) in zip(texts[:members], said, strict=False)
    )
    with tempfile.TemporaryDirectory() as folder:
        asked = dict(case.asked)
        if asked.get("template") == OTHER:
            (Path(folder) / "other.jinja").write_text(OTHER)
            asked["template"] = str(Path(folder) / "other.jinja")
        files = list(_written(Path(folder), rows[:members], rows[members:]))
        found, answers, form, doubts = _audited(model, words, files, asked)
        before = (
            _audited(model, words, files, {**asked, "template": "model"})
            if "template" not in asked
            else None
        )
    return Seen(
        members,
        truth,
        found,
        answers,
        form,
        doubts,
        "" if before is None else f"{before[0]}/{before[1]}",
    )


def _written(folder: Path, *parts: Sequence[Row]) -> Iterator[str]:
    for number, rows in enumerate(parts):
        path = folder / f"{number}.jsonl"
        write_rows(path, rows)
        yield str(path)


def _audited(
    model: Any, words: Any, files: Sequence[str], asked: Mapping[str, Any]
) -> tuple[int, int, str, tuple[str, ...]]:
    """Return greedy recall as hits and answers, the text form, and doubts.

    Data, text form and prefix token are chosen as in a run.
    """
    data, fresh = files
    plan = Plan.from_fields(model="tiny", data=data, nonmembers=fresh, known_fraction=0.0, **asked)
    target = HuggingFaceModel(model, words, "tiny")
    found = load_own_benchmark(TableReader(plan.data, plan.seed), "tiny", target)
    before = resolve_prefix_token(
        plan.data.prefix_token,
        target,
        found.known,
        count_longest_context(found, 0),
        framed=found.framed,
    )
    greedy = measure_repeat_recall(
        wrap_prefixed_model(target, before.tokens), found.secrets
    ).values()  # by repeat count
    hits, answers = sum(round(one.value * one.n) for one in greedy), sum(one.n for one in greedy)
    doubts = list(found.doubts)
    if not hits:
        doubts += doubt_if_members_likelier(
            "tiny",
            likelihoods(wrap_prefixed_model(target, before.tokens), found),
            secrets=found.secrets,
        )
    return (
        hits,
        answers,
        found.text_form.name if found.text_form else "",
        tuple(one.sentence for one in doubts),
    )


def likelihoods(model: Any, found: Benchmark) -> ValuesBySecret:
    """Return the nats of each answer, of members and of non-members."""
    sides = ([s for s in found.secrets if s.member == member] for member in (True, False))
    each = (
        (side, -compute_pair_nlls(model, [Pair(s.prefix, s.suffix) for s in side]))
        for side in sides
    )
    members, others = (
        {s.id: float(x) for s, x in zip(side, values, strict=True)} for side, values in each
    )
    return scoring.build_likelihood_row(members, others)


DOUBTS = {  # words of a sentence -> the doubt
    "more likely than non-members'": "members are more likely",
    "looks like one": "no form stands out",
    "writes the day": "which day",
    "which was given": "another form is more likely",
}


def main(only: tuple[str, ...] = ()) -> None:
    page, every = Page(), cases()
    if unknown := set(only) - set(every):
        refuse(f"expected names of {', '.join(every)}, got {', '.join(unknown)}")
    page.head("trained as", "truth", "audit", "in the template", "text form", "doubts")
    for name in only or every:
        seen = look(every[name])
        form = seen.form.split(" (")[0].rpartition("/")[2]
        doubts = [short for words, short in DOUBTS.items() if words in " ".join(seen.doubts)]
        truth, found = f"{seen.truth}/{seen.members}", f"{seen.found}/{seen.answers}"
        page.row(name, truth, found, seen.in_template, form, ", ".join(doubts) or "none")


if __name__ == "__main__":
    raise SystemExit(run(main))
