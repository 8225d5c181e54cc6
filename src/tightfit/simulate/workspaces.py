"""Replaces the cuBLAS workspaces of a tape by those of another GPU, and finds the libraries that a tape's operators load.

The size of torch's cuBLAS workspace depends on the GPU, or on what a calibration measured there. A size that the user set with
`CUBLAS_WORKSPACE_CONFIG` is the same on every GPU and stays.
"""

import dataclasses

import numpy as np

from tightfit.cost.classes import operator_class
from tightfit.devices.calibration import Calibration
from tightfit.devices.cublas_workspaces import DEFAULT_CUBLAS_BYTES, LATEST, cublas_workspace_bytes, torch_version
from tightfit.devices.device import Device
from tightfit.tape import Source, Storages, Tape


def with_workspaces_of(device: Device, tape: Tape, calibration: Calibration | None = None) -> Tape:
    """`tape` with the cuBLAS workspaces that torch would allocate on `device`."""
    storages = tape.storages
    # A workspace of another size was set by the user.
    chosen_by_torch = (storages.source == Source.CUBLAS) & np.isin(storages.num_bytes, DEFAULT_CUBLAS_BYTES)
    version = torch_version(tape.versions["torch"]) if "torch" in tape.versions else LATEST
    cublas_bytes = cublas_workspace_bytes(device, torch=version, calibration=calibration)
    columns = storages.columns()
    for name in ("num_bytes", "low_bytes", "high_bytes"):
        columns[name] = np.where(chosen_by_torch, cublas_bytes, columns[name])
        if calibration is not None and calibration.cublaslt_bytes is not None:
            columns[name] = np.where(storages.source == Source.CUBLASLT, calibration.cublaslt_bytes, columns[name])
    return dataclasses.replace(tape, storages=Storages.from_columns(columns))


def libraries_of(tape: Tape) -> frozenset[str]:
    """Which of cuBLAS, cuBLASLt and cuDNN a process that runs `tape` loads, as `tightfit.devices.calibration.LIBRARIES` names them.

    A matmul with a bias goes to cuBLASLt, any other to cuBLAS (aten/src/ATen/native/cuda/Blas.cpp); a convolution to cuDNN.
    """
    names = {tape.strings[name] for name in np.unique(tape.operators.name)}
    used = {"cublas" for name in names if operator_class(name) == "matmul"}
    used |= {"cublaslt" for name in names if "addmm" in name}
    used |= {"cudnn" for name in names if operator_class(name) == "convolution" or "cudnn" in name}
    return frozenset(used)
