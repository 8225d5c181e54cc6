"""The workloads, by rule, before anything is measured. No torch here.

Eleven families, eight rows each. A row of a family takes model size and batch from one list; precision, optimizer, checkpointing, attention kernel and
allocator follow from the numbers of family and row alone, so that each meets most others. The order goes through the families row by row: the
first eleven rows are one of every family, of middling size.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

PRECISIONS = ("fp32", "amp-fp16", "amp-bf16", "bf16")
OPTIMIZERS = (
    *("sgd-foreach", "adam-fused", "adamw-loop", "adafactor", "adamw-foreach"),
    *("sgd-fused", "adam-foreach", "adamw-fused", "sgd-loop", "adam-loop"),
)
ATTENTION = ("flash", "efficient", "math")
# Which of the family's sizes and batches a row has, in order of size.
SIZE_AND_BATCH = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1))
ORDER = (4, 1, 6, 3, 0, 7, 2, 5)
ON_TRANSFORMERS = frozenset({"encoder", "decoder", "encoder-decoder", "experts"})
_HALF_PRECISION = frozenset(PRECISIONS[1:])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A kind of network: three sizes (arguments of its function), three batches for each, the shape of one example."""

    name: str
    sizes: Sequence[Mapping[str, Any]]
    batches: Sequence[tuple[int, ...]]
    has_attention: bool = False
    data: Sequence[int] = ()  # for each size, pixels a side or tokens


FAMILIES: tuple[Family, ...] = (
    Family(
        name="residual",
        sizes=(
            {"depths": (2, 2, 2, 2), "width": 32},
            {"depths": (3, 4, 6, 3), "width": 64},
            {"depths": (3, 8, 36, 3), "width": 96},
        ),
        batches=((8, 32, 96), (32, 64, 128), (64, 128)),
        data=(128, 224, 288),
    ),
    Family(
        name="depthwise",
        sizes=(
            {"depths": (1, 2, 2, 1), "width": 16},
            {"depths": (2, 4, 4, 2), "width": 32},
            {"depths": (3, 6, 9, 3), "width": 48},
        ),
        batches=((16, 48, 128), (32, 64, 128), (64, 128)),
        data=(128, 224, 288),
    ),
    Family(
        name="vit",
        sizes=({"depth": 6, "width": 384}, {"depth": 12, "width": 768}, {"depth": 32, "width": 1280}),
        batches=((8, 32, 96), (32, 64, 128), (64, 256)),
        has_attention=True,
        data=(224, 224, 224),
    ),
    Family(
        name="encoder",
        sizes=({"depth": 4, "width": 512}, {"depth": 12, "width": 768}, {"depth": 24, "width": 1024}),
        batches=((4, 16, 48), (8, 16, 32), (32, 64)),
        has_attention=True,
        data=(128, 512, 512),
    ),
    Family(
        name="decoder",
        sizes=({"depth": 4, "width": 512}, {"depth": 16, "width": 1536}, {"depth": 28, "width": 3072}),
        batches=((2, 8, 24), (2, 4, 8), (1, 4)),
        has_attention=True,
        data=(512, 1024, 2048),
    ),
    Family(
        name="encoder-decoder",
        sizes=({"depth": 4, "width": 512}, {"depth": 12, "width": 768}, {"depth": 24, "width": 1024}),
        batches=((4, 16, 48), (8, 16, 32), (16, 32)),
        has_attention=True,
        data=(128, 384, 512),
    ),
    Family(
        name="experts",
        sizes=({"depth": 2, "width": 512}, {"depth": 8, "width": 1024}, {"depth": 16, "width": 1536}),
        batches=((2, 8, 24), (2, 4, 8), (2, 8)),
        has_attention=True,
        data=(256, 512, 1024),
    ),
    Family(
        name="diffusion-unet",
        sizes=({"width": 64}, {"width": 128}, {"width": 320}),
        batches=((4, 16, 48), (16, 32, 64), (16, 64)),
        has_attention=True,
        data=(32, 64, 64),
    ),
    Family(
        name="dit",
        sizes=({"depth": 6, "width": 384}, {"depth": 12, "width": 768}, {"depth": 28, "width": 1152}),
        batches=((8, 32, 96), (16, 32, 64), (64, 192)),
        has_attention=True,
        data=(32, 64, 32),
    ),
    Family(
        name="unet-3d",
        sizes=({"width": 16}, {"width": 32}, {"width": 48}),
        batches=((1, 2, 4), (1, 2, 3), (1, 2)),
        data=(48, 96, 128),
    ),
    Family(
        name="state-space",
        sizes=({"depth": 4, "width": 256}, {"depth": 16, "width": 768}, {"depth": 32, "width": 1536}),
        batches=((2, 8, 24), (4, 8, 16), (4, 12)),
        data=(512, 1024, 1024),
    ),
)
# For tests and for trying the program out: rows that take seconds on any machine.
TINY: tuple[Family, ...] = (
    Family(name="residual", sizes=({"depths": (1, 1), "width": 8},), batches=((4,),), data=(64,)),
    Family(name="vit", sizes=({"depth": 1, "width": 64},), batches=((2,),), has_attention=True, data=(32,)),
    Family(name="decoder", sizes=({"depth": 2, "width": 128},), batches=((2,),), has_attention=True, data=(64,)),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One workload: a family with a size and a batch, and how it is trained."""

    family: str
    model: Mapping[str, Any]
    data: int
    batch_size: int
    precision: str
    optimizer: str
    recompute: bool
    attention: str
    expandable_segments: bool

    @property
    def name(self) -> str:
        """What tells the row from all others."""
        model = "-".join(str(value) for value in self.model.values()).replace(" ", "")
        parts = [self.family, model, f"of {self.data}", f"batch {self.batch_size}", self.precision, self.optimizer]
        parts += [self.attention] if self.attention else []
        parts += ["recompute"] if self.recompute else []
        return " ".join([*parts, *(["expandable"] if self.expandable_segments else [])])

    def parameters(self) -> dict[str, Any]:
        """The keyword arguments of `benchmarks.gpu.workload.train`."""
        fields = dataclasses.asdict(self)
        del fields["expandable_segments"]
        return fields


def row_of(families: Sequence[Family], family_index: int, index: int) -> Row:
    """Row `index` of a family."""
    family = families[family_index]
    size, batch = SIZE_AND_BATCH[index]
    precision = PRECISIONS[(index + family_index) % len(PRECISIONS)]
    attention = ATTENTION[(index + family_index // 2) % len(ATTENTION)] if family.has_attention else ""
    # The flash kernels take half precision only, and T5 adds a bias that they do not take (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    if attention == "flash" and (precision not in _HALF_PRECISION or family.name == "encoder-decoder"):
        attention = "efficient"
    return Row(
        family=family.name,
        model=family.sizes[size],
        data=family.data[size],
        batch_size=family.batches[size][batch],
        precision=precision,
        optimizer=OPTIMIZERS[(3 * index + family_index) % len(OPTIMIZERS)],
        recompute=(index + family_index // 3) % 3 == 2,
        attention=attention,
        expandable_segments=(index + family_index) % 4 == 3,
    )


def all_rows() -> list[Row]:
    """Every row, in the order in which they are measured."""
    return [row_of(FAMILIES, family, index) for index in ORDER for family in range(len(FAMILIES))]


def tiny_rows() -> list[Row]:
    """Three rows: convolutions, attention, and a model of transformers."""
    return [row_of(TINY, family, 0) for family in range(len(TINY))]


def shard(rows: Sequence[Row], text: str) -> list[Row]:
    """Part `i/n` of the rows: every n-th, so that each part goes through all families.

    Raises:
        ValueError: `text` is not such as 2/3.
    """
    part, _, whole = text.partition("/")
    if not (part.isdigit() and whole.isdigit() and 1 <= int(part) <= int(whole)):
        raise ValueError(f"{text!r} is not a part such as 2/3")
    return list(rows[int(part) - 1 :: int(whole)])


def to_record(rows: Sequence[Row], count: int) -> set[str]:
    """The names of `count` rows to record, spread over the families in turn and over their sizes."""
    names: list[str] = []
    families = list(dict.fromkeys(row.family for row in rows))
    for place in range(count):
        family = families[place % len(families)]
        own = [row.name for row in rows if row.family == family and row.name not in names]
        if own:
            names.append(own[(3 * place) % len(own)])
    return set(names)
