"""Load all weights of a saved model in a chosen precision; reject missing or extra weights."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
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
from auditor.models.precision import DTYPES, choose_auto_dtype, read_saved_dtype

Kind = Literal["causal", "masked"]
_AUTO: Mapping[Kind, tuple[Any, Mapping[str, Any]]] = {
    "causal": (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "masked": (AutoModelForMaskedLM, MODEL_FOR_MASKED_LM_MAPPING_NAMES),
}
# Models that predict no token, by a part of their architecture's name.
_OTHERS = {
    "SequenceClassification": "a classifier of texts",
    "TokenClassification": "a classifier of tokens",
    "QuestionAnswering": "a model that marks answers",
    "MultipleChoice": "a model that chooses among answers",
    "NextSentencePrediction": "a model that classifies pairs of sentences",
    "ElectraForPreTraining": "a discriminator, which distinguishes replaced tokens from true ones",
}
# Models that need more input than tokens, by type, with the missing input.
_MORE_THAN_TOKENS = {
    "layoutlm": "the place of each word on its page",
    "tapas": "the table cell of each token",
}
# Names that wrappers add anywhere: torch.compile, fully sharded, recomputed activations, DeepSpeed.
# Names that wrappers (data parallel, Opacus) add before the whole name, unless the model has such a
# module.
_ANYWHERE = r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module)\."
_IN_FRONT = rf"^(?:{_ANYWHERE}|_?module\.)+"
_WRAPPER = re.compile(rf"{_IN_FRONT}|(?<=\.)(?:{_ANYWHERE})+")
# In the format of transformers, which applies each pattern only once to a name: three patterns
# after the first.
WRAPPED = {_IN_FRONT: "", **{rf"(\.)(?:{_ANYWHERE}){{1,{most}}}": r"\1" for most in (9, 8, 7)}}
# Weights without effect on the distribution: constants stored by older versions, poolers and other
# heads, encoders of pictures and sound.
_HARMLESS = re.compile(
    r"(^|\.)(inv_freq|masked_bias|position_ids|attn\.bias|attention\.bias|pooler\..*|cls\.seq_relationship\..*"
    r"|v_head\..*|(vision_tower|vision_model|visual|audio_tower|multi_modal_projector|embed_vision|embed_audio)\..*)$"
)
# Weight files in the order of transformers' search: one file or its shards.
FORMATS = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
_SHOWN = 3  # names of weights in a sentence
_BITS = ("load_in_4bit", "load_in_8bit")
_OURS = (
    "config",
    "ignore_mismatched_sizes",
    "output_loading_info",
    "state_dict",
    "revision",
    "trust_remote_code",
)
# Device maps of transformers and accelerate.
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def resolve_model_device(device: str) -> torch.device:
    """Return the device for models; `auto` means the accelerator, if there is one.

    Raise AuditError if the device does not exist.
    """
    best = None
    if torch.accelerator.is_available():
        best = torch.accelerator.current_accelerator()
    if device == AUTO:
        return best or torch.device("cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise AuditError(
            f"expected --device as auto, cpu, cuda, cuda:N or mps, got {device!r}"
        ) from None
    if resolved.type == "cpu":
        return resolved
    count = 0
    if best is not None and best.type == resolved.type:
        count = torch.accelerator.device_count()
    if (resolved.index or 0) >= count:
        present = "none"
        if count:
            present = f"{count} of {resolved.type}"
        raise AuditError(
            f"expected {resolved} to be available for --device {device}, got a machine with "
            f"{present}; --device auto takes the best available"
        )
    return resolved


def read_weights(
    kind: Kind, name: str, options: LoadingOptions
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """Load a model with all its weights onto its device; return it, and notes on changes to it.

    With dtype `auto`, the weights are loaded as float32. To choose the dtype by the weights and the
    device, call `resolve_dtype_option` first. Raise AuditError if the model is of another kind, or
    if weights are missing, extra or wrongly shaped.

    Args:
        kind: required kind of language model, `causal` or `masked`.
        name: folder or hub id of the model.
        options: loading options.
    """
    device = resolve_model_device(options.device)
    options = options.resolve_auto_dtype()
    auto, known = _AUTO[kind]
    config = AutoConfig.from_pretrained(name, **options.from_pretrained_arguments)
    _refuse_unsupported_models(kind, name, config, options, known)
    notes = _weight_formats_notes(name)
    pretrained_args = _parse_model_arg_flags(options)
    pretrained_args |= _parse_device_map_flag(options)
    if getattr(config, "quantization_config", None) or "quantization_config" in pretrained_args:
        # Quantised weights are created on their final device.
        pretrained_args.setdefault("device_map", {"": device})
    pretrained_args |= options.from_pretrained_arguments
    pretrained_args |= {"config": config, "dtype": DTYPES[options.dtype]}

    def read(renamed: Mapping[str, str] | None) -> tuple[PreTrainedModel, dict[str, Any]]:
        # Wrong shapes are listed, not raised, so that `refuse_missing_or_foreign_weights` reports
        # them in one sentence.
        loaded: tuple[PreTrainedModel, dict[str, Any]] = auto.from_pretrained(
            name,
            **pretrained_args,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            key_mapping=renamed,
        )
        return loaded

    model, info = read(None)
    wrappers = format_training_wrapper_names(info["unexpected_keys"])
    if wrappers:
        model, info = read(WRAPPED)
        notes += (
            f"{name}: the names of its weights begin with a training wrapper ({wrappers}): read "
            "without it",
        )
    refuse_missing_or_foreign_weights(
        name, info["missing_keys"], info["unexpected_keys"], info["mismatched_keys"]
    )
    notes += _list_loading_difference_notes(kind, name, config, options)
    if "device_map" not in pretrained_args:
        model = model.to(device)  # type: ignore[arg-type]
    return model, notes


def digest_weights(model: PreTrainedModel) -> str:
    """Return the SHA-256 (hex) of the names, shapes and bytes of all weights in memory.

    `state_dict()` is avoided, because in bitsandbytes 0.50 it changes weights and scales.
    """
    digest = hashlib.sha256()
    for name, tensor in _list_stored_tensors(model):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        # As bytes: numpy has no bfloat16.
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _list_stored_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors in the order of `state_dict()`, including quantisation scales."""
    for place, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or name in module._non_persistent_buffers_set:
                continue
            full_name = f"{place}.{name}" if place else name
            yield full_name, tensor
            for scale, values in _quantisation_scales(module, tensor).items():
                yield f"{full_name}.{scale}", values


def _quantisation_scales(module: Any, weight: Any) -> dict[str, torch.Tensor]:
    """Return bitsandbytes' scales for a weight: per block in 4 bits, per row in 8 bits."""
    state = getattr(weight, "quant_state", None)
    if state is not None:
        return dict(state.as_dict(packed=True))
    # The first forward moves it from the weight to the layer.
    by_row = getattr(weight, "SCB", None)
    if by_row is None:
        by_row = getattr(getattr(module, "state", None), "SCB", None)
    return {} if by_row is None else {"SCB": by_row}


def resolve_dtype_option(name: str, options: LoadingOptions) -> LoadingOptions:
    """Return the loading options with dtype `auto` replaced by the dtype that it stands for.

    `name` is the folder or hub id of a whole model (not an adapter).
    """
    if options.dtype != AUTO:
        return options
    # First, so that a missing accelerator is rejected.
    device = resolve_model_device(options.device)
    return replace(
        options,
        dtype=choose_auto_dtype(
            AutoConfig.from_pretrained(name, **options.from_pretrained_arguments), device
        ),
    )


def _list_loading_difference_notes(
    kind: Kind, name: str, config: Any, options: LoadingOptions
) -> tuple[str, ...]:
    """Return a note for each difference between the saved model and the model as it is loaded.

    The compared properties are the precision and the kind of model. `kind` is the kind as which it
    is loaded, `causal` or `masked`.
    """
    notes = []
    architectures = " ".join(getattr(config, "architectures", None) or ())
    if kind == "causal" and "MaskedLM" in architectures:
        notes.append(f"{name}: it is a {architectures} with is_decoder=true: asked as a causal LM")
    saved = read_saved_dtype(config)
    if saved and saved != options.dtype:
        notes.append(
            f"{name}: its weights were saved in {saved} and run in {options.dtype}; served in "
            f"{saved} (--dtype {saved}) it rounds differently"
        )
    return tuple(notes)


def _weight_formats_notes(name: str) -> tuple[str, ...]:
    """Return a note if the folder `name` has weights in two formats, because one may be outdated.

    Return () for a hub id. Raise AuditError if a folder has both a single file and shards in one
    format: saving does not remove older weights, so either could be right.
    """
    sets = []
    for names in FORMATS:
        sets.append([file for file in names if (Path(name) / file).is_file()])
    for files in sets:
        if len(files) > 1:
            raise AuditError(
                f"expected one set of weights in {name!r}, got {' and '.join(files)}: remove the "
                "one that is stale"
            )
    if all(sets):
        return (
            f"{name}: it contains weights in two formats, {sets[0][0]} and {sets[1][0]}, which "
            "were not compared",
        )
    return ()


def refuse_missing_or_foreign_weights(
    name: str,
    missing: Collection[str],
    unexpected: Collection[str],
    mismatched: Collection[tuple[str, Any, Any]] = (),
    of: str = "model",
) -> None:
    """Raise AuditError if weights are missing, extra or wrongly shaped; the message names them.

    Extra weights that do not affect the distribution are allowed.

    Args:
        name: folder or hub id of the model, for the message.
        missing: names of weights that the model has, but the files lack.
        unexpected: names of weights in the files that the model lacks.
        mismatched: (name, shape in the files, shape in the model) of wrongly shaped weights.
        of: description of the model or adapter, for the message.
    """
    missing = set(missing) - {key for key, _, _ in mismatched}
    foreign = sorted(key for key in unexpected if not _HARMLESS.search(key))
    if mismatched:
        key, actual, expected = min(mismatched)
        raise AuditError(
            f"expected the weights of {name!r} to have the shapes that its configuration gives, "
            f"but {key} is {_weight_shape_text(actual)}, not {_weight_shape_text(expected)}"
        )
    if missing:
        foreign_phrase = ""
        if foreign:
            foreign_phrase = f"; it has others, as {foreign[0]}"
        raise AuditError(
            f"expected all weights of the {of} in {name!r}, but it lacks "
            f"{_format_shortened_weight_names(missing)}{foreign_phrase}"
        )
    if foreign:
        raise AuditError(
            f"expected the weights of {name!r} to be those of the {of}, but it has no place for "
            f"{_format_shortened_weight_names(foreign)}"
        )


def _format_shortened_weight_names(keys: Collection[str]) -> str:
    listed = sorted(keys)[:_SHOWN]
    rest = len(keys) - _SHOWN
    return ", ".join(listed) + (f" and {rest} more" if rest > 0 else "")


def _weight_shape_text(sizes: Any) -> str:
    return " x ".join(str(size) for size in sizes)


def format_training_wrapper_names(keys: Collection[str]) -> str:
    """Return a phrase that lists the training wrappers in these weight names, or "" if none."""
    return ", ".join(sorted({wrapper for key in keys for wrapper in _WRAPPER.findall(key)}))


def _refuse_unsupported_models(
    kind: Kind, name: str, config: Any, options: LoadingOptions, known: Collection[str]
) -> None:
    """Raise AuditError unless the model is a causal or masked LM, whichever `kind` requires.

    transformers would fill in missing weights at random, and would load a masked LM as a causal LM
    that sees the tokens that it predicts.
    """
    expected = f"expected a {kind} LM, got {name!r},"
    architectures = " ".join(getattr(config, "architectures", None) or ())
    if getattr(config, "is_encoder_decoder", False):
        raise AuditError(
            f"{expected} an encoder-decoder ({config.model_type}), which no attack here can query"
        )
    for word, description in _OTHERS.items():
        if word in architectures:
            raise AuditError(f"{expected} {description} ({architectures})")
    if (
        kind == "causal"
        and "MaskedLM" in architectures
        and not getattr(config, "is_decoder", False)
    ):
        raise AuditError(f"{expected} a masked one ({architectures})")
    if config.model_type not in known and f"AutoModelFor{kind.title()}LM" not in (
        getattr(config, "auto_map", None) or {}
    ):
        raise AuditError(
            f"{expected} a model of type {config.model_type!r}, of which transformers has no "
            f"{kind} LM"
        )
    if kind == "masked":
        # XLM and FlauBERT have one class for both kinds; their field `causal` selects the kind.
        is_causal = getattr(config, "causal", True) or getattr(config, "is_decoder", False)
        is_named = "MaskedLM" in architectures or "ForPreTraining" in architectures
        if getattr(config, "is_decoder", False) or (is_causal and not is_named):
            raise AuditError(
                f"{expected} which its configuration does not call one "
                f"({architectures or 'nothing'})"
            )
    extra = _format_extra_input(config)
    if extra:
        raise AuditError(
            f"{expected} a model ({config.model_type}) that needs {extra} in addition to the text"
        )
    if cached_file(
        name, "modules.json", revision=options.revision, _raise_exceptions_for_missing_entries=False
    ):
        raise AuditError(
            f"{expected} an embedding model (it has the modules.json of sentence-transformers)"
        )


def _format_extra_input(config: Any) -> str:
    """Return a phrase about inputs besides tokens that the model was trained with, or ""."""
    if config.model_type == "roc_bert" and (config.enable_shape or config.enable_pronunciation):
        return "the shape and sound of each character"
    if config.model_type in ("xlm", "flaubert") and config.n_langs > 1 and config.use_lang_emb:
        return f"the language of each token, one of {config.n_langs}"
    return _MORE_THAN_TOKENS.get(config.model_type, "")


def _parse_model_arg_flags(options: LoadingOptions) -> dict[str, Any]:
    """Return the `from_pretrained` arguments of the flags `--model-arg` and `--quantise`.

    JSON values are decoded. Raise AuditError if an argument has its own flag, if flags conflict, or
    if quantisation lacks its library.
    """
    arguments = {}
    for key, value in options.model_args.items():
        arguments[key] = _parse_argument_value(value)
    for key in arguments:
        if key in ("dtype", "torch_dtype"):
            raise AuditError(
                f"expected --dtype in place of --model-arg {key}={options.model_args[key]}"
            )
        if key in _OURS:
            raise AuditError(
                f"--model-arg {key} cannot be given: other flags set it, or audit does"
            )
    ways = []
    if options.quantise is not None:
        ways.append("--quantise")
    for key in (*_BITS, "quantization_config"):
        if key in arguments:
            ways.append(f"--model-arg {key}")
    if options.quantise is not None:
        arguments[f"load_in_{options.quantise}"] = True
    if len(ways) > 1:
        raise AuditError(f"expected either {' or '.join(ways)}, got both")
    bits = {key: arguments.pop(key) for key in _BITS if key in arguments}
    if any(bits.values()):
        arguments["quantization_config"] = bits
    quantization = arguments.get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        raise AuditError(
            f"expected --model-arg quantization_config={{...}}, a JSON object, got {quantization!r}"
        )
    if quantization is not None and (
        bits or quantization.get("quant_method", "bitsandbytes") == "bitsandbytes"
    ):
        if not is_bitsandbytes_available():
            raise AuditError(
                "loading in 4 or 8 bits needs bitsandbytes: pip install 'audit-lm[quantised]'"
            )
        quantization = {key: value for key, value in quantization.items() if key != "quant_method"}
        arguments["quantization_config"] = BitsAndBytesConfig(**quantization)
    return arguments


def _parse_device_map_flag(options: LoadingOptions) -> dict[str, Any]:
    """Return `--device-map` as `from_pretrained` arguments. Raise AuditError if it is invalid."""
    if options.device_map is None:
        return {}
    if "device_map" in options.model_args:
        raise AuditError("expected either --device-map or --model-arg device_map, got both")
    device_map = _parse_argument_value(options.device_map)
    if device_map not in _MAPS and not (isinstance(device_map, dict) and device_map):
        raise AuditError(
            f"expected --device-map as {', '.join(_MAPS)} or a JSON object of modules and devices, "
            f"got {options.device_map!r}"
        )
    return {"device_map": device_map}


def _parse_argument_value(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        # Python's spelling, which is not JSON.
        return {"True": True, "False": False}.get(value, value)
