"""The routes of operators that a CPU build takes apart otherwise than a card: run on fake CUDA tensors, in a process of their own."""

import functools
import json

import pytest
import torch
from tests.forked_python import forked_python

from tightfit.capture.kernels.architecture import Card, wheel_libraries

PROGRAM = """
import json, os
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from tightfit.capture.patches import native
from tightfit.capture.kernels import Card
from tightfit.capture.kernels.attention.flex import flex_attention
from tightfit.capture.kernels.install import install

native.pretend_cuda_is_built()
torch.cuda.is_available = lambda: True
# A CUDA build asks each card whether its cuDNN can serve it.
torch.cuda.device_count, torch.cuda.get_device_capability = lambda: 1, lambda device=None: (8, 0)
torch.cuda._lazy_init = lambda: None
torch._C._set_only_lift_cpu_tensors(True)
library = install(Card(compute_capability=(8, 0), num_multiprocessors=108))
fake = FakeTensorMode(allow_non_fake_inputs=True)
log = []

class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = fake.dispatch(func, types, args, kwargs or {})
        if func is not torch.ops.prim.device.default:
            listed = outputs if isinstance(outputs, (tuple, list)) else [outputs]
            log.append([str(func), [list(t.shape) for t in listed if isinstance(t, torch.Tensor)]])
        return outputs

F = torch.nn.functional

def tensor(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)

def flash():
    q = tensor(2, 4, 16, 60, dtype=torch.bfloat16)
    log.clear()
    F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()

def masked():
    q, mask = tensor(2, 4, 15, 60), torch.ones(2, 1, 15, 15, dtype=torch.bool, device="cuda")
    log.clear()
    F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward()

def plain():
    q, mask = tensor(2, 4, 16, 61), torch.ones(16, 16, dtype=torch.bool, device="cuda")
    log.clear()
    F.scaled_dot_product_attention(q, q, q, attn_mask=mask).sum().backward()

def autocast():
    q = tensor(2, 4, 16, 64)
    log.clear()
    with torch.autocast("cuda", dtype=torch.float16):
        F.scaled_dot_product_attention(q, q, q)

def fused():
    x, w = tensor(4, 16), tensor(16)
    log.clear()
    F.rms_norm(F.silu(x), (16,), w).sum().backward()

def lstm():
    net = torch.nn.LSTM(8, 16, 2, device="cuda", bidirectional=True, batch_first=True)
    x = tensor(5, 3, 8)
    log.clear()
    net(x)[0].sum().backward()

def flex():
    q, k = tensor(2, 8, 32, 64), tensor(2, 2, 32, 64)
    log.clear()
    flex_attention(q, k, k, enable_gqa=True).sum().backward()

logs = {}
with Mode():
    for case in (flash, masked, plain, autocast, fused, lstm, flex):
        case()
        logs[case.__name__] = list(log)
print(json.dumps(logs), flush=True)
os._exit(0)  # torch's threads for the virtual device do not survive an orderly end
"""


@functools.cache
def logs() -> dict[str, list[tuple[str, list[list[int]]]]]:
    done = forked_python("-W", "ignore", "-c", PROGRAM)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def operators(case: str) -> list[tuple[str, list[list[int]]]]:
    return [(name, shapes) for name, shapes in logs()[case]]


def names(case: str) -> list[str]:
    return [name for name, _ in operators(case)]


def test_flash_pads_the_width_and_saves_one_number_per_query():
    found = dict(operators("flash"))
    assert found["aten.constant_pad_nd.default"] == [[2, 4, 16, 60]]  # the last one cuts a gradient back
    assert found["aten._scaled_dot_product_flash_attention.default"][:2] == [[2, 4, 16, 64], [2, 4, 16]]
    assert found["aten._scaled_dot_product_flash_attention_backward.default"] == [[2, 4, 16, 64]] * 3


def test_a_mask_is_made_additive_and_aligned_before_it_is_broadcast():
    found = dict(operators("masked"))
    assert found["aten.constant_pad_nd.default"] == [[2, 1, 15, 16]]
    assert found["aten._scaled_dot_product_efficient_attention.default"][:2] == [[2, 4, 15, 60], [2, 4, 32]]


def test_plain_attention_adds_its_mask_in_place():
    found = names("plain")
    assert "aten.add_.Tensor" in found
    assert "aten._safe_softmax.default" in found


def test_autocast_reaches_attention_first():
    found = names("autocast")
    assert found.index("aten._to_copy.default") < found.index("aten._scaled_dot_product_flash_attention.default")


@pytest.mark.parametrize("name", ["silu_backward", "_fused_rms_norm", "_fused_rms_norm_backward"])
def test_fused_kernels_stay_whole(name):
    assert f"aten.{name}.default" in names("fused")


def test_a_fused_backward_brings_no_steps_of_its_own():
    found = names("fused")
    assert "aten.sigmoid.default" not in found
    assert "aten.rsqrt.default" not in found


def test_a_recurrent_layer_is_one_operator_with_a_reserve():
    found = dict(operators("lstm"))
    output, hidden, cell, reserve = found["aten._cudnn_rnn.default"][:4]
    assert (output, hidden, cell) == ([5, 3, 32], [4, 5, 16], [4, 5, 16])
    assert reserve == [3 * 5 * 16 * 2 * 2 * 6 * 4]
    assert "aten._cudnn_rnn_backward.default" in found
    assert "aten.mm.default" not in found


def test_flex_attention_never_forms_the_scores():
    for _, shapes in operators("flex"):
        assert [2, 8, 32, 32] not in shapes


def test_kernels_are_chosen_for_the_libraries_of_the_installed_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.0+cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    card = Card.of_build((9, 0), 132)
    assert (card.cuda_version, card.cudnn_version, card.torch) == ((12, 8), 91002, (2, 8))
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    card = Card.of_build((9, 0), 132)
    assert (card.cuda_version, card.cudnn_version) == ((12, 9), 91900)


def test_the_defaults_are_those_of_the_newest_wheels() -> None:
    card = Card(compute_capability=(9, 0), num_multiprocessors=132)
    assert wheel_libraries(card.torch) == (card.cuda_version, card.cudnn_version)
