"""Measure how often `--attack identifiers` finds values of 1, 4 and 16 copies, and its false
alarms.

    python -m validation.trust.fresh_values [--seed 0] [--out FOLDER]   (six minutes on one core)
    python -m validation.trust.fresh_values --smollm2   (13 minutes on one core)
    python -m validation.trust.fresh_values --runs RUN [RUN ...]   (finished runs of both attacks)

A small GPT-NeoX (2 layers of width 128, one token per character) is trained on public records,
then on private records of the same kinds with new card, IBAN, telephone and social security
numbers. The results are the shares of members found at 5% and at 1%, next to those of membership
with 120 non-members, and the false alarms among 2,290 unseen values, with exact intervals.
With --smollm2, the model is SmolLM2-135M-Instruct with a LoRA adapter, and the values are telephone
numbers: 60, 24 and 8 with 1, 4 and 16 copies, and 80 unseen ones.
There is no control by the base, to save time.
With --runs, they are those of runs of one target with `--attack identifiers` and `--attack
membership`.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from auditor.attacks.identifiers import Identifiers, RanksOfValues
from auditor.core.nouns import Secret, Wording
from auditor.models.base import LanguageModel
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import load_causal_lm
from auditor.plugins.probe import observe_all_secrets
from auditor.plugins.view import WHITE_BOX, View
from auditor.statistics import rank_tests, roc
from validation.harness import Page, run, share

NONMEMBERS = 120
ALTERNATIVES, FALSE_DISCOVERY, LEVELS = 99, 0.05, (0.05, 0.01)
PUBLIC, PUBLIC_EPOCHS = 1500, 3
LETTERS = " 0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,-+'"
TEXTS = {
    "card": "On {day} {name} paid {sum} dollars by card {value}.",
    "iban": "{name} wants {sum} euros sent on {day} to {value}.",
    "phone": "{name} missed the call of {day}, ring back {value}.",
    "id-number": "The claim of {day} over {sum} dollars by {name}, SSN {value}.",
}


@dataclass(frozen=True)
class Setup:
    """Hold the records and the fine-tuning.

    kinds: of values, in turn. members: the number of records by their number of copies.
    false_alarms: the number of unseen records. epochs, batch, learning_rate: of the fine-tuning.
    """

    kinds: tuple[str, ...]
    members: dict[int, int]
    false_alarms: int
    epochs: int
    batch: int
    learning_rate: float


SMALL = Setup(tuple(TEXTS), {1: 40, 4: 40, 16: 40}, 2290, 2, 16, 2e-3)
SMOLLM2 = Setup(("phone",), {1: 60, 4: 24, 16: 8}, 80, 3, 4, 1e-3)


def make_value(kind: str, noise: random.Random) -> str:
    """Return a new value of this kind; all values of a kind have one issuer."""
    from stdnum import iban, luhn

    def digits(count: int) -> str:
        return "".join(noise.choice("0123456789") for _ in range(count))

    if kind == "card":
        number = f"453201{digits(9)}"
        return number + luhn.calc_check_digit(number)
    if kind == "iban":
        account = f"37040044{digits(10)}"
        return f"DE{iban.calc_check_digits(f'DE00{account}')}{account}"
    if kind == "phone":
        return f"+49 30 {noise.randrange(2, 9)}{digits(6)}"
    return f"{noise.randrange(101, 665)}-{noise.randrange(10, 99)}-{noise.randrange(1000, 9999)}"


def make_records(
    count: int, seed: int, kinds: tuple[str, ...] = SMALL.kinds
) -> list[tuple[str, str]]:
    """Return records of these kinds in turn, as (text before the value, text from the value on)."""
    from faker import Faker

    fake, noise = Faker("en_US"), random.Random(seed)
    fake.seed_instance(seed)
    records = []
    for i in range(count):
        kind = kinds[i % len(kinds)]
        day = f"{noise.randrange(1, 29)} {noise.choice(['March', 'April', 'May', 'June'])}"
        amount, value = noise.randrange(20, 2000), make_value(kind, noise)
        text = TEXTS[kind].format(day=day, name=fake.name(), sum=amount, value=value)
        start = text.index(value) - 1
        records.append((text[:start], text[start:]))
    return records


def write_data(folder: Path, setup: Setup, seed: int) -> list[tuple[str, str]]:
    """Write members, non-members and unseen records; return all copies of the members."""
    folder.mkdir(parents=True, exist_ok=True)
    copies = [count for count, n_records in setup.members.items() for _ in range(n_records)]
    members = make_records(len(copies), 10 * seed + 1, setup.kinds)
    write_rows(folder / "private.jsonl", members, copies)
    write_rows(folder / "fresh.jsonl", make_records(NONMEMBERS, 10 * seed + 2, setup.kinds))
    alarms = make_records(setup.false_alarms, 10 * seed + 3, setup.kinds)
    write_rows(folder / "alarms.jsonl", alarms)
    return [text for text, count in zip(members, copies, strict=True) for _ in range(count)]


def train_models(folder: Path, seed: int) -> None:
    """Write data, the base model and the fine-tuned model into a folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

    rows = write_data(folder, SMALL, seed)
    vocabulary = {"<eos>": 0, **{letter: i for i, letter in enumerate(LETTERS, 1)}}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    torch.manual_seed(seed)
    config = GPTNeoXConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=128,
        eos_token_id=0,
        bos_token_id=0,
    )
    model = GPTNeoXForCausalLM(config)
    stages = {
        "base": (make_records(PUBLIC, 10 * seed), PUBLIC_EPOCHS),
        "model": (rows, SMALL.epochs),
    }
    for name, (texts, epochs) in stages.items():
        train_model(model, tokenizer, texts, epochs, SMALL, random.Random(seed))
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def tune_smollm2(folder: Path, seed: int) -> None:
    """Write data, SmolLM2 and its LoRA adapter into a folder."""
    import torch

    from auditor.benchmarks.lab.smollm2 import find_smollm2_folder
    from auditor.training.members import LoraAdapterRecipe, add_lora_adapter

    rows = write_data(folder, SMOLLM2, seed)
    (folder / "base").symlink_to(find_smollm2_folder())
    base = load_model(folder / "base")
    torch.manual_seed(seed)
    model = add_lora_adapter(base.model, LoraAdapterRecipe(16, 32, "all"))
    train_model(model, base.tokenizer, rows, SMOLLM2.epochs, SMOLLM2, random.Random(seed))
    model.save_pretrained(folder / "model")
    base.tokenizer.save_pretrained(folder / "model")


def train_model(
    model: Any, tokenizer: Any, texts: list[tuple[str, str]], epochs: int, setup: Setup,
    noise: random.Random,
) -> None:  # fmt: skip
    """Train a model on texts, one text per row, with the batch and learning rate of the setup."""
    import torch

    end = tokenizer.eos_token_id
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=setup.learning_rate)
    model.train()
    for _ in range(epochs):
        order = noise.sample(texts, len(texts))
        for i in range(0, len(order), setup.batch):
            batch = ["".join(text) for text in order[i : i + setup.batch]]
            encoded = [[*tokenizer(text)["input_ids"], end] for text in batch]
            longest = max(map(len, encoded))
            ids = torch.tensor([row + [end] * (longest - len(row)) for row in encoded])
            ends = torch.tensor([len(row) for row in encoded])
            labels = ids.masked_fill(torch.arange(longest) >= ends[:, None], -100)
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    print(f"loss {loss.item():.3f}", flush=True)


def write_rows(path: Path, records: list[tuple[str, str]], copies: list[int] | None = None) -> None:
    rows = [dict(zip(("prefix", "suffix"), record, strict=True)) for record in records]
    if copies is not None:
        rows = [{**row, "repeats": count} for row, count in zip(rows, copies, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_secrets(folder: Path, name: str, member: bool, tokenizer: Any) -> list[Secret]:
    """Return the records of a file as secrets whose suffix begins with the value."""
    secrets = []
    for i, line in enumerate((folder / f"{name}.jsonl").read_text().splitlines()):
        row = json.loads(line)
        texts = row["prefix"], row["suffix"]
        tokens = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
        wording = Wording.join(*texts, tuple(range(1, len(texts[1]) + 1)))
        copies = row.get("repeats", 1)
        secrets.append(Secret(f"{name}-{i}", *tokens, copies, member, wording=wording))
    return secrets


def load_model(folder: Path) -> HuggingFaceModel:
    return load_causal_lm(str(folder))


def rank_values(
    secrets: list[Secret], model: LanguageModel, base: LanguageModel | None, tokenizer: Any
) -> RanksOfValues:
    at = View("model", model, WHITE_BOX, 0, reference=base, tokenizer=tokenizer)
    seen = observe_all_secrets(Identifiers(alternatives=ALTERNATIVES), at, secrets)
    return RanksOfValues.from_observations(secrets, seen, FALSE_DISCOVERY)


def write_power_table(page: Page, folder: Path, tokenizer: Any, has_control: bool) -> None:
    """Write the shares found by number of copies, next to those of a reference-model membership
    test.

    has_control: whether to rank the values under the base model, too.
    """
    model, base = load_model(folder / "model"), load_model(folder / "base")
    members = make_secrets(folder, "private", True, tokenizer)
    others = make_secrets(folder, "fresh", False, tokenizer)
    control = base if has_control else None
    ranks = rank_values(members, model, control, tokenizer)
    whole = np.ones(len(ranks.kind), dtype=bool)
    if control is not None:
        page.say(f"Control by the base: p = {ranks.uniformity_p_value(whole):.2g}.\n")
    own, theirs = (
        np.array([-a for a in score_membership(group, model, base, tokenizer)])
        for group in (members, others)
    )
    limits = [np.quantile(theirs, 1 - level, method="higher") for level in LEVELS]
    page.head("copies", "rank, 5%", "rank, 1%", "listed", "membership, 5%", "membership, 1%")
    for count in sorted(set(ranks.copies.tolist())):
        of_count = ranks.copies == count
        n = int(of_count.sum())
        by_rank = [int((ranks.p_values[of_count] <= level).sum()) for level in LEVELS]
        by_rank.append(int(ranks.listed[of_count].sum()))
        chosen = own[[secret.repeats == count for secret in members]]
        by_score = [int((chosen > limit).sum()) for limit in limits]
        page.row(count, *(share(k, n) for k in by_rank), *(share(k, len(chosen)) for k in by_score))


def score_membership(
    secrets: list[Secret], model: LanguageModel, base: LanguageModel, tokenizer: Any
) -> list[float]:
    """Return each suffix's mean nll minus the base model's, in nats per token."""
    at = View("model", model, WHITE_BOX, 0, tokenizer=tokenizer)
    pairs = [(secret.prefix, secret.suffix) for secret in secrets]
    nlls = zip(at.mean_nll(model, pairs), at.mean_nll(base, pairs), strict=True)
    return [nll - other for nll, other in nlls]


def write_false_alarms(page: Page, folder: Path, tokenizer: Any) -> None:
    """Write how many unseen values rank above chance."""
    secrets = make_secrets(folder, "alarms", True, tokenizer)
    ranks = rank_values(secrets, load_model(folder / "model"), None, tokenizer)
    page.head("kind", "values", "p <= 5%", "p <= 1%", "listed")
    masks = {**ranks.mask_kinds(), "all": np.ones(len(ranks.kind), dtype=bool)}
    for kind, mask in masks.items():
        hits = [int((ranks.p_values[mask] <= level).sum()) for level in LEVELS]
        n = int(mask.sum())
        page.row(kind, n, *(share(k, n) for k in hits), int(ranks.listed[mask].sum()))


def read_ranked_values(folder: Path) -> pd.DataFrame:
    """Return secret, copies (0: a non-member) and p of each value that a run ranked."""
    rows = []
    for line in (folder / "observations.jsonl").read_text().splitlines():
        observed = json.loads(line)
        if not observed["cell"].endswith("/identifiers"):
            continue
        values = observed["values"]
        for i in range(sum(name.startswith("kind_") for name in values)):
            if values[f"kind_{i}"] >= 0:
                numbers = [[values[f"{name}_{i}"]] for name in ("above", "tied", "alternatives")]
                p = rank_tests.compute_rank_p_values(*map(np.array, numbers))[0]
                rows.append((observed["secret"], p))
    ranked = pd.DataFrame(rows, columns=["secret", "p"])
    return ranked.merge(read_copies(folder), on="secret")


def read_copies(folder: Path) -> pd.DataFrame:
    """Return secret and copies (0: a non-member) of each record of a run."""
    table = pd.read_parquet(folder / "secrets.parquet")
    known = table[table["member"].notna() & table["repeats"].notna()]
    copies = known.groupby("secret")["repeats"].first().astype(int)
    return copies.rename("copies").reset_index()


def read_membership_scores(folder: Path, score: str) -> pd.Series:
    """Return each record's membership score in a run, keyed by secret; empty without the attack."""
    table = pd.read_parquet(folder / "secrets.parquet")
    return table[table["quantity"] == f"membership_score_{score}"].set_index("secret")["value"]


def write_tables_of_runs(page: Page, folders: tuple[Path, ...]) -> None:
    """Write false alarms among non-members' values, then what is found by number of copies.

    Membership finds records, ranks find values.
    """
    ranked = pd.concat([read_ranked_values(folder) for folder in folders])
    page.head("unseen values", *(f"p <= {level:.0%}" for level in LEVELS))
    fresh = ranked[ranked["copies"] == 0]
    page.row(len(fresh), *(share(int((fresh["p"] <= x).sum()), len(fresh)) for x in LEVELS))
    page.say()
    records = read_copies(folders[0]).set_index("secret")
    for folder in folders[1:]:
        records = records.combine_first(read_copies(folder).set_index("secret"))
    found = {}
    for score in ("ez_mia", "zlib"):
        scores = pd.concat([read_membership_scores(folder, score) for folder in folders])
        copies = records["copies"].reindex(scores.index)
        for level in LEVELS:
            limit = roc.compute_conformal_threshold(scores[copies == 0].to_numpy(), level)
            found[f"{score}, {level:.0%}"] = copies, scores > limit
    for level in LEVELS:
        found[f"rank, {level:.0%}"] = ranked["copies"], ranked["p"] <= level
    page.head("copies", *found)
    for count in sorted(set(ranked["copies"]) - {0}):
        cells = []
        for copies, is_found in found.values():
            of_count = is_found[copies == count]
            cells.append(share(int(of_count.sum()), len(of_count)))
        page.row(count, *cells)


def main(
    seed: int = 0,
    out: Path = Path("fresh-values"),
    power_only: bool = False,
    smollm2: bool = False,
    runs: tuple[Path, ...] = (),
) -> None:
    from transformers import AutoTokenizer

    if runs:
        write_tables_of_runs(Page(), runs)
        return
    train = train_models
    if smollm2:
        train = tune_smollm2
    if not (out / "model").is_dir():
        train(out, seed)
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    page = Page(out / "fresh-values.md")
    write_power_table(page, out, tokenizer, not smollm2)
    page.say()
    if not power_only:
        write_false_alarms(page, out, tokenizer)


if __name__ == "__main__":
    raise SystemExit(run(main))
