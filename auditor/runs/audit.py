"""One audit, ready to start: the site, the selected attacks and defenses, and the prefix token that all cells share.

Whatever can be refused before the first query to a model is refused here. `Scene` is the part that remote workers have
too; the run folder belongs to the main process alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from auditor.attacks.untargeted import Untargeted
from auditor.core.errors import AuditError
from auditor.core.nouns import Challenge, Lead, Secret
from auditor.core.plan import AUTO, Plan
from auditor.models import self_check
from auditor.models.base import LanguageModel
from auditor.models.huggingface import HuggingFaceModel
from auditor.models.references import References
from auditor.plugins.benchmark import Benchmark
from auditor.plugins.probe import Probe
from auditor.plugins.view import WORST, Setting, View
from auditor.records.folder import RunFolder
from auditor.runs import generations, personal
from auditor.runs.allowance import asked
from auditor.runs.generations import Corpus
from auditor.runs.lead import choose, led
from auditor.runs.personal import Personal
from auditor.runs.reporter import Reporter
from auditor.runs.selection import Selection
from auditor.runs.shelf import Shelf
from auditor.runs.site import Site
from auditor.runs.states import States
from auditor.runs.target import Target


@dataclass(frozen=True)
class Scene:
    """What all cells of a run have in common, wherever they are worked at."""

    plan: Plan
    site: Site
    selection: Selection
    reporter: Reporter
    shelf: Shelf
    lead: Lead

    @property
    def benchmark(self) -> Benchmark:
        return self.site.benchmark

    @cached_property
    def challenge(self) -> Challenge:
        return self.benchmark.challenge()

    def view(self, target: Target, setting: Setting) -> View:
        public, reference = (
            other and led(other, self.lead.tokens) for other in (self.site.public, self.site.reference)
        )
        return View(
            target_name=target.name,
            target=target.model,
            setting=setting,
            seed=self.plan.seed,
            public=public,
            reference=reference,
            reference_fault=self.site.reference_fault,
            references=self.references,
            tokenizer=self.benchmark.tokenizer,
            batch_size=self.plan.batch_size,
            meter=target.meter,
            training=target.canaries,
            claim=target.claim,
        )

    def references(self, asked: str) -> References:
        """The reference models that `-A references=` names, behind the lead. Raises AuditError where there are none."""
        found = self.site.references(asked)
        return References(tuple(led(model, self.lead.tokens) for model in found.models), found.saw)

    def self_check(self, models: Iterable[LanguageModel | None]) -> None:
        """Whether each gives one law however it is asked, up to the longest text of this run behind the soft prompt."""
        texts = [len(query.prefix) + query.length for query in self.challenge.queries]
        texts += [len(canary.prefix + canary.suffix) for canary in self.benchmark.canaries]
        texts += map(len, self.benchmark.heldout)
        reach = self.selection.prompt_rows + len(self.lead.tokens) + max(texts, default=1)
        for model in models:
            if isinstance(model, HuggingFaceModel):
                notes = self_check.check(model, reach)
                self.benchmark.notes += notes
                for note in notes:
                    self.reporter.note(note)

    def check_probes(self) -> None:
        """Refuses what a probe could only refuse after hours. Raises AuditError."""
        for method in self.selection.methods:
            if not isinstance(method, Probe):
                continue
            if method.of == "secrets":
                method.check(self.benchmark.secrets)
        for wanted in self.selection.references:
            self.references(wanted)

    def check_room(self) -> None:
        """Raises AuditError where a model has no room for the texts of this run behind its lead and soft prompt."""
        rows, lead = self.selection.prompt_rows, len(self.lead.tokens)
        prompt = torch.empty(rows, 0) if rows else None
        model, public, reference = self.site.model, self.site.public, self.site.reference
        for n_prefix, length in {(len(query.prefix), query.length) for query in self.challenge.queries}:
            model.check_room(n_prefix, length, prompt, lead)
            if public is not None:
                public.check_room(n_prefix, length, prompt, lead)
            if reference is not None:
                reference.check_room(n_prefix, length, lead=lead)
        for n_prefix, length in {(len(canary.prefix), len(canary.suffix)) for canary in self.benchmark.canaries}:
            model.check_room(n_prefix, length, lead=lead)


@dataclass(frozen=True)
class Audit(Scene):
    """The scene of a run with its folder."""

    folder: RunFolder

    @cached_property
    def secrets(self) -> dict[str, Secret]:
        return {secret.id: secret for secret in self.benchmark.secrets}

    @cached_property
    def personal(self) -> Personal:
        return personal.follow(self.benchmark, personal.regions_of(self.plan))

    @property
    def subjects(self) -> tuple[Secret, ...]:
        """All that the run is about, for its fingerprint. Of the lab's canaries, those that other runs do not have."""
        canaries = self.benchmark.canaries
        own = (
            canaries if self.plan.canaries else [one for one in canaries if one.canary and one.canary.coin is not None]
        )
        return (*self.benchmark.secrets, *own)

    @cached_property
    def asked(self) -> dict[str, Any]:
        """With what stands before every text, which model is attacked for which secrets: equal ones share answers."""
        return {**self.site.subject, "lead": self.lead.tokens}

    @cached_property
    def corpus(self) -> Corpus:
        """What generations are held against. Raises AuditError where there is no holding them against it."""
        attack = next(method for method in self.selection.methods if isinstance(method, Untargeted))
        index = self.shelf.get("n-grams", self.site.subject, lambda: generations.index_of(self.benchmark))
        return generations.corpus_of(attack, self.benchmark, index)

    def check_generations(self, target: Target) -> None:
        """Refuses what could only be refused after the first of them was drawn. Raises AuditError."""
        view = self.view(target, WORST)
        for attack in self.selection.attacks:
            if not isinstance(attack, Untargeted):
                continue
            self.corpus  # noqa: B018 - made now, before hours of drawing
            for n_prefix, length in {(len(query.prefix), query.length) for query in asked(view, attack, ())}:
                for model in (target.model, view.public, view.reference):
                    if model is not None:
                        model.check_room(n_prefix, length)

    @cached_property
    def states(self) -> States:
        return States(self.plan, self.folder, self.shelf, self.asked, self.challenge.known)


def choose_lead(plan: Plan, site: Site, longest: int, folder: RunFolder, shelf: Shelf) -> Lead:
    """Once a run, on the model without a defense; a resumed run keeps the one it was started with.

    longest: tokens that a context takes beside the lead, at most. Raises AuditError where a resumed run is asked for
    another one.
    """
    held = folder.lead()
    if held is not None and plan.lead == AUTO:
        return held
    told = site.benchmark
    key = [site.subject, plan.lead, plan.known_limit, longest]
    lead: Lead = shelf.get(
        "lead",
        key,
        lambda: choose(plan.lead, site.model, told.known, longest, told.canaries, told.framed, told.as_trained),
    )
    if held is None:
        folder.save_lead(lead)
    elif held.tokens != lead.tokens:
        raise AuditError(
            f"expected the lead that {str(folder.path)!r} was started with ({held.said}), got --lead {plan.lead}"
        )
    return lead


def longest_context(benchmark: Benchmark, prompt_rows: int) -> int:
    """Tokens that a context takes beside the lead, at most."""
    pairs = [*((pair.prefix, pair.suffix) for pair in benchmark.known)]
    pairs += [(secret.prefix, secret.suffix) for secret in benchmark.secrets]
    others = [*map(len, benchmark.heldout), *(len(canary.prefix + canary.suffix) for canary in benchmark.canaries)]
    return max([*(prompt_rows + len(prefix) + len(suffix) for prefix, suffix in pairs), *others], default=0)
