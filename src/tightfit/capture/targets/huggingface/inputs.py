"""Training batches for any Hugging Face model, derived from its forward signature and its config.

There is no function per architecture. What a model wants is read from the names that `forward` takes
(`input_ids`, `pixel_values`, `input_features`, ...), how large each is from config fields that the library spells
alike everywhere (`vocab_size`, `image_size`, `num_mel_bins`, ...). Tensors are made on the host and hold valid
values: ids within the vocabulary and free of special tokens, one placeholder token per image feature.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from typing import TYPE_CHECKING, Any

from tightfit.capture.targets.huggingface import images as huggingface_images
from tightfit.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    Maker = Callable[[], Any]

SAMPLES_PER_SECOND = 16_000
"""The rate of every speech model of the library (`sampling_rate` of Wav2Vec2FeatureExtractor and its kin)."""
FRAMES_PER_SECOND = 100
"""One mel frame each 10 ms (`hop_length` 160 at 16 kHz, WhisperFeatureExtractor)."""
DEFAULT_TOKENS = 512
DEFAULT_TRANSCRIPT_TOKENS = 32
NUM_CHOICES = 4
NUM_BOXES = 8
CHARACTERS = 256
"""Ids for a model without a vocabulary, which reads characters (CANINE)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """The properties of the batches: see `HuggingFaceTarget`."""

    labels: str
    with_images: bool
    batch_size: int
    sequence_length: int | None
    image_size: int | None
    audio_seconds: float


def batch_maker(model: Any, config: Any, request: BatchRequest) -> Callable[[], dict[str, Any]]:
    """A function that makes one fresh batch on the host: the keyword arguments of `model.forward`.

    Raises:
        UsageError: the model has fewer positions than `sequence_length`, or the image needs more tokens than that.
    """
    names = set(inspect.signature(model.forward).parameters)
    fields: dict[str, Maker] = {}
    images = None
    if request.with_images and names & {"pixel_values", "pixel_values_videos"}:
        images = huggingface_images.images(model, config, names, request.batch_size, request.image_size)
        fields |= images.fields
    fields |= _audio(model, config, names, request)
    tokens = _Tokens.of(model, config, request, num_image_tokens=images.num_tokens if images else 0)
    if "input_ids" in names:
        fields["input_ids"] = tokens.prompt
        if images is not None and images.num_tokens:
            # Gemma 3 refuses to train without them: its mask lets the tokens of an image see each other.
            fields |= dict.fromkeys(names & {"token_type_ids", "mm_token_type_ids"}, tokens.is_image)
    fields |= _labels(config, names, request, tokens, images)
    return lambda: {name: make() for name, make in fields.items()}


def walk(config: Any) -> Iterator[Any]:
    """`config` and the configs inside it, the outer ones first."""
    level = [config]
    while level:
        yield from level
        level = [part for outer in level for part in vars(outer).values() if hasattr(part, "to_diff_dict")]


def first(config: Any, names: tuple[str, ...]) -> Any:
    """The value of the first field of those `names` that `config`, or a config inside it, has; else None."""
    found = (getattr(part, name, None) for part in walk(config) for name in names)
    return next((value for value in found if value is not None), None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """Rows of token ids: `length` in total, the first few of them placeholders for an image."""

    shape: tuple[int, ...]
    ordinary: Tensor
    opening: tuple[int, ...]
    end: int | None
    image_token: int | None

    @classmethod
    def of(cls, model: Any, config: Any, request: BatchRequest, *, num_image_tokens: int) -> _Tokens:
        text = config.get_text_config()
        placeholder = image_token(config)
        # Qwen-VL models find the images of a row by the token in front of each (`get_rope_index`).
        before = getattr(config, "vision_start_token_id", None)
        opening = (
            *([before] if before is not None and num_image_tokens else []),
            *([placeholder] * num_image_tokens if placeholder is not None else []),
        )
        length = _length(request.sequence_length, _num_positions(model, text), len(opening), config.model_type)
        num_ids = getattr(text, "vocab_size", None) or CHARACTERS
        end = first(text, ("eos_token_id",))
        end = end[0] if isinstance(end, list) else end
        choices = (NUM_CHOICES,) if request.labels == "choices" else ()
        return cls(
            shape=(request.batch_size, *choices, length),
            # A padding id would be left out of the loss, and an image id would ask for a feature that the batch
            # does not have.
            ordinary=_ordinary_ids(config, num_ids),
            opening=opening,
            # A default config may name an end token beyond its own vocabulary.
            end=end if end is not None and end < num_ids else None,
            image_token=placeholder,
        )

    def random(self, shape: tuple[int, ...]) -> Tensor:
        """Ordinary ids, each row ending with the end-of-text token, which pooling by the last token looks for."""
        torch = importlib.import_module("torch")
        ids = self.ordinary[torch.randint(len(self.ordinary), shape)]
        if self.end is not None:
            ids[..., -1] = self.end
        return ids

    def prompt(self) -> Tensor:
        ids = self.random(self.shape)
        if self.opening:
            torch = importlib.import_module("torch")
            ids[..., : len(self.opening)] = torch.tensor(self.opening)
        return ids

    def is_image(self) -> Tensor:
        """1 for placeholder tokens of an image, else 0."""
        torch = importlib.import_module("torch")
        return torch.isin(self.prompt(), torch.tensor(self.image_token)).long()


def image_token(config: Any) -> int | None:
    """The placeholder id for a feature of an image in the text, None for models without one."""
    token = first(config, ("image_token_id", "image_token_index", "media_token_id"))
    return token[0] if isinstance(token, list) else token


def _ordinary_ids(config: Any, num_ids: int) -> Tensor:
    """All ids below `num_ids` that no field of the config gives a meaning to."""
    torch = importlib.import_module("torch")
    is_ordinary = torch.ones(num_ids, dtype=torch.bool)
    for part in walk(config):
        for name, value in vars(part).items():
            if not name.endswith(("token_id", "token_index", "token_ids")):
                continue
            for special in value if isinstance(value, list) else [value]:
                if isinstance(special, int) and 0 <= special < num_ids:
                    is_ordinary[special] = False
    return is_ordinary.nonzero().flatten()


def _length(asked: int | None, num_positions: int | None, num_image_tokens: int, model_type: str) -> int:
    if asked is None:
        wanted = num_image_tokens + DEFAULT_TOKENS
        return wanted if num_positions is None else min(wanted, num_positions)
    if num_positions is not None and asked > num_positions:
        raise UsageError(
            f"this {model_type} model has {num_positions} positions, fewer than the sequence length {asked}; "
            f"ask for at most {num_positions}"
        )
    if asked <= num_image_tokens:
        raise UsageError(
            f"an image takes {num_image_tokens} tokens of this {model_type} model, the sequence length is {asked}; "
            f"ask for more than {num_image_tokens}"
        )
    return asked


def _num_positions(model: Any, text: Any) -> int | None:
    """The longest row if positions are looked up in a learned table, else None (rotary, relative, none).

    A table may have a few rows more than there are positions: RoBERTa's starts behind the padding id, OPT's at 2.
    """
    names = ("max_target_positions", "max_position_embeddings", "n_positions", "max_seq_len")
    num_positions = next((getattr(text, name) for name in names if getattr(text, name, None)), None)
    if num_positions is None:
        return None
    torch = importlib.import_module("torch")
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    for table in tables:
        if 0 <= table.num_embeddings - num_positions <= 2 and table.num_embeddings != getattr(text, "vocab_size", None):
            padding = table.padding_idx
            reserved = padding + 1 if padding is not None and table.num_embeddings == num_positions else 0
            return (num_positions - reserved) // 8 * 8 if reserved else num_positions
    return None


def _audio(model: Any, config: Any, names: set[str], request: BatchRequest) -> dict[str, Maker]:
    """Waveforms (`input_values`) or spectrograms (`input_features`), whichever `forward` takes."""
    torch = importlib.import_module("torch")
    name = next((name for name in ("input_features", "input_values") if name in names), None)
    if name is None:
        return {}
    num_bins = first(config, ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim"))
    if num_bins is None:
        channels = getattr(config, "audio_channels", None)
        samples = int(SAMPLES_PER_SECOND * request.audio_seconds)
        shape = (request.batch_size, *([channels] if channels else []), samples)
        return {name: functools.partial(torch.randn, shape)}
    num_frames = first(config, ("max_length",)) if name == "input_values" else None
    num_frames = num_frames or int(FRAMES_PER_SECOND * request.audio_seconds)
    convolutions = (module for module in model.modules() if isinstance(module, torch.nn.Conv1d))
    entry = next(convolutions, None)
    positions = first(config, ("max_source_positions",))
    if entry is not None and entry.in_channels == num_bins and positions and not hasattr(config, "conv_channels"):
        # The two convolutions at the entry halve the frames, and the encoder wants exactly its positions.
        return {name: functools.partial(torch.randn, (request.batch_size, num_bins, 2 * positions))}
    shape = (request.batch_size, num_frames, num_bins)
    fields: dict[str, Maker] = {name: functools.partial(torch.randn, shape)}
    if name == "input_features":
        fields["attention_mask"] = functools.partial(torch.ones, shape[:2], dtype=torch.long)
    return fields


def _labels(
    config: Any, names: set[str], request: BatchRequest, tokens: _Tokens, images: huggingface_images.Images | None
) -> dict[str, Maker]:
    """The targets of the task, as many as `forward` needs to compute its own loss."""
    torch = importlib.import_module("torch")
    rows, length, num_labels = request.batch_size, tokens.shape[-1], getattr(config, "num_labels", 2)
    side = images.side if images is not None else 0
    integers = {
        "classes": (num_labels, (rows,)),
        "choices": (NUM_CHOICES, (rows,)),
        "token_classes": (num_labels, (rows, length)),
        "pixels": (num_labels, (rows, side, side)),
        "spans": (length, (rows,)),
    }
    fields: dict[str, Maker] = {}
    if request.labels in integers:
        make = functools.partial(torch.randint, *integers[request.labels])
        fields = dict.fromkeys(("start_positions", "end_positions") if request.labels == "spans" else ("labels",), make)
    elif request.labels == "tokens":
        is_prompt = "input_ids" in names and "decoder_input_ids" not in names
        fields = {"labels": tokens.prompt if is_prompt else _transcript(names, request, tokens)}
    elif request.labels == "pairs":
        fields = {"return_loss": lambda: True}
    elif request.labels == "boxes":
        fields = {"labels": lambda: [_boxes(num_labels) for _ in range(rows)]}
    elif request.labels == "patches":
        num_patches = (side // first(config, ("patch_size",))) ** 2
        fields = {"bool_masked_pos": lambda: torch.rand(rows, num_patches) < 0.5}
    elif "decoder_input_ids" in names:
        fields = {"decoder_input_ids": functools.partial(tokens.random, (rows, length))}
    return fields


def _transcript(names: set[str], request: BatchRequest, tokens: _Tokens) -> Maker:
    """Target tokens of an encoder: as many as requested; fewer if alignment to the audio bounds them."""
    rows, length = request.batch_size, tokens.shape[-1]
    aligned = "decoder_input_ids" not in names and request.sequence_length is None
    return functools.partial(tokens.random, (rows, min(length, DEFAULT_TRANSCRIPT_TOKENS) if aligned else length))


def _boxes(num_labels: int) -> Mapping[str, Tensor]:
    """Objects of one image: classes (n,), boxes (n, 4) as centre and size, relative to the image."""
    torch = importlib.import_module("torch")
    return {"class_labels": torch.randint(num_labels, (NUM_BOXES,)), "boxes": torch.rand(NUM_BOXES, 4) / 4 + 0.375}
