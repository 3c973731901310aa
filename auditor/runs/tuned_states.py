"""What attacks tuned in a run: once for each state, kept in the run folder, shared with runs that tune the same."""

from __future__ import annotations

import io
import json
from typing import Any

import torch

from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.nouns import Pair
from auditor.plugins.attack import Attack
from auditor.plugins.view import View
from auditor.records.folder import RunFolder
from auditor.runs.sweep_cache import SweepCache
from auditor.runs.target import Target

State = dict[str, Any]


class TunedStates:
    """configured: what of the plan a state depends on. asked: with what stands before every text, which model is
    attacked for which secrets.
    """

    def __init__(
        self,
        configured: list[Any],
        folder: RunFolder,
        shared: SweepCache,
        asked: dict[str, Any],
        known: tuple[Pair, ...],
    ) -> None:
        self.configured, self.folder, self.shared, self.asked, self.known = configured, folder, shared, asked, known
        self._held: dict[tuple[str, str], State] = {}

    def of(self, target: Target, view: View, attack: Attack) -> State:
        """Tunes where neither this run, nor one that it goes on from, nor one beside it has done so."""
        key = (attack.name, attack.state_name(view))
        if key not in self._held:
            name = "-".join(key)
            state = load_attack_state(self.folder, name)
            if state is None:
                # All that the state depends on. A defense may be set up for what the row will draw: another number is
                # another model to tune on.
                queries = target.scenario.queries if target.scenario else None
                made_of = [self.asked, *self.configured, queries, key, attack.fit_options()]
                known_as = json.dumps(made_of, sort_keys=True)
                state = self.shared.fits.get(known_as) or attack.fit(view, self.known)
                save_attack_state(self.folder, name, state)
                self.shared.fits[known_as] = state
            self._held[key] = state
        return self._held[key]


# --- in the run folder ------------------------------------------------------------------------------------------------


def save_attack_state(folder: RunFolder, cell: str, state: dict[str, Any]) -> None:
    made = io.BytesIO()
    torch.save(state, made)
    disk.replace_atomically(folder.attack_state_path(cell), made.getvalue())


def load_attack_state(folder: RunFolder, cell: str) -> dict[str, Any] | None:
    """None where nothing was tuned. Raises AuditError for a file that cannot be read."""
    path = folder.attack_state_path(cell)
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
    except Exception as error:  # torch raises a dozen kinds, all of them about the file
        raise AuditError(f"{path}: expected what an attack tuned, got a file that cannot be read") from error
    if not isinstance(state, dict):
        raise AuditError(f"{path}: expected what an attack tuned, got {type(state).__name__}")
    return state
