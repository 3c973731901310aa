"""What stands before every text: chosen by the known pairs, put there in one place, said in every
row."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from auditor.core.canary_space import CanarySpace
from auditor.core.errors import AuditError
from auditor.core.nouns import Canary, Pair, Secret
from auditor.core.secret_randomness import draw_secret_uniforms
from auditor.defenses.pmixed import PMixed
from auditor.defenses.uniform_mixing import UniformMixing
from auditor.generation.sample import sample_candidates
from auditor.generation.tries import encode_without_special_tokens
from auditor.models.base import LanguageModel, compute_text_nlls
from auditor.models.decoding import ANCESTRAL
from auditor.models.ensemble import ModelEnsemble
from auditor.models.huggingface import HuggingFaceModel, traffic
from auditor.models.rows import Rows
from auditor.plugins.defense import Scenario
from auditor.plugins.trainer import RECORD, TOKENS_BEFORE
from auditor.runs.plan import make_plan
from auditor.runs.prefix_token import parse_prefix_token, resolve_prefix_token, wrap_prefixed_model
from auditor.runs.scoring import measure_repeat_recall
from tests.commands.test_cli import assert_same_guesses, finding, result, run_command_line, value
from tests.conftest import fits_schema, tiny

Said = pytest.CaptureFixture[str]
BOS, EOS, FIRST, SYMBOLS = 1, 2, 3, 12
RECORDS, PREFIX, SUFFIX = 24, 5, 8


def tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """A word is a token; `<bos>`, where there is one, is put in front, as Llama's and Gemma's
    tokenizers do."""
    words = {
        "<unk>": 0,
        "<bos>": BOS,
        "<eos>": EOS,
        **{f"w{i}": i for i in range(FIRST, FIRST + SYMBOLS)},
    }
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if "bos_token" in special:
        made.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", **special)


def records() -> Tensor:
    numbers = torch.Generator().manual_seed(1)
    return torch.randint(FIRST, FIRST + SYMBOLS, (RECORDS, PREFIX + SUFFIX), generator=numbers)


def reciting(kind: str) -> Any:
    """A model that knows its records by heart, with `<bos>` before each of them, and other endings
    without it.

    Without those, how much it recites behind nothing is a matter of a processor's arithmetic (0.06
    to 0.29 was seen).
    """
    shape: dict[str, Any] = {
        "vocab_size": FIRST + SYMBOLS,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    torch.manual_seed(0)
    if kind == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**shape))
    else:
        model = Gemma2ForCausalLM(Gemma2Config(head_dim=24, attn_implementation="eager", **shape))
    own, at = torch.cat([torch.full((RECORDS, 1), BOS), records()], dim=1), PREFIX
    others = torch.cat(
        [records()[:, :at], records()[:, at:].roll(1, dims=0), torch.full((RECORDS, 1), EOS)], dim=1
    )
    texts = torch.cat([own, others])
    optimizer = torch.optim.AdamW(model.parameters(), lr=STEP)
    model.train()
    for _ in range(STEPS[kind]):
        model(input_ids=texts, labels=texts).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


STEP, STEPS = 6e-3, {"llama": 150, "gemma": 120}
KNOWN = [Pair(tuple(row[:PREFIX]), tuple(row[PREFIX:])) for row in records().tolist()[:8]]
SECRETS = [
    Secret(f"s{i}", tuple(r[:PREFIX]), tuple(r[PREFIX:]))
    for i, r in enumerate(records().tolist()[8:])
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/ and data.jsonl."""
    folder = tmp_path_factory.mktemp("llama")
    reciting("llama").save_pretrained(folder / "model")
    tokenizer(bos_token="<bos>", eos_token="<eos>").save_pretrained(folder / "model")
    texts = [" ".join(f"w{token}" for token in row) for row in records().tolist()]
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def command(world: Path, out: Path, *more: str) -> list[str]:
    files = [
        "--model",
        f"{world}/model",
        "--data",
        f"{world}/data.jsonl",
        "--known-fraction",
        "0.3",
    ]
    lengths = ["--prefix-length", str(PREFIX), "--suffix-length", str(SUFFIX)]
    return [
        "run",
        *files,
        *lengths,
        "--attack",
        "perplexity",
        "-A",
        "samples=4",
        "-o",
        str(out),
        *more,
    ]


@pytest.fixture(scope="module")
def auto(llama: Path) -> Path:
    assert run_command_line(command(llama, llama / "auto", "--defense", "uniform-mixing")) == 0
    return llama / "auto"


@pytest.fixture(scope="module")
def without(llama: Path) -> Path:
    assert run_command_line(command(llama, llama / "without", "--prefix-token", "none")) == 0
    return llama / "without"


# --- what it is worth ---


def test_a_llama_recites_behind_what_its_tokenizer_puts_in_front(auto: Path, without: Path) -> None:
    row = ("undefended", "white-box", "perplexity")
    assert value(finding(auto, *row), "recall") > 0.9
    assert value(finding(without, *row), "recall") < 0.2
    assert result(auto)["benchmark"]["greedy_recall"]["1"]["value"] > 0.9


def test_a_gemma_recites_behind_what_its_tokenizer_puts_in_front() -> None:
    model = HuggingFaceModel(reciting("gemma"), tokenizer(bos_token="<bos>", eos_token="<eos>"))
    chosen = resolve_prefix_token("auto", model, KNOWN)
    assert chosen.tokens == (BOS,)
    assert resolve_prefix_token("auto", model, KNOWN, hurried=True).tokens == (BOS,)
    assert (
        measure_repeat_recall(wrap_prefixed_model(model, chosen.tokens), SECRETS)["all"].value > 0.9
    )
    assert measure_repeat_recall(model, SECRETS)["all"].value < 0.2


def test_every_row_says_it_and_nothing_else_depends_on_it(
    auto: Path, without: Path, capsys: Said
) -> None:
    told, plain = result(auto), result(without)
    assert told["prefix_token"].startswith(
        "prefix token: <bos> (tokenizer default; mean loss of 7 auxiliary"
    )
    assert (
        "none" in told["prefix_token"]
        and plain["prefix_token"] == "prefix token: none, as given (--prefix-token none)"
    )
    measured = [row for row in told["findings"] if not row["not_applicable"]]
    assert measured and all(told["prefix_token"] in row["notes"] for row in measured)
    assert all(told["prefix_token"] in " ".join(target["notes"]) for target in told["targets"])
    assert told["benchmark"]["digest"] == plain["benchmark"]["digest"] and fits_schema(auto)
    assert (auto / "secrets.sha256").read_text() == (without / "secrets.sha256").read_text()
    assert "prefix token: &lt;bos&gt;" in (auto / "report.html").read_text()
    prefixes = [
        json.loads(line)["prefix"] for line in (auto / "texts.jsonl").read_text().splitlines()
    ]
    assert prefixes and not any("bos" in prefix for prefix in prefixes)
    assert run_command_line(["compare", str(auto), str(without)]) == 2
    assert "attack settings: prefix_token 'auto' against 'none'" in " ".join(
        capsys.readouterr().err.split()
    )


def test_guesses_depend_on_neither_batch_size_nor_resume(
    llama: Path, auto: Path, capsys: Said
) -> None:
    again = llama / "again"
    assert (
        run_command_line(command(llama, again, "--defense", "uniform-mixing", "--batch-size", "3"))
        == 0
    )
    assert_same_guesses(again, auto)
    lines = (again / "guesses.jsonl").read_text().splitlines(keepends=True)
    (again / "guesses.jsonl").write_text("".join(lines[:3]))
    assert run_command_line(["run", "--resume", str(again)]) == 0
    assert_same_guesses(again, auto)
    plan = json.loads((again / "plan.json").read_text())
    (again / "plan.json").write_text(json.dumps({**plan, "prefix_token": "none"}))
    capsys.readouterr()
    assert run_command_line(["run", "--resume", str(again)]) == 2
    assert "was started with (prefix token: <bos>" in " ".join(capsys.readouterr().err.split())


def test_a_run_that_lost_what_stood_before_its_texts_does_not_go_on(
    without: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(without, tmp_path / "lost")
    (tmp_path / "lost" / "prefix_token.json").unlink()
    assert run_command_line(["run", "--resume", str(tmp_path / "lost")]) == 2
    assert "prefix_token.json" in capsys.readouterr().err


# --- what the training recorded ---


def write_training_record(folder: Path, **more: Any) -> None:
    record = {"configuration": {"method": "none"}, "finished": True}
    (folder / RECORD).write_text(json.dumps({**record, TOKENS_BEFORE: [EOS], **more}))


def test_a_run_and_a_check_put_what_training_json_says(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the record, `<bos>` is chosen: the model learnt its records behind it."""
    shutil.copytree(llama / "model", tmp_path / "model")
    shutil.copy(llama / "data.jsonl", tmp_path)
    write_training_record(tmp_path / "model")
    said = "prefix token: <eos>, as training.json says"
    assert run_command_line(command(tmp_path, tmp_path / "run")) == 0
    told = result(tmp_path / "run")
    assert told["prefix_token"] == said
    assert said in finding(tmp_path / "run", "undefended", "white-box", "perplexity")["notes"]
    assert run_command_line(command(tmp_path, tmp_path / "given", "--prefix-token", "bos")) == 0
    assert result(tmp_path / "given")["prefix_token"].endswith("as given (--prefix-token bos)")
    windows = ["--windows", "2", "--suffix-length", "4"]
    assert run_command_line(command(tmp_path, tmp_path / "windows", *windows)) == 0
    assert "training.json" not in result(tmp_path / "windows")["prefix_token"]
    monkeypatch.setenv("AUDIT_CACHE", str(tmp_path / "cache"))
    asked = ["check", f"{tmp_path}/model", "--data", f"{tmp_path}/data.jsonl"]
    assert run_command_line([*asked, "-o", f"{tmp_path}/check"]) == 0
    assert result(tmp_path / "check")["prefix_token"] == said
    write_training_record(tmp_path / "model", finished=False)
    assert run_command_line(command(tmp_path, tmp_path / "unfinished")) == 0
    assert result(tmp_path / "unfinished")["prefix_token"].startswith("prefix token: <bos> (")


def test_a_recorded_prefix_gives_way_to_a_given_one_and_to_token_ids() -> None:
    model: Any = Partial(BOS, BOTH)
    recorded = resolve_prefix_token("auto", model, KNOWN, recorded=(EOS,))
    assert recorded.tokens == (EOS,) and recorded.said.endswith("<eos>, as training.json says")
    assert resolve_prefix_token("auto", model, KNOWN, recorded=()).tokens == ()
    assert resolve_prefix_token("none", model, KNOWN, recorded=(EOS,)).tokens == ()
    as_trained = resolve_prefix_token("auto", model, KNOWN, recorded=(EOS,), as_trained=True)
    assert as_trained.tokens == ()
    full = resolve_prefix_token("auto", model, KNOWN, 16, recorded=(EOS,))
    assert full.tokens == ()
    assert full.said.endswith("; no room for <eos>, as training.json says")
    with pytest.raises(AuditError, match=r"in the vocabulary of partial in its training.json, got"):
        resolve_prefix_token("auto", model, KNOWN, recorded=(model.vocab_size,))


# --- which one ---


class Partial(LanguageModel):
    """Recites, with some noise, behind the token that it likes; a Hugging Face model as far as
    `choose` looks."""

    name, vocab_size, max_positions, eos, device = (
        "partial",
        FIRST + SYMBOLS,
        16,
        (EOS,),
        torch.device("cpu"),
    )
    special_token_id: Any = HuggingFaceModel.special_token_id  # as its configuration names it

    def __init__(self, likes: int | None, tokenizer: Any, **config: Any) -> None:
        self.likes, self.tokenizer = likes, tokenizer
        names = SimpleNamespace(**{"bos_token_id": None, "eos_token_id": None, **config})
        self.model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda decoder: names))

    def log_probs(self, contexts: Tensor, last: int, *, prompt: Tensor | None = None) -> Tensor:
        assert contexts.shape[1] <= self.max_positions
        # By row, so that an answer does not depend on the texts next to it.
        seeds = [torch.Generator().manual_seed(int(row.sum())) for row in contexts]
        noise = torch.stack([torch.randn(last, self.vocab_size, generator=seed) for seed in seeds])
        scale = torch.where(contexts[:, 0] == (-1 if self.likes is None else self.likes), 0.1, 2.0)
        return torch.log_softmax(noise * scale[:, None, None], dim=-1)

    def start(
        self,
        prefixes: Tensor,
        length: int,
        *,
        prompt: Tensor | None = None,
        distribution: bool = True,
    ) -> Rows:
        return Recited(self, prefixes)

    def embedding_rows(self, count: int) -> Tensor:
        raise NotImplementedError


class Recited(Rows):
    def __init__(self, model: Partial, tokens: Tensor) -> None:
        self.model, self.tokens = model, tokens

    def __len__(self) -> int:
        return len(self.tokens)

    def log_probs(self) -> Tensor:
        return self.model.log_probs(self.tokens, 1)[:, 0]

    def advance(self, parents: Tensor, tokens: Tensor) -> None:
        self.tokens = torch.cat([self.tokens[parents], tokens[:, None]], dim=1)


def chosen(
    likes: int | None, words: Any, known: Any = tuple(KNOWN), longest: int = 0, **config: Any
) -> Any:
    model: Any = Partial(likes, words, **config)
    return resolve_prefix_token("auto", model, known, longest)


BOTH = tokenizer(bos_token="<bos>", eos_token="<eos>")


def test_the_known_pairs_decide() -> None:
    assert chosen(EOS, BOTH).tokens == (EOS,)
    assert chosen(EOS, BOTH).said.startswith(
        "prefix token: <eos> (the most likely of the 3 tried; mean loss of 8 auxiliary records "
        "with it: "
    )
    assert chosen(BOS, BOTH).tokens == (BOS,)
    assert chosen(EOS, tokenizer(eos_token="<eos>")).tokens == (EOS,)
    assert chosen(None, tokenizer(eos_token="<eos>")).said.startswith(
        "prefix token: none (tokenizer default; mean loss of 8 auxiliary records with it: "
    )


def test_more_pairs_are_read_only_if_the_first_leave_the_choice_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unclear = chosen(BOS, BOTH)
    assert "mean loss of 8 auxiliary records" in unclear.said
    monkeypatch.setattr("auditor.runs.prefix_token._MARGIN", 2.0)
    clear = chosen(BOS, BOTH)
    assert "mean loss of 5 auxiliary records" in clear.said and clear.tokens == unclear.tokens


def test_of_many_pairs_fifty_are_read_before_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 records of a table of millions had to wait for 500 auxiliary ones: 450 seconds."""
    many = tuple(KNOWN) * 12
    for margin, n_read in ((9.0, 5), (0.1, 50), (-9.0, 96)):
        monkeypatch.setattr("auditor.runs.prefix_token._MARGIN", margin)
        prefix = chosen(None, BOTH, many)
        assert f"mean loss of {n_read} auxiliary records" in prefix.said, margin


def test_a_model_that_keeps_its_choices_is_not_asked_twice(tmp_path: Path) -> None:
    model = tiny(40)
    model.tokenizer, model.choices_kept_in = BOTH, tmp_path
    first = resolve_prefix_token("auto", model, KNOWN)
    asked = traffic.tokens
    assert resolve_prefix_token("auto", model, KNOWN) == first and traffic.tokens == asked
    resolve_prefix_token("auto", model, KNOWN[1:])
    assert traffic.tokens > asked


def test_a_hurried_choice_reads_only_the_beginnings_of_texts() -> None:
    """Unless a template begins them: what it puts in front is the same in all of them."""
    long = [Pair(4 * pair.prefix, 4 * pair.suffix) for pair in KNOWN[:5]]
    n_tokens, sentences = [], []
    for options in ({"hurried": True}, {"hurried": True, "framed": True}, {}):
        model = tiny(40)
        model.tokenizer = BOTH
        before = traffic.tokens
        sentences.append(resolve_prefix_token("auto", model, long, **options).said)
        n_tokens.append(traffic.tokens - before)
    # 20 tokens of a text instead of 36
    assert n_tokens[0] < 0.65 * n_tokens[1] and n_tokens[1] == n_tokens[2]
    assert "mean loss of 5 beginnings of auxiliary records" in sentences[0]
    assert "beginnings" not in sentences[1] + sentences[2]


def test_one_pair_is_no_reason_to_leave_the_tokenizers_own() -> None:
    assert chosen(EOS, BOTH, KNOWN[:1]).tokens == (BOS,)
    assert (
        chosen(EOS, BOTH, ()).said
        == "prefix token: <bos> (tokenizer default; no auxiliary records to choose by)"
    )


def test_texts_of_the_canaries_formats_stand_in_for_known_pairs() -> None:
    words = (("name", ("w3", "w4", "w6", "w7")),)
    spaces = (CanarySpace("w5 {name:3}", words), CanarySpace("w8 {name:4}", words))
    texts = [space.draw(np.random.default_rng(0)) for space in spaces]
    own = [
        Secret(
            text,
            (),
            tuple(encode_without_special_tokens(BOTH, [text])[0]),
            1,
            canary=Canary(text, space),
        )
        for text, space in zip(texts, spaces, strict=True)
    ]
    model: Any = Partial(EOS, BOTH)
    found = resolve_prefix_token("auto", model, canaries=own)
    assert found.tokens == (EOS,) and "new texts of the canaries' formats" in found.said
    # pairs that are known say more
    assert resolve_prefix_token("auto", model, KNOWN, canaries=own) == chosen(EOS, BOTH)
    coined = [replace(one, canary=Canary(one.id, coin=one.member)) for one in own]
    found = resolve_prefix_token("auto", model, canaries=coined)
    assert "canaries, those that stayed out among them" in found.said
    turned = [
        replace(one, member=not one.member, canary=Canary(one.id, coin=not one.member))
        for one in own
    ]
    assert resolve_prefix_token("auto", model, canaries=turned) == found  # coins are not looked at


def test_without_a_tokenizer_the_configuration_says_what_there_is() -> None:
    assert chosen(EOS, None, eos_token_id=[EOS, 5]).said.startswith(
        f"prefix token: token {EOS} (the most likely of the 2 tried;"
    )
    # a default that names no token of the model
    assert chosen(EOS, None, eos_token_id=FIRST + SYMBOLS).tokens == ()
    assert chosen(EOS, None, ()).said.startswith(
        "prefix token: none (there is no tokenizer to put another"
    )


def test_a_model_that_gives_no_log_probabilities_is_asked_behind_the_tokenizers_own() -> None:
    model: Any = Partial(EOS, BOTH)
    model.capabilities = frozenset({"draw"})
    prefix_token = resolve_prefix_token("auto", model, KNOWN)
    assert prefix_token.tokens == (BOS,) and prefix_token.said.endswith(
        "partial gives no log-probabilities to choose by)"
    )


def test_a_lead_that_has_no_room_is_left_out() -> None:
    full = chosen(BOS, BOTH, longest=16)
    assert full.tokens == () and "no room for the tokenizer default, <bos>" in full.said
    assert chosen(BOS, BOTH, longest=15).tokens == (BOS,)
    long = Pair((3,) * 10, (4,) * 10)  # refused by name where it is attacked
    assert (
        "mean loss of 8 auxiliary records with it:"
        in chosen(BOS, BOTH, (*KNOWN, long), longest=13).said
    )


@pytest.mark.parametrize(
    ("asked", "words", "why"),
    [
        (
            "bos",
            tokenizer(eos_token="<eos>"),
            "expected --prefix-token bos to be a token of partial, but its tokenizer names",
        ),
        (
            "eos",
            None,
            "expected --prefix-token eos to be a token of partial, but its configuration names none",  # noqa: E501
        ),
        (
            "w3 w99",
            BOTH,
            "expected --prefix-token as text that the tokenizer of partial can write, got 'w3 w99'",
        ),
        (
            " ",
            BOTH,
            "expected --prefix-token as text that the tokenizer of partial can write, got ' '",
        ),
        ("w3", None, "for a model without a tokenizer, got 'w3'"),
    ],
)
def test_what_the_model_does_not_have_is_refused(asked: str, words: Any, why: str) -> None:
    model: Any = Partial(None, words)
    with pytest.raises(AuditError, match=why):
        parse_prefix_token(asked, model)


def test_a_text_of_several_tokens_and_one_outside_the_vocabulary() -> None:
    model: Any = Partial(None, BOTH)
    assert parse_prefix_token("<eos> w3 w4", model) == (EOS, 3, 4)
    assert (
        resolve_prefix_token("w3 w4", model).said
        == "prefix token: w3 w4, as given (--prefix-token w3 w4)"
    )
    model.vocab_size = 4
    with pytest.raises(
        AuditError, match="in the vocabulary of partial, which has 4 tokens, got 3, 4"
    ):
        parse_prefix_token("w3 w4", model)


def test_a_bad_lead_is_one_sentence(llama: Path, tmp_path: Path, capsys: Said) -> None:
    for prefix_token, why in (
        ("w3 nowhere", "can write, got 'w3 nowhere'"),
        ("", "got an empty one"),
    ):
        assert (
            run_command_line(command(llama, tmp_path / "bad", "--prefix-token", prefix_token)) == 2
        )
        message = " ".join(capsys.readouterr().err.split())
        assert why in message and "Traceback" not in message
        assert not (tmp_path / "bad").exists()
    long = ["--prefix-token", " ".join(["w3"] * 20)]
    assert run_command_line(command(llama, tmp_path / "long", *long)) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "prefix token (20) + prefix (5) + suffix (8) + soft prompt (0) = 33 tokens" in message


def test_auto_wins_over_a_plan_file() -> None:
    assert (
        make_plan({"prefix_token": "eos"}, {"prefix_token": "auto"}).data.prefix_token
        == "auto"
        == make_plan({}, {}).data.prefix_token
    )
    assert make_plan({"prefix_token": "eos"}, {"prefix_token": "none"}).data.prefix_token == "none"


# --- where it is put ---

TEXTS = torch.randint(1, 61, (3, 9), generator=torch.Generator().manual_seed(2))
WITH = torch.cat([torch.tensor([[7, 8]] * 3), TEXTS], dim=1)


def test_a_led_model_is_the_model_asked_behind_the_lead(neox: HuggingFaceModel) -> None:
    behind, prompt = (
        wrap_prefixed_model(neox, (7, 8)),
        torch.randn(4, 32, generator=torch.Generator().manual_seed(0)),
    )
    noise = np.stack([draw_secret_uniforms(3, 4, "prefix_token", i) for i in range(3)])
    for soft in (None, prompt):
        assert torch.equal(
            behind.log_probs(TEXTS, 4, prompt=soft), neox.log_probs(WITH, 4, prompt=soft)
        )
        mine = behind.token_log_probs(TEXTS[:, :5], TEXTS[:, 5:], prompt=soft)
        assert torch.equal(mine, neox.token_log_probs(WITH[:, :7], WITH[:, 7:], prompt=soft))
        drawn = sample_candidates(behind, TEXTS, 4, ANCESTRAL, noise, prompt=soft)
        for one, other in zip(
            drawn, sample_candidates(neox, WITH, 4, ANCESTRAL, noise, prompt=soft), strict=True
        ):
            assert torch.equal(one.suffixes, other.suffixes)
    # nothing but the prefix token
    assert torch.equal(behind.log_probs(TEXTS[:, :0], 1), neox.log_probs(WITH[:, :2], 1))
    assert (
        behind.max_positions == 94
        and behind.row_bytes(10) == neox.row_bytes(12)
        and wrap_prefixed_model(neox, ()) is neox
    )
    with pytest.raises(
        AuditError,
        match=r"^prefix token \(2\) \+ prefix \(40\) \+ suffix \(51\) \+ soft prompt \(4\) = 97",
    ):
        behind.check_text_fits(40, 51, prompt)
    behind.check_text_fits(40, 50, prompt)


def test_a_defense_reads_the_lead_too(neox: HuggingFaceModel) -> None:
    parts = ModelEnsemble(neox, [tiny(seed=1), tiny(seed=2)])
    pmixed = PMixed(q=0.5).protect(Scenario(neox, neox, parts, 12, 4))
    mixed = UniformMixing().protect(Scenario(neox, neox, None, 12, 4))
    for model in (pmixed, mixed):
        assert torch.allclose(
            wrap_prefixed_model(model, (7, 8)).log_probs(TEXTS, 4), model.log_probs(WITH, 4)
        )
        checks = zip(
            wrap_prefixed_model(model, (7, 8)).divergence_checks(TEXTS, 4, [0]),
            model.divergence_checks(WITH, 4, [0]),
            strict=True,
        )
        assert all(torch.allclose(mine.realised, own.realised) for mine, own in checks)
    texts = [tuple(row) for row in TEXTS.tolist()]
    (mine,) = wrap_prefixed_model(pmixed, (7, 8)).published_perplexity_nll(texts, 0).values()
    (longer,) = pmixed.published_perplexity_nll(
        [(7, 8, *text) for text in texts], 0, n_context=3
    ).values()
    assert mine == longer and len(mine) == 3
    (alone,) = pmixed.published_perplexity_nll(texts, 0).values()
    assert mine != alone


def test_perplexity_is_of_the_same_tokens_behind_the_lead(neox: HuggingFaceModel) -> None:
    texts = [tuple(row) for row in TEXTS.tolist()]
    (first, *_) = compute_text_nlls(wrap_prefixed_model(neox, (7, 8)), texts)
    expected = -neox.token_log_probs(WITH[:1, :3], WITH[:1, 3:]).double().sum()
    assert first == (pytest.approx(float(expected), abs=1e-4), 8)
