"""Run an audit with one call, and load finished runs as tables, in notebooks and scripts.

from auditor import audit, load_run

result = audit(
    model, tokenizer, data="private.jsonl", attacks=["perplexity"], defenses=["uniform-mixing"]
)
result.to_frame()
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import json
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from auditor.conclusions import secret_details
from auditor.conclusions.outcomes import RunOutcomes, read_run_outcomes
from auditor.core import disk
from auditor.core.errors import AuditError
from auditor.core.plan_parts import AttackPlan
from auditor.core.result import AuditResult
from auditor.gate import policy
from auditor.gate.compare import compare_finished_runs
from auditor.gate.rulings import Decision
from auditor.records import table
from auditor.reports import escaping, export, files, phrases, verdict

if TYPE_CHECKING:
    import pandas as pd

    from auditor.models.base import LanguageModel
    from auditor.runs.reporter import Reporter
    from auditor.runs.site import Site

# pandas' nullable types (capitalised), because a number may be missing
_KINDS = {"text": "string", "number": "float64", "count": "Int64", "flag": "boolean"}
_ROWS = ("data", "known", "nonmembers", "forget")
# fields about loading the attacked model, or about querying its server
_OF_LOADING = (
    *("device", "dtype", "device_map", "quantise", "revision", "model_args"),
    *("base", "base_url", "max_tokens_total"),
)


@dataclass(frozen=True, repr=False)
class FinishedRun:
    """A run folder with its result. All methods work without the model and without torch."""

    folder: Path
    run: RunOutcomes

    @property
    def result(self) -> AuditResult:
        """Content of `result.json`."""
        return self.run.result

    def to_frame(self) -> pd.DataFrame:
        """Return all measurements as a data frame.

        A row holds value, interval, n, unit and claim for one target, setting, attack, measurement
        and repeat count.
        """
        import pandas as pd

        sheet = export.build_measurement_sheet([self.result])
        frame = pd.DataFrame(sheet.rows, columns=list(sheet.columns))
        return frame.astype({name: _KINDS[kind] for name, kind in sheet.columns.items()})

    @property
    def secrets(self) -> pd.DataFrame:
        """Content of `secrets.parquet` as a data frame, with aliases instead of text.

        A row holds one value, for a kind, target, setting, attack, secret and quantity. Raise
        AuditError if the folder has no such file.
        """
        return table.read_dataframe(self.folder, secret_details.map_aliases(self.folder))

    def gate(
        self, rules: str | Path | Sequence[str], *, baseline: str | Path | FinishedRun | None = None
    ) -> Decision:
        """Judge the run by gate rules, as `audit gate` does: held, failed or inconclusive.

        `rules` is a policy file, or sentences such as "recall <= 0.05". `baseline` is a run to
        compare with. Raise AuditError if there are no rules, or if the baseline cannot be compared.
        """
        base = load_run(baseline) if isinstance(baseline, (str, Path)) else baseline
        from auditor.runs import gate_inputs

        limits = _build_policy(rules)
        return gate_inputs.judge_gated_run(self.folder, limits, None if base is None else base.run)

    def report(
        self,
        path: str | Path | None = None,
        *,
        since: FinishedRun | None = None,
        reveal: bool = False,
    ) -> Path:
        """Render the reports again. Return the path of the page.

        Args:
            path: file to write (.html, or .md for Markdown); None for the page in the run folder.
            since: an earlier run, to show what has changed since then.
            reveal: whether to show the private text in the folder too.
        """
        if since is None:
            changes = None
        else:
            changes = compare_finished_runs([since.run, self.run])
        page, markdown = files.rewrite_run_reports(self.folder, changes, reveal)
        if path is None:
            return page
        destination = Path(path)
        forms = {".html": page, ".md": markdown}
        if destination.suffix not in forms:
            raise AuditError(f"expected a report in .html or .md, got {destination.name!r}")
        disk.replace_atomically(destination, forms[destination.suffix].read_bytes())
        return destination

    @property
    def _headline(self) -> str:
        return verdict.write_verdict_headline(phrases.make_result_printable(self.result))

    def __repr__(self) -> str:
        return f"<audit {self.folder}: {escaping.make_printable_line(self._headline)}>"

    def _repr_html_(self) -> str:
        # pandas escapes the cells itself
        table = self.to_frame().to_html(max_rows=40, notebook=True)
        return f"<p>{escaping.escape_for_html(self._headline)}</p>{table}"


def load_run(folder: str | Path) -> FinishedRun:
    """Return the finished run in a folder.

    Raise AuditError if the folder has no run that this version can read.
    """
    return FinishedRun(Path(folder), read_run_outcomes(Path(folder)))


def audit(
    model: Any = None,
    tokenizer: Any = None,
    *,
    data: Any = None,
    attacks: Sequence[Any] = AttackPlan.attack,
    defenses: Sequence[Any] = (),
    public: Any = None,
    reference: Any = None,
    out: str | Path | None = None,
    reporter: Reporter | None = None,
    **plan: Any,
) -> FinishedRun:
    """Run an audit, like the command `audit run`. Without a model, audit the built-in lab.

    Args:
        model: a folder, a hub id, or a transformers or PEFT model in memory, which is left
            unchanged. Also a `LanguageModel` of your own, which has its tokenizer, or `openai:NAME`
            with base_url=.
        tokenizer: tokenizer of all transformers models; with `openai:NAME`, a folder or hub id.
        data: a path, a hub id, or rows with `prefix` and `suffix` (or `text`). Rows are a list of
            dictionaries, a DataFrame or a `datasets.Dataset`.
        attacks: names, or instances of built-in classes or your own. An instance sets its options.
        defenses: names or instances, as for attacks.
        public: public model, given like `model`.
        reference: reference model, given like `model`.
        out: run folder.
        reporter: receives messages about progress; None shows no progress.
        plan: any other field of `auditor.core.plan.Plan`, such as `seed=1`. `known`, `nonmembers`
            and `forget` are given like `data`.

    Raise AuditError, with one sentence, for any input that the command refuses. In that case no
    files remain.
    """
    # Imported here, because torch takes seconds to import and `load_run` does not need it.
    from auditor.records.folder import RunFolder
    from auditor.runs import run

    with open_prepared_audit(
        model,
        tokenizer,
        data=data,
        attacks=attacks,
        defenses=defenses,
        public=public,
        reference=reference,
        reporter=reporter,
        **plan,
    ) as site:
        planned = run.plan_audit(site)
        folder = RunFolder.create(
            None if out is None else Path(out), site.plan.run_folder_title, site.plan.to_json()
        )
        try:
            result = run.run_audit(planned, folder)
        except Exception:
            # Ctrl-C is not an Exception, so it keeps the results so far.
            folder.discard_if_empty()
            raise
        files.write_run_reports(folder.path, result)
    return load_run(folder.path)


@contextmanager
def open_prepared_audit(
    model: Any = None,
    tokenizer: Any = None,
    *,
    data: Any = None,
    attacks: Sequence[Any] = AttackPlan.attack,
    defenses: Sequence[Any] = (),
    public: Any = None,
    reference: Any = None,
    reporter: Reporter | None = None,
    **plan: Any,
) -> Iterator[Site]:
    """Yield the site of `audit` with these arguments, which loads the models and the data.

    After the block, models in memory are as before. Raise AuditError as `audit` does.
    """
    from auditor.runs import live_models, run
    from auditor.runs.plan import make_plan
    from auditor.runs.selection import list_unregistered_plugins, name_python_class

    models = {"model": model, "public": public, "reference": reference}
    plan["data"] = data
    live_objects = {}
    for name, argument in models.items():
        if live_models.is_live_model(name, argument):
            live_objects[name] = argument
    if isinstance(tokenizer, (str, Path)):  # for a model behind an API, which the plan handles
        plan = {**plan, "tokenizer": tokenizer}
        tokenizer = None
    _check_audit_arguments(tokenizer, live_objects, plan)
    with ExitStack() as stack:
        # This comes first, because wrapping a model freezes its parameters and leaves it in eval
        # mode.
        stack.enter_context(live_models.restore_training_state(*live_objects.values()))
        live = {}
        names = {}
        for role, argument in models.items():
            if role in live_objects:
                live[role] = live_models.wrap_live_model(argument, tokenizer)
                names[role] = live_models.name_live_model(argument)
            elif argument is not None:
                names[role] = str(argument)
        values = {**plan, "command": "audit()", **_read_live_placement(live)}
        values |= stack.enter_context(_open_row_files({name: values.get(name) for name in _ROWS}))
        values |= names | _name_plan_plugins(plan, attacks, defenses)
        # A plan is written as JSON, so paths must be text.
        for name, argument in values.items():
            if isinstance(argument, Path):
                values[name] = str(argument)
        checked_plan = make_plan({}, values)
        rows = {}
        for name in _ROWS:
            argument = plan.get(name)
            if not isinstance(argument, str | Path | None):
                rows[name] = argument
        objects = {
            **live_objects,
            **rows,
            **list_unregistered_plugins(checked_plan.plugin, attacks, defenses),
        }
        # Recorded in the plan: objects cannot be read back, so resuming this folder is refused.
        class_names = dict(zip(objects, map(name_python_class, objects.values()), strict=True))
        checked_plan = dataclasses.replace(checked_plan, objects=class_names)
        yield run.Site(checked_plan, reporter, live=live, objects=objects)


def _name_plan_plugins(
    plan: Mapping[str, Any], attacks: Sequence[Any], defenses: Sequence[Any]
) -> dict[str, Any]:
    """Return the plan fields of attacks and defenses. Raise AuditError if there is no attack."""
    fields: dict[str, Any] = {}
    for kind, plugins in (("attack", attacks), ("defense", defenses)):
        fields[kind], fields[f"{kind}_options"] = _split_plugin_arguments(
            kind, plugins, plan.get(f"{kind}_options") or {}
        )
    if not fields["attack"]:
        raise AuditError("expected at least one attack, got none; `audit list` shows them")
    return fields


def _check_audit_arguments(
    tokenizer: Any, live: Mapping[str, Any], plan: Mapping[str, Any]
) -> None:
    """Raise AuditError for arguments that would have no effect or a different meaning.

    `live` holds the models in memory, keyed by role, and `plan` holds further plan fields.
    """
    from auditor.core.plan import IN_FILE
    from auditor.models.base import LanguageModel
    from auditor.runs.live_models import check_no_shared_weights, is_live_model

    if odd := [name for name in plan if name not in IN_FILE or name in ("attack", "defense")]:
        raise AuditError(f"unknown argument {odd[0]!r} of audit(); known: {', '.join(IN_FILE)}")
    # This also refuses a tokenizer without any live model, because all() of nothing is True.
    if tokenizer is not None and all(isinstance(one, LanguageModel) for one in live.values()):
        raise AuditError(
            "expected a tokenizer only with a live transformers model: a folder, a hub id or a "
            "LanguageModel has its own"
        )
    if "model" in live and (loading_fields := [name for name in _OF_LOADING if plan.get(name)]):
        raise AuditError(
            f"expected no {loading_fields[0]} with a live model, which is loaded already, got "
            f"{plan[loading_fields[0]]!r}"
        )
    for name in ("before", "retrained"):
        if is_live_model(name, plan.get(name)):
            raise AuditError(
                f"expected {name} as a folder or a hub id, got a live {type(plan[name]).__name__}: "
                "save it"
            )
    check_no_shared_weights(live)


def _read_live_placement(live: Mapping[str, LanguageModel]) -> dict[str, Any]:
    """Return device and precision of the main model in memory, as plan fields.

    Models that are loaded later use this device and precision. Return {} if the main model is not
    in memory. `live` holds the models in memory, keyed by role.
    """
    from auditor.models.huggingface import HuggingFaceModel

    if "model" not in live:
        return {}
    model = live["model"]
    if isinstance(model, HuggingFaceModel):
        precision = {"dtype": str(model.model.dtype).removeprefix("torch.")}
    else:
        precision = {}
    return {"device": str(model.device), **precision}


@contextmanager
def _open_row_files(rows: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a file path for each item, keyed by name. Paths are returned unchanged.

    Rows in memory are written to a file that only its owner can read; it is removed after the
    block.
    """
    with disk.open_scratch_folder(Path(tempfile.gettempdir()), "records") as scratch:
        paths = {}
        for name, source in rows.items():
            if isinstance(source, (str, Path)):
                paths[name] = str(source)
            elif source is not None:
                paths[name] = str(scratch / f"{name}.jsonl")
                disk.replace_atomically(Path(paths[name]), _encode_rows(name, source))
        yield paths


def _encode_rows(name: str, rows: Any) -> str:
    """Return rows as JSON lines. In messages, `name` is the name of the argument.

    Raise AuditError if the rows are not a table.
    """
    import pandas as pd

    # Of datasets.Dataset, pyarrow and polars. pandas would make floats of whole numbers with gaps,
    # also inside objects. Other objects are refused below.
    for method in ("to_list", "to_pylist", "to_dicts", "to_pandas"):
        if hasattr(rows, method):
            rows = getattr(rows, method)()
            break
    if not isinstance(rows, pd.DataFrame) and not (
        isinstance(rows, (list, tuple)) and all(isinstance(row, Mapping) for row in rows)
    ):
        raise AuditError(
            f"expected {name} as a path, a table or a list of dictionaries, got "
            f"{type(rows).__name__}"
        )
    # As objects: in a column with missing values, pandas would make floats of whole numbers.
    table = pd.DataFrame(rows, dtype=object)
    if not table.columns.is_unique:
        raise AuditError(
            f"expected {name} with each column once, got {len(table.columns)} columns, some with "
            "the same name"
        )
    records = table.where(table.notna(), None).to_dict("records")
    try:
        lines = [json.dumps(row, default=_encode_cell, allow_nan=False) for row in records]
    except (ValueError, TypeError):
        raise AuditError(
            f"expected {name} as text and numbers, got a column that JSON cannot hold"
        ) from None
    return "\n".join(lines)


def _encode_cell(value: Any) -> Any:
    """Return a value that JSON lacks as a list or a text. Raise TypeError for other objects."""
    if hasattr(value, "tolist"):  # arrays and numbers of numpy
        return value.tolist()
    if isinstance(value, datetime.date | datetime.time | decimal.Decimal | uuid.UUID):
        return str(value)
    raise TypeError


def _split_plugin_arguments(
    kind: str, plugins: Sequence[Any], options: Mapping[str, Any]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names of the plug-ins, and their options keyed by name.

    An instance sets all its own options. Raise AuditError if an object is not a plug-in.
    """
    from auditor.runs.selection import KINDS

    if isinstance(plugins, str) or not isinstance(plugins, Sequence):
        raise AuditError(f"expected a list of {kind}s, by name or as instances, got {plugins!r}")
    names = []
    plugin_options = dict(options)
    for plugin in plugins:
        if not isinstance(plugin, str):
            if not isinstance(plugin, KINDS[kind]):
                raise AuditError(f"expected {kind}s by name or as instances, got {plugin!r}")
            # Not asdict(), which would copy the option values.
            field_values = {}
            for f in dataclasses.fields(plugin):
                field_values[f.name] = getattr(plugin, f.name)
            plugin_options[plugin.name] = {**plugin_options.get(plugin.name, {}), **field_values}
        names.append(plugin if isinstance(plugin, str) else plugin.name)
    if twice := [name for name in names if names.count(name) > 1]:
        raise AuditError(
            f"expected each {kind} once, got {twice[0]!r} twice: run one audit for each"
        )
    return tuple(names), plugin_options


def _build_policy(rules: str | Path | Sequence[str]) -> policy.Policy:
    if isinstance(rules, (str, Path)):
        return policy.read_gate_policy(Path(rules))
    parsed = policy.refuse_repeated_limits([policy.parse_gate_rule(sentence) for sentence in rules])
    if not parsed:
        raise AuditError(
            "expected at least one rule, got none; a gate without rules decides nothing"
        )
    return policy.Policy(parsed)
