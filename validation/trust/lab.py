"""Measure what the lab's models remember: the target by epoch, and each ensemble member.

    python -m validation.trust.lab [--epochs 3 6] [--seed 0]
    python -m validation.trust.lab --private dp-sgd adp      # instead: private trainings, each with its controls

The tables have greedy recall by number of copies and held-out perplexity (of the non-members'
prefixes and suffixes). They show whether a careful engineer would ship the target, and whether
there is something for a defense to protect. The target is trained as in the lab, also for other
numbers of epochs; members of the ensemble, each asked about its own shard, come from the lab's
cache or are trained.
"""  # noqa: E501

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch

from auditor.benchmarks.lab.lab import Lab
from auditor.benchmarks.lab.lab_recipe import LabRecipe
from auditor.core import threads
from auditor.core.nouns import Secret
from auditor.core.secret_randomness import make_keyed_generator
from auditor.models.base import LanguageModel, compute_text_nlls
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.loading import load_causal_lm
from auditor.models.lora import load_adapter_model
from auditor.models.precision import CPU, has_native_bfloat16
from auditor.models.shards import read_shard_record_list, record_digests
from auditor.plugins import registry
from auditor.plugins.options import build_plugin
from auditor.plugins.trainer import Trainer
from auditor.privacy.promises import read_privacy_record
from auditor.runs import shown_rows
from auditor.runs.scoring import measure_repeat_recall
from auditor.statistics import intervals
from auditor.statistics.intervals import Measurement
from auditor.training.finetune import (
    FineTuningRecipe,
    StepwiseFineTuning,
    list_trainable_parameters,
)
from auditor.training.members import LoraAdapterRecipe, add_lora_adapter, copy_sharing_weights
from auditor.training.side_by_side import compute_losses_separately
from validation.harness import Page, run


def by_epoch(lab: Lab, epochs: int) -> Iterator[LanguageModel]:
    """Yield the target after each epoch of a training of `epochs` epochs."""
    recipe, public = lab.recipe, load_causal_lm(str(lab.public_folder()))
    torch.manual_seed(recipe.seed)
    adapter = LoraAdapterRecipe(recipe.private_rank, recipe.private_alpha, "all")
    model = add_lora_adapter(copy_sharing_weights(public.model), adapter).eval()
    course = FineTuningRecipe(
        epochs, recipe.private_rate, recipe.private_batch, recipe.block, end=0
    )
    sequences = [tuple(ids) for ids in lab.tokenizer(lab.texts.private_text_copies())["input_ids"]]
    fitting = StepwiseFineTuning(
        list_trainable_parameters(model),
        sequences,
        course,
        make_keyed_generator("lab", recipe.seed, "target 1"),
    )
    while not fitting.is_finished:
        with torch.autocast("cpu", torch.bfloat16, enabled=has_native_bfloat16(CPU)):
            compute_losses_separately([model], [fitting.get_next_batch()]).sum().backward()
        fitting.step()
        if fitting.steps == 0:
            yield HuggingFaceModel(
                copy.deepcopy(model),
                lab.tokenizer,
                f"target after {fitting.epochs} of {epochs} epochs",
            )


def own_secrets(lab: Lab, shard: Sequence[str]) -> list[Secret]:
    """Return the attacked members whose whole record is in this shard."""
    names, texts = set(shard), {}
    for text in lab.texts.distinct_private_texts(members=True):
        texts[tuple(lab.tokenizer(text)["input_ids"][: 24 + lab.recipe.suffix_length])] = (
            record_digests([text])[0]
        )
    return [s for s in lab.secrets if s.member and texts.get((*s.prefix, *s.suffix)) in names]


class Recalls(Page):
    """A table with a row for each model: held-out perplexity, and greedy recall by number of
    copies.
    """

    def __init__(self, lab: Lab) -> None:
        super().__init__()
        self.lab = lab
        self.head("model", "PPL", *(f"{count} times" for count in lab.recipe.repeat_counts))

    def model(
        self, name: str, model: LanguageModel, secrets: Sequence[Secret]
    ) -> Mapping[str, Measurement]:
        recall = measure_repeat_recall(model, secrets)
        perplexity = intervals.estimate_perplexity(
            list(compute_text_nlls(model, self.lab.heldout))
        ).value
        self.shares(
            name, f"{perplexity:.2f}", {count: (one.value, one.n) for count, one in recall.items()}
        )
        return recall

    def shares(self, name: str, perplexity: str, found: Mapping[str, tuple[float, int]]) -> None:
        cells = (found.get(str(count)) for count in self.lab.recipe.repeat_counts)
        self.row(
            name,
            perplexity,
            *("" if cell is None else f"{100 * cell[0]:.0f}% of {cell[1]}" for cell in cells),
        )


def trained_privately(lab: Lab, names: Sequence[str]) -> Iterator[tuple[str, LanguageModel]]:
    """Yield the title, with epsilon, and the model of each private training and its controls."""
    known = registry.list_defenses()
    defenses = [build_plugin("defense", known, name, lab.defense_defaults[name]) for name in names]
    for row in shown_rows.list_defense_rows(
        defenses, lambda control: isinstance(control, Trainer), others=()
    ):
        assert isinstance(row.defense, Trainer)
        folder = lab.trained_folder(row.defense)
        privacy = read_privacy_record(folder)
        claim = privacy.epsilon if privacy else None
        title = row.title + (f", ε {claim:.2f}" if claim is not None else "")
        yield title, load_causal_lm(str(folder))


def main(
    epochs: tuple[int, ...] = (3, 6),
    seed: int = 0,
    private: tuple[Literal["dp-sgd", "adp", "adp-sound"], ...] = (),
) -> None:
    threads.set_thread_count()
    lab = Lab(LabRecipe(seed=seed))
    page = Recalls(lab)
    public = load_causal_lm(str(lab.public_folder()))
    target = load_causal_lm(str(lab.target_folder()))
    for name, model in (("lab public model", public), ("lab target", target)):
        page.model(name, model, lab.secrets)
    for title, trained in trained_privately(lab, private):
        page.model(title, trained, lab.secrets)
    if private:
        return
    for count in epochs:
        for after in by_epoch(lab, count):
            page.model(after.name, after, lab.secrets)
    members = lab.ensemble_folder()
    hits = dict[str, list[Measurement]]()
    for index, folder in enumerate(sorted(members.glob("member-*"))):
        own = own_secrets(lab, read_shard_record_list(folder) or [])
        name = f"member {index + 1}, of its own shard"
        for count, share in page.model(name, load_adapter_model(public, folder), own).items():
            hits.setdefault(count, []).append(share)
    sizes = {count: sum(one.n for one in shares) for count, shares in hits.items()}
    every = {
        c: (sum(one.value * one.n for one in shares) / sizes[c], sizes[c])
        for c, shares in hits.items()
    }
    page.shares("all members, each of its own shard", "", every)


if __name__ == "__main__":
    raise SystemExit(run(main))
