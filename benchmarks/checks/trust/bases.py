"""What the checks of this folder fine-tune by `audit train`: the small lab's public model, or SmolLM2 by an adapter."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from auditor.benchmarks.lab import Lab
from auditor.benchmarks.lab_recipe import LabRecipe
from auditor.benchmarks.smollm2 import smollm2_folder
from auditor.cli import call
from benchmarks.checks.harness import refuse

Name = Literal["small", "smollm2"]


@dataclass(frozen=True)
class Base:
    """save: writes it into a folder. course: how it is trained, but for the epochs."""

    save: Callable[[Path], None]
    course: tuple[object, ...]


def _small(folder: Path) -> None:
    lab = Lab(LabRecipe())
    lab.public().model.save_pretrained(folder)
    lab.tokenizer.save_pretrained(folder)


def _smollm2(folder: Path) -> None:
    shutil.copytree(smollm2_folder(), folder)


_LORA = ("--lora", "--lora-rank", 16, "--block", 256, "-D", "batch=3", "-D", "learning_rate=1e-3")
BASES: dict[Name, Base] = {
    "small": Base(_small, ("-D", "learning_rate=2e-3")),
    "smollm2": Base(_smollm2, _LORA),
}


def audit(*parts: object) -> None:
    """Runs a command of `audit`, which must end well."""
    if code := call([str(part) for part in parts]):
        refuse(f"audit {parts[0]} ended with {code}")
