"""Calibration files: figures measured on one machine, which replace those of the catalogue.

A calibration is a TOML file with `schema = 2` (1 is read too), the name of the GPU, and any of these tables:

    [context]     num_bytes, low_bytes, high_bytes      memory of a process besides its tensors; init_bytes, cublas_bytes, ...: its parts
    [workspaces]  cublas_bytes, cublaslt_bytes          scratch memory of the libraries
    [efficiency]  matmul = 0.79, copy = 0.9, ...        fraction of the peak that a class of operators reaches
    [efficiency.bfloat16]  matmul = 0.79, ...           the same for arithmetic of one type
    [seconds]     launch, ramp, issue, python           fixed costs of an operator (see `tightfit.cost.roofline`)
    [link]        to_card_registered_bytes_per_second ..., latency_seconds
    [overlap] [allocation] [host] [disk]                what a runtime that moves memory needs to know
    [[measured]]                                        every figure with its spread, for people
"""

import dataclasses
import os
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Self

from tightfit.devices.calibration_rules import (
    CONTEXT_KEYS,
    FIXED_COSTS,
    LIBRARIES,
    OPERATOR_CLASSES,
    SCHEMA,
    OperatorClass,
    faults,
)
from tightfit.devices.device import DTYPES, Context, Device
from tightfit.errors import UsageError
from tightfit.errors.missing_files import no_file

__all__ = ["FIXED_COSTS", "LIBRARIES", "OPERATOR_CLASSES", "SCHEMA", "Calibration", "Measured", "OperatorClass"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One figure: the median of `num_samples` readings, their quartiles, and the prediction without calibration (None: there was none)."""

    name: str
    unit: str
    median: float
    low: float
    high: float
    num_samples: int
    predicted: float | None = None


def _nothing() -> Any:
    # Left out of the hash, which a frozen dataclass would otherwise take of a dict.
    return dataclasses.field(default_factory=dict, hash=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Measured figures; those that were not measured are None or absent. Efficiencies are fractions of a peak, costs are in seconds.

    `context_parts` are bytes by `init` and library; `link`, `overlap`, `allocation`, `host` and `disk` hold the tables of the file.
    """

    device: str
    is_virtual: bool = False
    context: Context | None = None
    context_parts: Mapping[str, int] = _nothing()
    cublas_bytes: int | None = None
    cublaslt_bytes: int | None = None
    efficiency: Mapping[str, float] = _nothing()
    efficiency_by_dtype: Mapping[str, Mapping[str, float]] = _nothing()
    seconds: Mapping[str, float] = _nothing()
    link: Mapping[str, float] = _nothing()
    overlap: Mapping[str, float] = _nothing()
    allocation: Mapping[str, list[float]] = _nothing()
    host: Mapping[str, Any] = _nothing()
    disk: Mapping[str, float] = _nothing()
    made: Mapping[str, str] = _nothing()
    measured: tuple[Measured, ...] = ()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a calibration file.

        Raises:
            UsageError: the file cannot be read, or one line for every key of it that is wrong.
        """
        try:
            content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageError(f"the calibration: {no_file(os.fspath(path))}") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UsageError(f"the calibration {os.fspath(path)} cannot be read: {error}") from error
        return cls.from_content(content, where=os.fspath(path))

    @classmethod
    def from_content(cls, content: Mapping[str, Any], *, where: str) -> Self:
        """The calibration that `content`, the tables of a file, describes; `where` begins each line of the error.

        Raises:
            UsageError: one line for every key that is wrong.
        """
        found = faults(content)
        if found:
            raise UsageError("\n".join(f"{where}: {fault}" for fault in found))
        workspaces, efficiency = content.get("workspaces", {}), content.get("efficiency", {})
        context = content.get("context")
        parts = {name: f"{name}_bytes" for name in ("init", *LIBRARIES)}
        return cls(
            device=content["device"],
            is_virtual=content.get("virtual", False),
            context=None
            if context is None
            else Context(**{key: context[key] for key in CONTEXT_KEYS}, is_measured=True),
            context_parts={name: context[key] for name, key in parts.items() if key in context} if context else {},
            cublas_bytes=workspaces.get("cublas_bytes"),
            cublaslt_bytes=workspaces.get("cublaslt_bytes"),
            efficiency={name: value for name, value in efficiency.items() if name not in DTYPES},
            efficiency_by_dtype={name: value for name, value in efficiency.items() if name in DTYPES},
            measured=tuple(Measured(**row) for row in content.get("measured", ())),
            **{name: content.get(name, {}) for name in _SAME_IN_FILE},
        )

    def applied_to(self, device: Device, libraries: Collection[str] | None = None) -> Device:
        """`device` with the measured context: of a process that uses `libraries` (of `LIBRARIES`), or else all of them.

        Raises:
            UsageError: the calibration was made on another GPU, or on a simulated one.
        """
        if self.is_virtual:
            raise UsageError(
                f"the calibration of {self.device} was made with --virtual: its figures are simulated, not measured; "
                "run tightfit calibrate on a machine with the card"
            )
        if device.name != self.device:
            raise UsageError(
                f"the calibration was made on {self.device}, not on {device.name}; calibrate that card too"
            )
        if self.context is None:
            return device
        context = self.context
        # Files of schema 1 have no parts, and then the context is that of all libraries.
        if libraries is not None and self.context_parts.keys() >= {"init", *LIBRARIES}:
            num_bytes = sum(self.context_parts[name] for name in ("init", *libraries))
            # A process without cuDNN can need less than the low end that was measured with it.
            low_bytes = min(context.low_bytes, num_bytes)
            context = dataclasses.replace(context, num_bytes=num_bytes, low_bytes=low_bytes)
        return dataclasses.replace(device, context=context)


# Tables that are taken over as they are, under the name of the field.
_SAME_IN_FILE = ("seconds", "link", "overlap", "allocation", "host", "disk", "made")
