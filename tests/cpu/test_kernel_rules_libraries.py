"""Workspaces of the matrix libraries and of cuDNN's convolutions, and the choice of layouts."""

import pytest
import torch

from tightfit.capture.kernels import Card, scratch_events, workspaces
from tightfit.capture.kernels.convolution import (
    PHYSICS,
    convolution_workspace_bytes,
    output_memory_format,
    runs_natively,
)
from tightfit.capture.kernels.library_workspaces import cublas_workspace_bytes, uses_cublaslt
from tightfit.capture.kernels.rule import Uncertain

aten = torch.ops.aten
MIB = 1024 * 1024


def card(major: int, minor: int = 0, multiprocessors: int = 108) -> Card:
    return Card(compute_capability=(major, minor), num_multiprocessors=multiprocessors)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class TestCublas:
    @pytest.mark.parametrize(
        ("capability", "version", "expected"),
        [
            ((8, 0), "2.13.0", 8_519_680),
            ((9, 0), "2.6.0", 32 * MIB),
            ((9, 0), "2.13.0+cpu", 32 * MIB),
            ((10, 0), "2.11.0", 8_519_680),
            ((10, 0), "2.12.0", 32 * MIB),
            ((12, 0), "2.13.0", 32 * MIB),
            ((11, 0), "2.13.0", 8_519_680),
            ((11, 0), "2.14.0", 32 * MIB),
        ],
    )
    def test_the_default_depends_on_card_and_release(self, capability, version, expected):
        assert cublas_workspace_bytes(card(*capability), {}, version) == expected

    def test_the_environment_overrides_it(self):
        assert cublas_workspace_bytes(card(9), {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}) == 32 * MIB
        assert cublas_workspace_bytes(card(9), {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}) == 128 * 1024
        assert cublas_workspace_bytes(card(8), {"CUBLAS_WORKSPACE_CONFIG": "none"}) == 8_519_680

    def test_a_product_takes_one_and_keeps_it(self):
        found = workspaces(
            aten.mm.default, (meta(4, 4), meta(4, 4)), {}, card=card(8), environ={}, torch_version="2.13.0"
        )
        assert [(w.kind, w.num_bytes, w.persistent) for w in found] == [("cublas", 8_519_680, True)]

    def test_other_operators_take_none(self):
        assert workspaces(aten.relu.default, (meta(4),), {}, card=card(8), environ={}) == ()

    def test_an_empty_setting_takes_none(self):
        environ = {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}
        assert workspaces(aten.mm.default, (meta(4, 4), meta(4, 4)), {}, card=card(8), environ=environ) == ()

    def test_older_releases_keep_one_for_cublaslt_too(self):
        arguments = (meta(32), meta(16, 8), meta(8, 32))
        found = workspaces(aten.addmm.default, arguments, {}, card=card(8), environ={}, torch_version="2.10.0")
        assert [(w.kind, w.num_bytes) for w in found] == [("cublas", 8_519_680), ("cublaslt", MIB)]

    def test_only_a_row_vector_goes_to_cublaslt(self):
        assert uses_cublaslt(aten.addmm.default, (meta(32), meta(16, 8), meta(8, 32)), {}, {})
        assert not uses_cublaslt(aten.addmm.default, (meta(16, 32), meta(16, 8), meta(8, 32)), {}, {})
        assert not uses_cublaslt(aten.addmm.default, (meta(32), meta(1, 8), meta(8, 32)), {}, {})
        assert not uses_cublaslt(aten.addmm.default, (meta(32), meta(16, 8), meta(8, 32)), {"beta": 2}, {})


class TestConvolution:
    INPUT, WEIGHT, OUTPUT = (64, 256, 56, 56), (64, 256, 1, 1), (64, 64, 56, 56)

    def workspace(self, direction="forward", dtype=torch.float32, channels_last=False, on=None):
        return convolution_workspace_bytes(
            direction,
            self.INPUT,
            self.WEIGHT,
            self.OUTPUT,
            stride=(1, 1),
            dilation=(1, 1),
            groups=1,
            dtype=dtype,
            channels_last=channels_last,
            card=on or card(8),
        )

    def test_channels_first_operands_are_converted_for_tensor_cores(self):
        elements = 64 * 256 * 56 * 56 + 64 * 256 + 64 * 64 * 56 * 56
        assert self.workspace()[0] == elements * 4
        assert self.workspace(dtype=torch.float16)[0] == elements * 2

    def test_channels_last_operands_are_read_as_they_lie(self):
        assert self.workspace(channels_last=True)[0] == 0

    def test_a_card_without_tensor_cores_for_the_type_converts_nothing(self):
        assert self.workspace(on=card(7, 5))[0] == 0
        assert self.workspace(dtype=torch.bfloat16, on=card(7, 5))[0] == 0

    def test_the_range_holds_the_likely_value(self):
        for direction in ("forward", "backward_input", "backward_weight"):
            likely, low, high = self.workspace(direction)
            assert low <= likely <= high

    def test_three_channels_are_padded_to_one_load(self):
        found = convolution_workspace_bytes(
            "forward",
            (8, 3, 224, 224),
            (64, 3, 7, 7),
            (8, 64, 112, 112),
            stride=(2, 2),
            dilation=(1, 1),
            groups=1,
            dtype=torch.float32,
            channels_last=False,
            card=card(8),
        )[0]
        padded_weight = -(-64 * 4 * 49 * 4 // PHYSICS.alignment_bytes) * PHYSICS.alignment_bytes
        assert found == 8 * 4 * 224 * 224 * 4 + padded_weight + 8 * 64 * 112 * 112 * 4

    def test_depthwise_in_float32_runs_without_cudnn(self):
        tensor, weight = meta(8, 32, 56, 56), meta(32, 1, 3, 3)
        assert runs_natively(tensor, weight, (1, 1), (1, 1), 32)
        assert not runs_natively(tensor.to(memory_format=torch.channels_last), weight, (1, 1), (1, 1), 32)
        assert not runs_natively(tensor.half(), weight.half(), (1, 1), (1, 1), 32)

    def test_channels_last_passes_from_either_operand_to_the_output(self):
        tensor, weight = meta(8, 32, 56, 56), meta(64, 32, 3, 3)
        assert output_memory_format(tensor, weight) is torch.contiguous_format
        assert output_memory_format(tensor.to(memory_format=torch.channels_last), weight) is torch.channels_last
        assert output_memory_format(tensor, weight.to(memory_format=torch.channels_last)) is torch.channels_last
        assert output_memory_format(tensor.double(), weight.double()) is torch.contiguous_format

    def test_the_gradients_take_their_workspaces_one_after_the_other(self):
        tensor, weight, grad = meta(8, 64, 56, 56), meta(64, 64, 3, 3), meta(8, 64, 56, 56)
        arguments = (grad, tensor, weight, [64], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
        events = scratch_events(aten.convolution_backward.default, arguments, {}, (tensor, weight, None), card(8))
        size = (2 * 8 * 64 * 56 * 56 + 64 * 64 * 9) * 4
        assert events == (size, -1, size, -2)

    def test_the_workspace_has_a_range(self):
        arguments = (meta(8, 64, 56, 56), meta(64, 64, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        (size,) = scratch_events(aten.convolution.default, arguments, {}, meta(8, 64, 56, 56), card(8))
        assert isinstance(size, Uncertain)
        assert 0 == size.low_bytes < size < size.high_bytes

    def test_a_channels_last_input_brings_its_weight_along(self):
        tensor = meta(8, 64, 56, 56).to(memory_format=torch.channels_last)
        arguments = (tensor, meta(64, 64, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        assert scratch_events(aten.convolution.default, arguments, {}, tensor, card(8)) == (64 * 64 * 9 * 4,)
