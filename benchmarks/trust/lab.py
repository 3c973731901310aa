"""What the lab's models remember: the target by epoch, and each member of the ensemble of its own shard.

    python benchmarks/trust/lab.py [--epochs 3 6] [--seed 0]
    python benchmarks/trust/lab.py --private dp-sgd adp      # instead: private trainings, each with its controls

Greedy recall by how often records occur, beside the held-out perplexity (of the non-members' prefixes and suffixes):
whether the target is one that a careful engineer would ship, and whether a defense has anything to keep in. The target
is trained as the lab does it, for other numbers of epochs too; members come from the lab's cache, or are trained.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from auditor.benchmarks.lab import Lab
from auditor.benchmarks.lab_recipe import LabRecipe
from auditor.benchmarks.lab_training import has_bfloat16
from auditor.core import threads
from auditor.core.nouns import Secret
from auditor.core.streams import generator
from auditor.models.base import LanguageModel, perplexity_nll
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.lora import adapted
from auditor.models.shards import record_names
from auditor.plugins import registry
from auditor.plugins.options import build
from auditor.plugins.trainer import Trainer
from auditor.runs import companions
from auditor.runs.scoring import greedy_recall
from auditor.statistics.intervals import Measurement
from auditor.training.finetune import Course, Fitting, trained_parameters
from auditor.training.members import Adapter, over_same_weights, with_adapter
from auditor.training.side_by_side import alone


def by_epoch(lab: Lab, epochs: int) -> Iterator[LanguageModel]:
    """The target after each epoch of a training of so many."""
    recipe, public = lab.recipe, lab.public()
    torch.manual_seed(recipe.seed)
    adapter = Adapter(recipe.private_rank, recipe.private_alpha, "all")
    model = with_adapter(over_same_weights(public.model), adapter).eval()
    course = Course(epochs, recipe.private_rate, recipe.private_batch, recipe.block, end=0)
    sequences = [tuple(ids) for ids in lab.tokenizer(lab.texts.copies())["input_ids"]]
    fitting = Fitting(trained_parameters(model), sequences, course, generator("lab", recipe.seed, "target 1"))
    while not fitting.done:
        with torch.autocast("cpu", torch.bfloat16, enabled=has_bfloat16()):
            alone([model], [fitting.batch()]).sum().backward()
        fitting.step()
        if fitting.steps == 0:
            yield HuggingFaceModel(
                copy.deepcopy(model), lab.tokenizer, f"target after {fitting.epochs} of {epochs} epochs"
            )


def perplexity(lab: Lab, model: LanguageModel) -> float:
    nll, tokens = zip(*perplexity_nll(model, lab.heldout), strict=True)
    return math.exp(sum(nll) / sum(tokens))


def own_secrets(lab: Lab, shard: Sequence[str]) -> list[Secret]:
    """The attacked members whose whole record lies in this shard."""
    names, texts = set(shard), {}
    for text in lab.texts.records(members=True):
        texts[tuple(lab.tokenizer(text)["input_ids"][: 24 + lab.recipe.suffix_length])] = record_names([text])[0]
    return [s for s in lab.secrets if s.member and texts.get((*s.prefix, *s.suffix)) in names]


def line(name: str, perplexity: float, recall: Mapping[str, Measurement], counts: Sequence[int]) -> str:
    cells = [f"{100 * recall[str(c)].value:4.0f}% of {recall[str(c)].n:<3}" if str(c) in recall else "" for c in counts]
    return f"{name:34} {perplexity:6.2f}  " + "  ".join(f"{cell:12}" for cell in cells)


def trained_privately(lab: Lab, names: Sequence[str]) -> Iterator[tuple[str, LanguageModel]]:
    """The lab's private trainings and their controls: title with epsilon, and model."""
    known = registry.defenses()
    defenses = [build("defense", known, name, lab.defense_defaults[name]) for name in names]
    for row in companions.shown(defenses, lambda control: isinstance(control, Trainer)):
        assert isinstance(row.defense, Trainer)
        trained = lab.trained(row.defense)
        claim = trained.privacy.epsilon if trained.privacy else None
        yield row.title + (f", ε {claim:.2f}" if claim is not None else ""), trained.model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, nargs="+", default=[3, 6])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--private", nargs="+", choices=("dp-sgd", "adp", "adp-sound"), default=[])
    o = parser.parse_args()
    threads.settle()
    lab = Lab(LabRecipe(seed=o.seed))
    counts = lab.recipe.counts
    print(f"{'':34} {'PPL':>6}  " + "  ".join(f"{f'{count} times':12}" for count in counts))
    for model in (lab.public(), lab.target()):
        print(line(model.name, perplexity(lab, model), greedy_recall(model, lab.secrets), counts), flush=True)
    for title, private in trained_privately(lab, o.private):
        print(line(title, perplexity(lab, private), greedy_recall(private, lab.secrets), counts), flush=True)
    if o.private:
        return
    for epochs in o.epochs:
        for after in by_epoch(lab, epochs):
            print(line(after.name, perplexity(lab, after), greedy_recall(after, lab.secrets), counts), flush=True)
    ensemble = lab.ensemble()
    hits: dict[str, list[float]] = {}
    for index, folder in enumerate(sorted(lab.ensemble_folder.glob("member-*"))):
        member = adapted(lab.public(), folder)
        recall = greedy_recall(member, own_secrets(lab, list((ensemble.shards or [])[index] or [])))
        for count, share in recall.items():
            hits.setdefault(count, []).extend([share.value * share.n, share.n])
        print(line(f"member {index + 1}, of its own shard", perplexity(lab, member), recall, counts), flush=True)
    said = {c: f"{100 * sum(h[::2]) / sum(h[1::2]):.0f}% of {sum(h[1::2]):.0f}" for c, h in hits.items()}
    print(f"{'all members, each of its own shard':43}" + "  ".join(f"{said.get(str(c), ''):12}" for c in counts))


if __name__ == "__main__":
    main()
