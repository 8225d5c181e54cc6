"""Which attention kernel a card runs: cases read off the checks of sdp_utils.cpp."""

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tightfit.capture.kernels import Card
from tightfit.capture.kernels.attention.flex import flex_attention
from tightfit.capture.kernels.attention.sdpa_backends import choose_backend

A100 = Card(compute_capability=(8, 0), num_multiprocessors=108)
RTX4090 = Card(compute_capability=(8, 9), num_multiprocessors=128)
H100 = Card(compute_capability=(9, 0), num_multiprocessors=132)
H100_CUDA12 = Card(compute_capability=(9, 0), num_multiprocessors=132, cuda_version=(12, 8), cudnn_version=91002)
H100_2_9 = dataclasses.replace(H100_CUDA12, torch=(2, 9))
B200 = Card(compute_capability=(10, 0), num_multiprocessors=148)
T4 = Card(compute_capability=(7, 5), num_multiprocessors=40)


def heads(
    width: int = 64, *, dtype: torch.dtype = torch.bfloat16, length: int = 128, num: int = 8, grad: bool = True
) -> torch.Tensor:
    return torch.empty(2, num, length, width, dtype=dtype, device="meta", requires_grad=grad)


def choose(query: torch.Tensor, on: Card, **options: object) -> str:
    key = options.pop("key", query)
    return choose_backend(query, key, key, card=on, **options)


@pytest.mark.parametrize(
    ("on", "expected"),
    [
        pytest.param(A100, "flash", id="A100"),
        pytest.param(RTX4090, "flash", id="RTX 4090"),
        pytest.param(H100, "cudnn", id="H100"),
        pytest.param(B200, "cudnn", id="B200"),
        pytest.param(H100_CUDA12, "flash", id="H100 with cuDNN 9.10"),
        pytest.param(H100_2_9, "cudnn", id="H100 with torch 2.9"),
        pytest.param(dataclasses.replace(H100, torch=(2, 8)), "flash", id="H100 with torch 2.8"),
        pytest.param(T4, "math", id="T4"),
    ],
)
def test_bfloat16_by_card(on, expected):
    assert choose(heads(), on) == expected


def test_half_on_turing_is_memory_efficient():
    assert choose(heads(dtype=torch.float16), T4) == "efficient"


@pytest.mark.parametrize("on", [T4, A100, H100], ids=["T4", "A100", "H100"])
def test_float32_is_memory_efficient(on):
    assert choose(heads(dtype=torch.float32), on) == "efficient"


def test_float64_is_plain():
    assert choose(heads(dtype=torch.float64), A100) == "math"


def test_a_mask_leaves_flash():
    mask = torch.empty(128, 128, dtype=torch.bool, device="meta")
    assert choose(heads(), A100, attn_mask=mask) == "efficient"
    assert choose(heads(), H100, attn_mask=mask) == "cudnn"


def test_a_mask_that_learns_leaves_cudnn():
    mask = torch.empty(128, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    assert choose(heads(), H100, attn_mask=mask) == "efficient"


def test_heads_wider_than_256_leave_flash():
    assert choose(heads(256), A100) == "flash"
    assert choose(heads(264), A100) == "efficient"


def test_wide_heads_train_on_cards_with_little_shared_memory_only_without_dropout():
    assert choose(heads(208), RTX4090) == "efficient"
    assert choose(heads(256), RTX4090) == "flash"
    assert choose(heads(256), RTX4090, dropout_p=0.1) == "efficient"
    assert choose(heads(256, grad=False), RTX4090, dropout_p=0.1) == "flash"


def test_heads_wider_than_128_leave_cudnn():
    assert choose(heads(136), H100) == "flash"


def test_odd_widths_stay_with_flash_which_pads_them():
    assert choose(heads(60), A100) == "flash"
    assert choose(heads(60, dtype=torch.float32), A100) == "efficient"
    assert choose(heads(61, dtype=torch.float32), A100) == "math"


def test_cudnn_takes_dropout_in_sixteenths_only():
    assert choose(heads(), H100, dropout_p=0.1) == "flash"
    assert choose(heads(), H100, dropout_p=0.125) == "cudnn"


def test_causal_with_unequal_lengths_leaves_flash():
    assert choose(heads(length=64), A100, key=heads(length=128), is_causal=True) == "efficient"


def test_grouped_queries_need_their_switch():
    assert choose(heads(), A100, key=heads(num=2), enable_gqa=True) == "flash"
    assert choose(heads(dtype=torch.float32), A100, key=heads(num=2, dtype=torch.float32), enable_gqa=True) == "math"


def test_three_dimensions_are_plain():
    flat = torch.empty(8, 128, 64, dtype=torch.bfloat16, device="meta")
    assert choose(flat, A100) == "math"


def test_a_strided_width_is_plain():
    assert choose(heads(128)[..., ::2], A100) == "math"


def test_the_users_context_is_obeyed():
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert choose(heads(), H100) == "efficient"
    with sdpa_kernel(SDPBackend.MATH):
        assert choose(heads(), H100) == "math"
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert choose(heads(), A100) == "efficient"


def test_no_kernel_left_is_an_error_as_in_torch():
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available kernel"):
        choose(heads(dtype=torch.float32), A100)


def test_cudnn_can_be_deprioritised(monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert choose(heads(), H100) == "flash"


def test_flex_attention_returns_what_is_asked_for_besides() -> None:
    from torch.nn.attention.flex_attention import AuxRequest

    query, key, value = (torch.randn(2, 3, 5, 4) for _ in range(3))
    out, lse = flex_attention(query, key, value, return_lse=True)
    assert out.shape == query.shape and lse.shape == query.shape[:-1]
    assert flex_attention(query, key, value, None, None, None, False, True)[1].shape == lse.shape
    _, aux = flex_attention(query, key, value, return_aux=AuxRequest(lse=True))
    assert aux.lse.shape == lse.shape and aux.max_scores is None
    assert flex_attention(query, key, value, return_aux=AuxRequest(max_scores=True))[1].max_scores.shape == lse.shape
    assert flex_attention(query, key, value).shape == query.shape
