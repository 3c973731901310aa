"""The weights of a saved model, read whole: none missing, none of another model, in the precision
asked for."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BitsAndBytesConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)
from transformers.utils import cached_file, is_bitsandbytes_available

from auditor.core.errors import AuditError
from auditor.core.plan_fields import AUTO
from auditor.core.plan_parts import LoadingOptions
from auditor.models.precision import DTYPES, auto_dtype, saved_dtype

Kind = Literal["causal", "masked"]
_AUTO: Mapping[Kind, tuple[Any, Mapping[str, Any]]] = {
    "causal": (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked": (AutoModelForMaskedLM, MODEL_FOR_MASKED_LM_MAPPING_NAMES),
}
# Models that predict no token, by what their architecture is called.
_OTHERS = {
    "SequenceClassification": "a classifier of texts",
    "TokenClassification": "a classifier of tokens",
    "QuestionAnswering": "a model that marks answers",
    "MultipleChoice": "a model that chooses among answers",
    "NextSentencePrediction": "a model that classifies pairs of sentences",
    "ElectraForPreTraining": "a discriminator, which tells replaced tokens from true ones",
}
# Models that read more of a text than its tokens, by their type: what they are told beside it.
_MORE_THAN_TOKENS = {
    "layoutlm": "where on a page each word stands",
    "tapas": "which cell of a table each token is in",
}
# Names that wrappers leave anywhere: torch.compile, fully sharded, recomputed activations,
# DeepSpeed; and in front of all, where no module of the model's own is called so: data parallel,
# Opacus.
_ANYWHERE = r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
_IN_FRONT = rf"^(?:{_ANYWHERE}|_?module\.)+"
_WRAPPER = re.compile(rf"{_IN_FRONT}|(?<=\.)(?:{_ANYWHERE})+")
# As transformers takes it, which applies each pattern to one place of a name: three behind the
# front.
WRAPPED = {_IN_FRONT: "", **{rf"(\.)(?:{_ANYWHERE}){{1,{most}}}": r"\1" for most in (9, 8, 7)}}
# Weights that say nothing of the distribution: constants that older versions stored, poolers and
# heads beside the language model's, what reads pictures and sound.
_HARMLESS = re.compile(
    r"(^|\.)(inv_freq|masked_bias|position_ids|attn\.bias|attention\.bias|pooler\..*|cls\.seq_relationship\..*"
    r"|v_head\..*|(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|embed_vision|embed_audio)\..*)$"
)
# Where transformers looks for weights, in its order: one file or its shards.
FORMATS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
_SHOWN = 3  # names of weights in a sentence
_OURS = (
    "config",
    "ignore_mismatched_sizes",
    "output_loading_info",
    "state_dict",
    "revision",
    "trust_remote_code",
)
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # of transformers and accelerate


def resolve_model_device(device: str) -> torch.device:
    """Where models go. `auto`: the accelerator, where there is one. Raises AuditError for what is
    not there."""
    best = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device == AUTO:
        return best or torch.device("cpu")
    try:
        asked = torch.device(device)
    except RuntimeError:
        raise AuditError(
            f"expected --device as auto, cpu, cuda, cuda:N or mps, got {device!r}"
        ) from None
    if asked.type == "cpu":
        return asked
    count = torch.accelerator.device_count() if best is not None and best.type == asked.type else 0
    if (asked.index or 0) >= count:
        there = f"{count} of {asked.type}" if count else "none"
        raise AuditError(
            f"expected {asked} to be there for --device {device}, got a machine with {there}; "
            "--device auto takes the best that is there"
        )
    return asked


@dataclass(frozen=True)
class Weights:
    """A model with all the weights that its files hold. notes: what had to be done to them, in
    sentences."""

    model: PreTrainedModel
    notes: tuple[str, ...] = ()


def read_weights(kind: Kind, name: str, options: LoadingOptions) -> Weights:
    """A model on its device, every weight of which was read. `auto` is float32 here; what else it
    can be, `options_with_auto_dtype_resolved` says.

    Raises AuditError for another kind of model, and for weights that are missing, of another shape
    or of another model.
    """
    device, options = resolve_model_device(options.device), options.with_float32_for_auto()
    auto, known = _AUTO[kind]
    config = AutoConfig.from_pretrained(name, **options.from_pretrained_arguments)
    _refuse_unsupported_models(kind, name, config, options, known)
    notes = _weight_formats_notes(name)
    own = {
        **_parse_model_arg_flags(_model_args_with_quantise(options)),
        **_parse_device_map_flag(options),
    }
    if getattr(config, "quantization_config", None) or "quantization_config" in own:
        own.setdefault("device_map", {"": device})  # quantised weights are made where they stay
    own = {
        **own,
        **options.from_pretrained_arguments,
        "config": config,
        "dtype": DTYPES[options.dtype],
    }

    def read(renamed: Mapping[str, str] | None) -> tuple[PreTrainedModel, dict[str, Any]]:
        # Wrong shapes are listed, not raised, so that `refuse_missing_or_foreign_weights` refuses
        # them in one sentence.
        found: tuple[PreTrainedModel, dict[str, Any]] = auto.from_pretrained(
            name, **own, output_loading_info=True, ignore_mismatched_sizes=True, key_mapping=renamed
        )
        return found

    model, info = read(None)
    wrappers = training_wrapper_names_phrase(info["unexpected_keys"])
    if wrappers:
        model, info = read(WRAPPED)
        notes += (
            f"{name}: the names of its weights carry a wrapper of the training ({wrappers}): read "
            "without it",
        )
    refuse_missing_or_foreign_weights(
        name, info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"]
    )
    notes += _loading_difference_notes(kind, name, config, options)
    return Weights(model if "device_map" in own else model.to(device), notes)  # type: ignore[arg-type]


def digest_weights(model: PreTrainedModel) -> str:
    """Return the SHA-256, in hex, of names, shapes and bytes of the weights in memory, which it
    only reads.

    Not of `state_dict()`: bitsandbytes 0.50 writes other weights and scales into the model while it
    makes one.
    """
    digest = hashlib.sha256()
    for name, tensor in _stored_tensors(model):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        # As bytes: numpy has no bfloat16.
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _stored_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of `state_dict()` by name, in its order, with the scales that quantised
    weights carry along."""
    for place, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or name in module._non_persistent_buffers_set:
                continue
            full_name = f"{place}.{name}" if place else name
            yield full_name, tensor
            for scale, values in _quantisation_scales(module, tensor).items():
                yield f"{full_name}.{scale}", values


def _quantisation_scales(module: Any, weight: Any) -> dict[str, torch.Tensor]:
    """Return what bitsandbytes multiplies the codes of a weight with: in 4 bits by block, in 8 bits
    by row."""
    state = getattr(weight, "quant_state", None)
    if state is not None:
        return dict(state.as_dict(packed=True))
    # The first forward moves it from the weight to the layer.
    by_row = getattr(weight, "SCB", None)
    by_row = getattr(getattr(module, "state", None), "SCB", None) if by_row is None else by_row
    return {} if by_row is None else {"SCB": by_row}


def options_with_auto_dtype_resolved(name: str, options: LoadingOptions) -> LoadingOptions:
    """How a whole model is loaded, with what `auto` is for it in the place of `auto`."""
    if options.dtype != AUTO:
        return options
    device = resolve_model_device(options.device)  # first: one that is not there is refused
    return replace(
        options,
        dtype=auto_dtype(
            AutoConfig.from_pretrained(name, **options.from_pretrained_arguments), device
        ),
    )


def _loading_difference_notes(
    kind: Kind, name: str, config: Any, options: LoadingOptions
) -> tuple[str, ...]:
    """What to say of a model that is asked otherwise than its files say: in another precision, or
    as another kind."""
    notes = []
    said = " ".join(getattr(config, "architectures", None) or ())
    if kind == "causal" and "MaskedLM" in said:
        notes.append(f"{name}: it is a {said} with is_decoder=true: asked as a causal LM")
    saved = saved_dtype(config)
    if saved and saved != options.dtype:
        notes.append(
            f"{name}: its weights were saved in {saved} and run in {options.dtype}; served in "
            f"{saved} (--dtype {saved}) it rounds otherwise"
        )
    return tuple(notes)


def _weight_formats_notes(name: str) -> tuple[str, ...]:
    """What to say of a folder that holds its weights in two formats: one of the sets may be stale.

    Raises AuditError for one file beside shards of the same format: saving one does not remove the
    other, and which of them is the model nobody can tell.
    """
    held = [[file for file in names if (Path(name) / file).is_file()] for names in FORMATS]
    for files in held:
        if len(files) > 1:
            raise AuditError(
                f"expected one set of weights in {name!r}, got {' and '.join(files)}: remove the "
                "one that is stale"
            )
    if all(held):
        return (
            f"{name}: it holds weights in two formats, {held[0][0]} and {held[1][0]}, which were "
            "not compared",
        )
    return ()


def refuse_missing_or_foreign_weights(
    name: str,
    missing: Collection[str],
    unexpected: Collection[str],
    mismatched: Collection[tuple[str, Any, Any]] = (),
    of: str = "model",
) -> None:
    """Raises AuditError, which names them, for weights that files lack, that do not fit or that
    have no place."""
    missing = set(missing) - {key for key, _, _ in mismatched}
    strangers = sorted(key for key in unexpected if not _HARMLESS.search(key))
    if mismatched:
        key, found, wanted = min(mismatched)
        raise AuditError(
            f"expected the weights of {name!r} to have the shapes that its configuration gives, "
            f"but {key} is {_weight_shape_text(found)}, not {_weight_shape_text(wanted)}"
        )
    if missing:
        beside = f"; it has others, as {strangers[0]}" if strangers else ""
        raise AuditError(
            f"expected all weights of the {of} in {name!r}, but it lacks "
            f"{_shortened_weight_names_phrase(missing)}{beside}"
        )
    if strangers:
        raise AuditError(
            f"expected the weights of {name!r} to be those of the {of}, but it has no place for "
            f"{_shortened_weight_names_phrase(strangers)}"
        )


def _shortened_weight_names_phrase(keys: Collection[str]) -> str:
    shown, rest = sorted(keys)[:_SHOWN], len(keys) - _SHOWN
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")


def _weight_shape_text(sizes: Any) -> str:
    return " x ".join(str(size) for size in sizes)


def training_wrapper_names_phrase(keys: Collection[str]) -> str:
    """The names that wrappers left in these, in words; "" for none."""
    return ", ".join(sorted({found for key in keys for found in _WRAPPER.findall(key)}))


def _refuse_unsupported_models(
    kind: Kind, name: str, config: Any, options: LoadingOptions, known: Collection[str]
) -> None:
    """What is neither a causal nor a masked LM, in plain words: transformers would make the missing
    half up.

    A masked LM would load as a causal one that sees the tokens it is asked for. Raises AuditError.
    """
    expected = f"expected a {kind} LM, got {name!r},"
    said = " ".join(getattr(config, "architectures", None) or ())
    if getattr(config, "is_encoder_decoder", False):
        raise AuditError(
            f"{expected} an encoder-decoder ({config.model_type}), which no attack here can ask"
        )
    for word, what in _OTHERS.items():
        if word in said:
            raise AuditError(f"{expected} {what} ({said})")
    if kind == "causal" and "MaskedLM" in said and not getattr(config, "is_decoder", False):
        raise AuditError(f"{expected} a masked one ({said})")
    if config.model_type not in known and f"AutoModelFor{kind.title()}LM" not in (
        getattr(config, "auto_map", None) or {}
    ):
        raise AuditError(
            f"{expected} a model of type {config.model_type!r}, of which transformers has no "
            f"{kind} LM"
        )
    more = _extra_input_phrase(config)
    if more:
        raise AuditError(
            f"{expected} a model ({config.model_type}) that must be told {more}, beside the text"
        )
    if cached_file(
        name, "modules.json", revision=options.revision, _raise_exceptions_for_missing_entries=False
    ):
        raise AuditError(
            f"{expected} an embedding model (it has the modules.json of sentence-transformers)"
        )


def _extra_input_phrase(config: Any) -> str:
    """What the model must be told of a text beside its tokens, in words; "" for nothing.

    Such models answer without it too, as they were never trained to.
    """
    if config.model_type == "roc_bert" and (config.enable_shape or config.enable_pronunciation):
        return "how each character looks and sounds"
    if config.model_type in ("xlm", "flaubert") and config.n_langs > 1 and config.use_lang_emb:
        return f"which of {config.n_langs} languages each token is of"
    return _MORE_THAN_TOKENS.get(config.model_type, "")


def _parse_model_arg_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """`--model-arg` as keyword arguments of `from_pretrained`. A value that parses as JSON is JSON:
    `true` is a bool.

    Raises AuditError for what has a flag of its own, and for quantisation without its library.
    """
    own = {key: _model_arg_value_from_json_text(value) for key, value in given.items()}
    for key in own:
        if key in ("dtype", "torch_dtype"):
            raise AuditError(f"expected --dtype in place of --model-arg {key}={given[key]}")
        if key in _OURS:
            raise AuditError(
                f"--model-arg {key} cannot be given: other flags set it, or audit does"
            )
    bits = {key: own.pop(key) for key in ("load_in_4bit", "load_in_8bit") if key in own}
    if any(bits.values()):
        if "quantization_config" in own:
            raise AuditError(
                f"expected either {' and '.join(bits)} or quantization_config, got both"
            )
        own["quantization_config"] = bits
    asked = own.get("quantization_config")
    if asked is not None and not isinstance(asked, dict):
        raise AuditError(
            f"expected --model-arg quantization_config={{...}}, a JSON object, got {asked!r}"
        )
    if asked is not None and (bits or asked.get("quant_method", "bitsandbytes") == "bitsandbytes"):
        if not is_bitsandbytes_available():
            raise AuditError(
                "loading in 4 or 8 bits needs bitsandbytes: pip install 'audit-lm[quantised]'"
            )
        asked = {key: value for key, value in asked.items() if key != "quant_method"}
        own["quantization_config"] = BitsAndBytesConfig(**asked)
    return own


def _model_args_with_quantise(options: LoadingOptions) -> Mapping[str, Any]:
    """`--model-arg` with what `--quantise` says. Raises AuditError where both say something."""
    if options.quantise is None:
        return options.model_args
    for name in ("load_in_4bit", "load_in_8bit", "quantization_config"):
        if name in options.model_args:
            raise AuditError(f"expected either --quantise or --model-arg {name}, got both")
    return {**options.model_args, f"load_in_{options.quantise}": "true"}


def _parse_device_map_flag(options: LoadingOptions) -> dict[str, Any]:
    """`--device-map` as `from_pretrained` takes it. Raises AuditError for what is none."""
    if options.device_map is None:
        return {}
    if "device_map" in options.model_args:
        raise AuditError("expected either --device-map or --model-arg device_map, got both")
    read = _model_arg_value_from_json_text(options.device_map)
    if read not in _MAPS and not (isinstance(read, dict) and read):
        raise AuditError(
            f"expected --device-map as {', '.join(_MAPS)} or a JSON object of parts and places, "
            f"got {options.device_map!r}"
        )
    return {"device_map": read}


def _model_arg_value_from_json_text(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except ValueError:
        # as Python spells them, which is no JSON
        return {"True": True, "False": False}.get(given, given)
