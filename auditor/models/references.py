"""Load reference models, and the records that they were trained on, from `shard.json`.

Reference models were trained in the same way as the attacked model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from auditor.core.errors import AuditError
from auditor.models.base import LanguageModel
from auditor.models.shards import SHARD, read_shard_record_list

_MODEL = ("config.json", "adapter_config.json")


@dataclass(frozen=True)
class ReferenceModels:
    """Reference models and their training records.

    `saw` holds, for each model, the ids of the attacked records that it was trained on.
    """

    models: tuple[LanguageModel, ...]
    saw: tuple[frozenset[str], ...]

    def check_records_seen_by_references(self, attacked: Collection[str], where: str) -> None:
        """Raise AuditError if the reference models cannot distinguish members from non-members.

        There must be at least 2 models. No model may be trained on all attacked records, and no
        attacked record may be in the training of all models.

        `attacked` holds the ids of the records. `where` names the models' folder in the error
        message.
        """
        if len(self.models) < 2:
            raise AuditError(
                f"expected at least 2 reference models in {where}, got {len(self.models)}"
            )
        for model, saw in zip(self.models, self.saw, strict=True):
            if saw >= set(attacked):
                raise AuditError(
                    "expected references that did not see some of the attacked records, but "
                    f"{model.name} saw all {len(attacked)}"
                )
        everywhere = set(attacked).intersection(*self.saw)
        if everywhere:
            raise AuditError(
                "expected every attacked record to be unseen by at least one reference in "
                f"{where}, but all of them saw {len(everywhere)} of {len(attacked)}"
            )


def find_reference_model_folders(folder: Path) -> list[Path]:
    """Return the sub-folders that contain a model or an adapter, in name order."""
    return sorted(
        path for path in folder.glob("[!.]*/") if any((path / name).is_file() for name in _MODEL)
    )


def load_reference_models(
    folder: Path, load: Callable[[str], LanguageModel], attacked: Mapping[str, Collection[str]]
) -> ReferenceModels:
    """Load the models in the sub-folders of `folder`, in name order, with their training records.

    The file `shard.json` of a model lists the SHA-256 of each attacked text (prefix and suffix)
    that the model was trained on. Raise AuditError if a `shard.json` has any other content.

    Args:
        folder: folder of the reference models.
        load: function that loads a model from its folder.
        attacked: ids of the attacked records, keyed by the SHA-256 of their text.
    """
    if not folder.is_dir():
        raise AuditError(
            f"expected -A references= to be a folder of reference models, got {str(folder)!r}"
        )
    folders = find_reference_model_folders(folder)
    digest_lists = [read_shard_record_list(place) for place in folders]
    for place, names in zip(folders, digest_lists, strict=True):
        if names is None:
            raise AuditError(
                f"expected {str(place / SHARD)!r} to say which records this reference saw, got no "
                "file"
            )
        if names and not any(name in attacked for name in names):
            raise AuditError(
                f"expected {str(place / SHARD)!r} to name records by the SHA-256 of prefix and "
                f"suffix as they are attacked, got {len(names)} names of which none is an attacked "
                "record's; an empty list says that it saw none"
            )
    saw = (
        frozenset(id for name in names or () for id in attacked.get(name, ()))
        for names in digest_lists
    )
    references = ReferenceModels(tuple(load(str(place)) for place in folders), tuple(saw))
    references.check_records_seen_by_references(
        {id for ids in attacked.values() for id in ids}, repr(str(folder))
    )
    return references
