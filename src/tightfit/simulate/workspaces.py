"""A tape that was traced for one card, with the workspaces of another.

Torch gives cuBLAS a workspace whose size hangs on the card, or on what a calibration measured there. A size that the user set, with
`CUBLAS_WORKSPACE_CONFIG`, is the same on every card and stays.
"""

import dataclasses

import numpy as np

from tightfit.devices.calibration import Calibration
from tightfit.devices.device import Device
from tightfit.devices.workspaces import DEFAULT_CUBLAS_BYTES, LATEST, cublas_workspace_bytes, torch_version
from tightfit.tape import Source, Storages, Tape


def with_workspaces_of(device: Device, tape: Tape, calibration: Calibration | None = None) -> Tape:
    """`tape`, as its kernels would have asked for cuBLAS workspaces on `device`."""
    storages = tape.storages
    chosen_by_torch = (storages.source == Source.CUBLAS) & np.isin(storages.num_bytes, DEFAULT_CUBLAS_BYTES)
    version = torch_version(tape.versions["torch"]) if "torch" in tape.versions else LATEST
    cublas_bytes = cublas_workspace_bytes(device, torch=version, calibration=calibration)
    columns = storages.columns()
    for name in ("num_bytes", "low_bytes", "high_bytes"):
        columns[name] = np.where(chosen_by_torch, cublas_bytes, columns[name])
        if calibration is not None and calibration.cublaslt_bytes is not None:
            columns[name] = np.where(storages.source == Source.CUBLASLT, calibration.cublaslt_bytes, columns[name])
    return dataclasses.replace(tape, storages=Storages.from_columns(columns))
