"""A Subject from a transformers configuration: the model it describes, with no weights at all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flatout.planner.tracing.training_step import TrainingStep
from flatout.records.errors import UserError, unknown
from flatout.records.input_files import read_json

SEQUENCE = 512
"""Tokens of a sample, where no one says another number and the model takes as many."""
MELS_FRAMES = 3000
"""Frames of a speech sample: the 30 seconds of Whisper's."""
HEADS = ("CausalLM", "LMHead", "MaskedLM", "ForConditional", "Seq2SeqLM", "ImageClass", "Sequence")
"""Parts of the names of classes that bring a loss, the likeliest to be trained first."""
AUTOMATIC = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForImageClassification",
    "AutoModelForSequenceClassification",
    "AutoModelForMaskedLM",
    "AutoModelForSpeechSeq2Seq",
)
"""Tried in this order for a configuration that names no class with a loss."""
TYPES = ("float32", "bfloat16", "float16")
OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD", "adafactor": "Adafactor"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HfOptions:
    """What may follow a configuration, as `sequence=1024`."""

    sequence: int | None = None
    """Tokens of a sample."""
    batch: int = 1
    autocast: str | None = None
    dtype: str = "float32"
    """Type of the parameters."""
    optimizer: str = "adamw"
    checkpoint: bool = False
    """Whether transformers' own gradient checkpointing is switched on."""


def hf_subject(path: str, arguments: Sequence[str] = ()) -> TrainingStep:
    """Return the training step of the model that a `config.json` describes.

    Raises:
        UserError: if the file, its model or an option is not known, or transformers is missing.
    """
    options = parsed(arguments)
    config, kind = _config(Path(path))

    def build() -> Any:
        model = kind(config).to(dtype=getattr(torch, options.dtype))
        if options.checkpoint:
            model.gradient_checkpointing_enable()
        return model

    def optimizer(model: Any) -> Any:
        trained = [p for p in model.parameters() if p.requires_grad]
        return getattr(torch.optim, OPTIMIZERS[options.optimizer])(trained, lr=1e-4)

    return TrainingStep(
        model=build,
        batch=lambda count, device: _batch(config, kind, options, (count, device)),
        loss=lambda model, batch: model(**batch).loss,
        optimizer=optimizer,
        batch_size=options.batch,
        autocast=options.autocast,
        name=str(getattr(config, "model_type", "model")),
    )


def parsed(arguments: Sequence[str]) -> HfOptions:
    """Return the options that are written as `name=value`.

    >>> parsed(["sequence=1024", "checkpoint=true"]).sequence
    1024
    """
    options = HfOptions()
    for argument in arguments:
        name, _, text = argument.removeprefix("--").partition("=")
        if name not in HfOptions.__dataclass_fields__:
            raise UserError(unknown("option", name, HfOptions.__dataclass_fields__))
        options = replace(options, **{name: _value(name, text)})
    for name, allowed in (("dtype", TYPES), ("optimizer", OPTIMIZERS)):
        if getattr(options, name) not in allowed:
            raise UserError(unknown(name, getattr(options, name), allowed))
    return options


def _value(name: str, text: str) -> Any:
    if name in ("sequence", "batch"):
        if not text.isdecimal() or int(text) < 1:
            raise UserError(f"{name}={text}: give a whole number > 0")
        return int(text)
    if name == "checkpoint":
        return text.lower() in ("", "true", "yes", "1")
    return text


def _config(path: Path) -> tuple[Any, Any]:
    """Return the configuration and the class of its model."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            "hf: needs transformers; install it with: pip install 'flatout[frameworks]'"
        ) from error
    if path.is_dir():
        path = path / "config.json"
    try:
        plain: Mapping[str, Any] = read_json(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give a config.json") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(plain, dict) or "model_type" not in plain:
        raise UserError(f"{path} has no model_type: it is no configuration of transformers")
    kinds, names = list(transformers.CONFIG_MAPPING.keys()), plain.get("architectures") or []
    if plain["model_type"] not in kinds:
        raise UserError(unknown("model_type", str(plain["model_type"]), kinds))
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{path}: architectures is a list of names")
    try:
        config = transformers.AutoConfig.for_model(**plain)
    except Exception as error:  # noqa: BLE001  each class checks its values in its own way
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"transformers cannot use {path}: {why[-1].strip()[:200]}") from None
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config, _class(transformers, config, names)


def _class(transformers: Any, config: Any, names: Sequence[str]) -> Any:
    for name in names:
        if any(head in name for head in HEADS) and hasattr(transformers, name):
            return getattr(transformers, name)
    for name in AUTOMATIC:
        automatic = getattr(transformers, name, None)
        if automatic is not None and type(config) in automatic._model_mapping:
            return automatic._model_mapping[type(config)]
    raise UserError(
        f"no model with a loss is known for model_type {config.model_type!r}; "
        "write a function that returns a Subject instead: file.py:name"
    )


def _batch(config: Any, kind: Any, options: HfOptions, where: tuple[int, Any]) -> dict[str, Any]:
    """Return inputs and labels by the names that the model's forward takes."""
    count, device = where
    length = _length(config, options)
    text = getattr(config, "text_config", config)
    main = kind.main_input_name
    batch: dict[str, Any] = {}
    if main == "pixel_values":
        side = getattr(config, "image_size", None) or 224
        sides = tuple(side) if isinstance(side, list | tuple) else (side, side)
        batch[main] = torch.zeros(count, getattr(config, "num_channels", 3), *sides, device=device)
    elif main == "input_features":
        mels = getattr(config, "num_mel_bins", 80)
        batch[main] = torch.zeros(count, mels, MELS_FRAMES, device=device)
    else:
        batch[main] = torch.zeros(count, length, dtype=torch.long, device=device)
        batch["attention_mask"] = torch.ones(count, length, dtype=torch.long, device=device)
    is_classifier = "Classification" in kind.__name__
    shape = (count,) if is_classifier else (count, min(length, _longest(text) or length))
    batch["labels"] = torch.zeros(shape, dtype=torch.long, device=device)
    if batch[main].is_floating_point():
        batch[main] = batch[main].to(getattr(torch, options.dtype))
    return batch


def _length(config: Any, options: HfOptions) -> int:
    longest = _longest(getattr(config, "text_config", config))
    length = options.sequence or min(longest or SEQUENCE, SEQUENCE)
    if longest is not None and length > longest:
        raise UserError(f"sequence={length}: this model takes at most {longest} tokens")
    return length


def _longest(config: Any) -> int | None:
    for name in ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len"):
        found = getattr(config, name, None)
        if isinstance(found, int) and found > 0:
            return found
    return None
