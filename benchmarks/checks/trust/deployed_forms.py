"""Does a form in which a model is deployed bring back what unlearning took, or leak more than the full model?

    python -m benchmarks.checks.trust.deployed_forms [--seeds 0 1 2] [--out FOLDER]  (six minutes a seed on one core)

Zhang et al. (ICLR 2025): of what a model was made to forget, 21% is left in full precision and 83% in 4
bits. Here: the small lab's target, the same after gradient ascent and after NPO, and a model that never saw the records
to be forgotten. Each form is held against the full precision of the same model, paired by record, all seeds together.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from auditor.benchmarks.lab import Lab
from auditor.benchmarks.lab_recipe import LabRecipe
from auditor.benchmarks.splitting import plural
from auditor.core.nouns import Secret, Tokens
from auditor.defenses.deployed_forms import DeployedForm, Int4, Int8, PrunedForm
from auditor.defenses.unlearning import NPO, GradientAscent
from auditor.models.huggingface import HuggingFaceModel
from auditor.statistics.compare import difference_evidence
from benchmarks.checks.harness import Page, run

FORMS: dict[str, DeployedForm] = {
    "int8": Int8(),
    "int4": Int4(),
    "pruned 0.3": PrunedForm(0.3),
    "pruned 0.5": PrunedForm(0.5),
}
FULL = "full"


def main(seeds: tuple[int, ...] = (0, 1, 2), out: Path | None = None) -> None:
    page = Page(out and out / "deployed-forms.md")
    found: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    for seed in seeds:
        for key, numbers in of_seed(seed):
            found.setdefault(key, []).append(numbers)
    joined = {key: tuple(map(np.concatenate, zip(*many, strict=True))) for key, many in found.items()}
    records = len(joined["fine-tuned", FULL][0])
    labs = plural(len(seeds), "lab")
    page.say(f"{records} records to be forgotten, of {labs}; 95% intervals, of changes paired by record:\n")
    page.head("model", "form", "greedy", "minus full", "exact probability", "minus full", "perplexity, times full")
    for (model, form), (greedy, exact, nll) in joined.items():
        full = joined[model, FULL]
        changes = ["", ""] if form == FULL else [_change(a, b) for a, b in ((greedy, full[0]), (exact, full[1]))]
        ratio = float(np.exp((nll - full[2]).mean()))
        page.row(model, form, f"{greedy.mean():.1%}", changes[0], f"{exact.mean():.2%}", changes[1], f"{ratio:.3f}")


def _change(form: np.ndarray, full: np.ndarray) -> str:
    """In percentage points."""
    seen = difference_evidence((form,), (full,))
    value, low, high = (100 * x for x in (seen.value, seen.low(0.025), seen.high(0.025)))
    return f"{value:+.2f} [{low:+.2f} to {high:+.2f}]"


def of_seed(seed: int) -> Iterator[tuple[tuple[str, str], tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """Of each model and form: whether greedy decoding gives each forgotten record, how likely it is, and the nats a
    token of each held-out text."""
    lab = Lab(LabRecipe(seed=seed))
    options = lab.defense_defaults
    models = {
        "fine-tuned": lab.lab_target_model(),
        "gradient ascent": lab.model_trained_by_trainer(GradientAscent(**options["gradient-ascent"])).model,
        "NPO": lab.model_trained_by_trainer(NPO(**options["npo"])).model,
        "never saw them": lab.model_retrained_without_forgotten(),
    }
    records = [secret for secret in lab.secrets if secret.id in lab.forgotten]
    for name, model in models.items():
        assert isinstance(model, HuggingFaceModel)
        for form in (FULL, *FORMS):
            own = model.model
            if form != FULL:
                own = FORMS[form].convert_to_deployed_form(copy.deepcopy(own))
            yield (name, form), measured(own, records, lab.heldout)


@torch.no_grad()
def measured(model: Any, records: Sequence[Secret], heldout: Sequence[Tokens]) -> tuple[np.ndarray, ...]:
    greedy, exact = list[bool](), list[float]()
    for record in records:
        log_probs, likeliest = _log_probs(model, record.prefix + record.suffix)
        greedy.append(bool(likeliest[-len(record.suffix) :].all()))
        exact.append(float(log_probs[-len(record.suffix) :].sum().exp()))
    nll = [-float(_log_probs(model, text)[0].mean()) for text in heldout]
    return np.array(greedy, float), np.array(exact), np.array(nll)


def _log_probs(model: Any, text: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens - 1,): log p of each token behind those before it, and whether none is likelier."""
    ids = torch.tensor([text])
    every = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
    return every.gather(1, ids[0, 1:, None])[:, 0], every.argmax(-1) == ids[0, 1:]


if __name__ == "__main__":
    raise SystemExit(run(main))
