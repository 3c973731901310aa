"""From `messages` to advice and back: a small Llama is tuned on conversations, watched, audited, mended and gated.

    python -m benchmarks.checks.trust.chat_line OUT [--keep-at-most 4] [--small]     (some minutes)

Synthetic records as conversations: a user gives the beginning of one, the assistant says the rest. Some were trained on
many times. The callback draws the curve, `audit run` attacks, `audit advise` says what is left with fewer copies; the
same training with no record more often than that is audited in turn and gated. What was predicted stands beside what
came of it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import datasets
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

from auditor import load_run
from auditor.benchmarks import chat, chat_rendering, conversation_rows
from auditor.benchmarks.lab_recipe import LabRecipe
from auditor.benchmarks.lab_texts import make_lab_texts
from auditor.cli import run_command_line
from auditor.core.secret_randomness import keyed_random_generator
from auditor.integrations import AuditCallback
from auditor.records import secret_details
from auditor.reports import phrases
from auditor.statistics import copies_effect
from auditor.training.finetune import fine_tune_on_packed_blocks
from benchmarks.checks.harness import markdown, run, write_rows
from benchmarks.checks.trust.bases import byte_pair_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SYSTEM = "You complete the records of this house."
_SPECIAL = ["<|text|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]

USUAL = LabRecipe(
    repeats=((1, 90, 0), (4, 40, 0), (16, 24, 0), (48, 16, 0)), nonmembers=90, others=90, public_records=900,
    vocab_size=1024, public_epochs=4, batch=8, public_rate=2e-3, private_batch=8, private_rate=2e-3,
)  # fmt: skip
SMALL = LabRecipe(
    repeats=((1, 6, 0), (8, 4, 0)), nonmembers=6, others=4, public_records=20, vocab_size=400, layers=1, hidden=32,
    public_epochs=1, private_epochs=2, batch=4, public_rate=5e-3, private_batch=4, private_rate=5e-3,
)  # fmt: skip


def main(out: Path, keep_at_most: int = 4, small: Annotated[bool, "of seconds: for tests"] = False) -> None:
    print(ModelLine(out, SMALL if small else USUAL).report(1 if small else keep_at_most))


class ModelLine:
    """One model line, in a folder: the public base, the first tuning and the mended one, each with its audit."""

    def __init__(self, out: Path, recipe: LabRecipe) -> None:
        self.out, self.recipe, texts = out, recipe, make_lab_texts(recipe)
        out.mkdir(parents=True, exist_ok=True)
        self.members = [(text, times) for times, own in texts.private.items() for text in own]
        self.members += [(text, 1) for text in texts.others]
        self._write("fresh.jsonl", [(text, 1) for text in texts.nonmembers])
        self.tokenizer = _tokenizer(texts.public, recipe.vocab_size)
        self.form = chat_rendering.parse_chat_rendering(chat_rendering.MODEL, None, self.tokenizer)
        self._build_base(texts.public)

    def report(self, most: int) -> str:
        """Markdown: what leaked, what was predicted, what came of it, and the gate's word."""
        first = self._tuned("first", self.members)
        mended = self._tuned("mended", [(text, min(times, most)) for text, times in self.members])
        outcome = next(
            r.outcome for r in secret_details.read_secret_details(first).rows.values() if r.outcome is not None
        )
        members = outcome.select_secrets(outcome.member)
        times = [count or 0 for count in members.repeats]
        predicted = copies_effect.predict_recall_at_repeats(times, members.hit, [min(count, most) for count in times])
        rows = []
        for made in (first, mended):
            (finding,) = load_run(made).result.findings
            recalls = (finding.measurement(name) for name in ("recall", "recall_nonmembers"))
            rows.append((made.name, *map(phrases.format_share_with_interval, recalls)))
        table = markdown(("model", "recall", "non-members"), rows)
        gates = {made.name: run_command_line(["gate", str(made), "--max", "recall=0.05"]) for made in (first, mended)}
        return (
            f"\n{table}\npredicted of at most {most}: "
            f"{phrases.value_with_interval(predicted)}; recall <= 0.05: exit {gates}"
        )

    def _write(self, name: str, rows: Sequence[tuple[str, int]]) -> Path:
        write_rows(self.out / name, ({"messages": _messages(text), "repeats": times} for text, times in rows))
        return self.out / name

    def _build_base(self, public: Sequence[str]) -> None:
        recipe, folder = self.recipe, self.out / "base"
        torch.manual_seed(recipe.seed)
        shape = {"num_hidden_layers": recipe.layers, "num_attention_heads": recipe.heads, "hidden_size": recipe.hidden}
        sizes = {"intermediate_size": 3 * recipe.hidden, "vocab_size": len(self.tokenizer)}
        more = {"max_position_embeddings": 512, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0}
        model = LlamaForCausalLM(LlamaConfig(**shape, **sizes, **more))
        sequences, order = (
            [self._written(text).tokens for text in public],
            keyed_random_generator("chat line", recipe.seed),
        )
        course = {
            "epochs": recipe.public_epochs,
            "rate": recipe.public_rate,
            "batch": recipe.batch,
            "block": recipe.block,
        }

        def progress(done: int) -> None:
            print(f"base: epoch {done} of {recipe.public_epochs}", file=sys.stderr)

        fine_tune_on_packed_blocks(model, sequences, **course, end=0, order=order, progress=progress)
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def _tuned(self, name: str, members: Sequence[tuple[str, int]]) -> Path:
        """Trains under the callback and audits; the run folder."""
        data, recipe = self._write(f"{name}.jsonl", members), self.recipe
        rows = [self._row(text) for text, times in members for _ in range(times)]
        steps = recipe.private_epochs * len(rows) // recipe.private_batch
        args = TrainingArguments(
            output_dir=str(self.out / name),
            num_train_epochs=recipe.private_epochs,
            learning_rate=recipe.private_rate,
            per_device_train_batch_size=recipe.private_batch,
            lr_scheduler_type="linear",
            logging_steps=max(1, steps // 10),
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=recipe.seed,
        )
        model = LlamaForCausalLM.from_pretrained(self.out / "base")
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=self.tokenizer,
            data_collator=self._collated,
        )
        fresh = str(self.out / "fresh.jsonl")
        callback = AuditCallback(trainer, data=str(data), nonmembers=fresh, every=max(1, steps // 8), suffix_length=24)
        trainer.add_callback(callback)
        trainer.train()
        trainer.save_model(str(self.out / name))
        print(f"{name}: {callback.notes}", file=sys.stderr)
        made = self.out / "runs" / name
        asked = ["--data", str(data), "--nonmembers", fresh, "--known-fraction", "0", "--suffix-length", "24"]
        asked += ["--attack", "perplexity", "-A", "samples=1", "-A", "temperature=0", "--setting", "white-box"]
        assert run_command_line(["run", "--model", str(self.out / name), *asked, "-o", str(made)]) == 0
        assert run_command_line(["advise", str(made)]) == 0
        return made

    def _written(self, text: str) -> chat.RenderedChat:
        return chat.render_chat(self.tokenizer, conversation_rows.Conversation(tuple(_messages(text))), self.form)

    def _row(self, text: str) -> dict[str, Any]:
        written = self._written(text)
        learnt = zip(written.tokens, written.learnt_token_mask(conversation_rows.ASSISTANT), strict=True)
        return {"input_ids": list(written.tokens), "labels": [token if own else -100 for token, own in learnt]}

    def _collated(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        def padded(name: str, by: int) -> torch.Tensor:
            return pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True, padding_value=by)

        return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100)}


def _messages(text: str) -> list[dict[str, str]]:
    """The first half of a record's words asks for the rest."""
    said = text.split(" ")
    half = len(said) // 2
    turns = (("system", SYSTEM), ("user", " ".join(said[:half])), ("assistant", " ".join(said[half:])))
    return [{"role": role, "content": content} for role, content in turns]


def _tokenizer(texts: Sequence[str], size: int) -> PreTrainedTokenizerFast:
    made = byte_pair_tokenizer(texts, size, _SPECIAL)
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=_SPECIAL[0], pad_token=_SPECIAL[0])
    found.chat_template = TEMPLATE
    return found


if __name__ == "__main__":
    raise SystemExit(run(main))
