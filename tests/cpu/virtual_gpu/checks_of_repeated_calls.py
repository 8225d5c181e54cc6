"""The second call of an operator on tensors of the same shapes gives what the first one gave, and what the host gives."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tightfit.capture.dispatch.call_cache import CallCache


def facts(value):
    """What a program can see of a result, without its contents."""
    if isinstance(value, torch.Tensor):
        return (
            value.shape,
            value.stride(),
            value.storage_offset(),
            value.dtype,
            value.requires_grad,
            value.is_conj(),
            value.is_neg(),
        )
    if isinstance(value, list | tuple):
        return [facts(item) for item in value]
    return type(value)


def number_of_known_calls():
    return sum(call is not None for call in _get_current_dispatch_mode().calls._calls.values())


def _agree(function, *tensors):
    """Both calls on the card are like one on the host, on tensors of the same layout."""
    expected = facts(function(*tensors))
    for _ in range(2):
        on_card = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda").requires_grad_(t.requires_grad)
            for t in tensors
        ]
        assert facts(function(*on_card)) == expected, function


OPERATORS = (
    lambda x: x.relu(),
    lambda x: x + 1,
    lambda x: x * 2.5,
    lambda x: x.transpose(0, 1).contiguous(),
    lambda x: x.transpose(0, 1) * 2,
    lambda x: x.sum(0, keepdim=True),
    lambda x: x.split(2, 1),
    lambda x: x.unbind(0),
    lambda x: x.chunk(2, 0),
    lambda x: x[1:, ::2],
    lambda x: x[1],
    lambda x: x.expand(3, *x.shape),
    lambda x: x.unsqueeze(0).squeeze(0),
    lambda x: x.max(0),
    lambda x: torch.var_mean(x, 0),
    lambda x: x.softmax(-1),
    lambda x: x @ x.transpose(0, 1),
    lambda x: x.to(torch.float64),
    lambda x: x.detach(),
    lambda x: x.reshape(-1)[3:].view(3, -1),
    lambda x: torch.cat([x, x], 1),
    lambda x: torch.stack([x, x]),
    torch.zeros_like,
    lambda x: x.new_zeros(3),
    lambda x: x.pow(2).mean().sqrt(),
    lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]),
    lambda x: x.clone().add_(1),
    lambda x: x.clone().zero_(),
    lambda x: x.argsort(1),
)


def repeated_operators_give_what_the_host_gives():
    known = number_of_known_calls()
    for shape in ((3, 6), (6, 6)):
        for x in (torch.empty(shape), torch.empty(shape, requires_grad=True), torch.empty(*shape[::-1]).t()):
            for function in OPERATORS:
                _agree(function, x)
    assert number_of_known_calls() > known + len(OPERATORS)


def memory_formats_of_repeated_calls_are_kept():
    image = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    _agree(lambda x: x * 2, image)
    _agree(lambda x: x.contiguous(), image)
    _agree(lambda x: torch.empty_like(x, memory_format=torch.contiguous_format), image)


def numbers_decide_over_dtypes_by_their_type_alone():
    whole = torch.empty(4, dtype=torch.int64, device="cuda")
    for _ in range(2):
        assert (whole * 2).dtype == torch.int64
        assert (whole * 2.0).dtype == torch.float32
        assert (whole * True).dtype == torch.int64
        assert (whole / 2).dtype == torch.float32
        assert (whole * 2j).dtype == torch.complex64
    known = number_of_known_calls()
    for step in range(20):
        whole.float().add_(whole.float(), alpha=1 / (step + 1))
    assert number_of_known_calls() <= known + 2


def sizes_that_are_numbers_are_told_apart():
    x = torch.empty(4, 6, device="cuda")
    assert [x[:, :n].shape[1] for n in (1, 2, 3, 2, 1)] == [1, 2, 3, 2, 1]
    assert [torch.arange(n, device="cuda").numel() for n in (3, 4, 3)] == [3, 4, 3]
    assert [x.repeat(n, 1).shape[0] for n in (1, 2, 1)] == [4, 8, 4]


def views_at_other_places_are_told_apart():
    x = torch.empty(8, 4, device="cuda")
    assert [x[n].unsqueeze(0).storage_offset() for n in (0, 3, 3, 0)] == [0, 12, 12, 0]
    assert [part.storage_offset() for part in x.split(2)] == [0, 8, 16, 24]
    assert [part.t().storage_offset() for part in x.split(2)] == [0, 8, 16, 24]


def a_view_keeps_the_memory_of_what_it_is_of():
    for _ in range(2):
        begin = torch.cuda.memory_allocated()
        x = torch.empty(1 << 20, device="cuda")
        view = x.view(1 << 10, -1)[3]
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert view._base is x
        del x
        assert torch.cuda.memory_allocated() == begin + (4 << 20)
        del view
        assert torch.cuda.memory_allocated() == begin


def what_is_changed_in_place_is_the_same_object_and_counts_as_written():
    x = torch.empty(4, device="cuda")
    for _ in range(3):
        before = x._version
        assert x.mul_(2) is x
        assert x._version == before + 1
    leaf = torch.ones(4, device="cuda", requires_grad=True)
    for _ in range(2):
        kept = leaf.exp()
        kept.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.sum().backward()


def the_default_dtype_counts():
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            assert torch.zeros(3, device="cuda").dtype == dtype
            assert (torch.empty(3, dtype=torch.int64, device="cuda") / 2).dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)


def inference_mode_counts():
    x = torch.empty(4, 4, device="cuda")
    for _ in range(2):
        with torch.inference_mode():
            assert (x * 3).is_inference()
        assert not (x * 3).is_inference()


def views_of_ordinary_tensors_under_inference_mode_are_ordinary():
    kept, made = torch.zeros(4, 6, device="cuda"), torch.empty(6, device="cuda")
    for _ in range(3):
        with torch.inference_mode():
            assert not kept[1].is_inference()
            kept[1] = made
            kept[:, 2:4] = kept[:, 4:].clone()
            assert kept[:, 4:].clone().is_inference()
            assert kept[:, 4:].clone()[0].is_inference()
        assert kept[1].requires_grad_().is_leaf
    with torch.inference_mode():
        made = torch.empty(6, device="cuda")
    for _ in range(2):
        assert made[2:].is_inference()
        assert not (made * 2).is_inference()


def conjugated_and_negated_views_stay_what_they_are():
    for _ in range(2):
        x = torch.empty(4, 4, dtype=torch.complex64, device="cuda")
        assert x.conj().is_conj()
        assert x.conj().imag.is_neg()
        assert not (x.conj() * 1).is_conj()
        assert not x.imag.is_neg()


def selections_by_masks_have_their_sizes():
    for truths in ([True, False, True], [True, True, True], [False, False, False], [True, False, True]):
        mask = torch.tensor(truths, device="cuda")
        rows = torch.arange(3, device="cuda")
        assert rows[mask].numel() == sum(truths)
        assert rows[mask.nonzero()[:, 0]].numel() == sum(truths)


def outputs_that_are_given_are_filled():
    for _ in range(2):
        out = torch.empty(0, device="cuda")
        assert torch.add(torch.empty(5, device="cuda"), 1, out=out) is out
        assert out.shape == (5,)
        held = torch.cuda.memory_allocated()
        del out
        assert torch.cuda.memory_allocated() < held


def storages_that_are_exchanged_are_seen():
    x, other = torch.empty(4, 4, device="cuda"), torch.empty(6, 2, device="cuda")
    for data in (other, torch.empty(3, device="cuda"), other):
        x.data = data
        assert (x * 2).shape == data.shape
        assert x.view(-1).untyped_storage()._cdata == data.untyped_storage()._cdata
    x = torch.empty(4, device="cuda")
    assert [(x.resize_(n) * 1).numel() for n in (4, 9, 4)] == [4, 9, 4]
    assert [torch.as_strided(x, (n,), (1,)).numel() for n in (2, 3)] == [2, 3]


def numbers_in_tensors_on_the_host_are_arguments():
    x = torch.empty(4, device="cuda")
    for _ in range(2):
        assert (x * torch.tensor(2.0, dtype=torch.float64)).dtype == torch.float32
        assert (x.long() * torch.tensor(2.0)).dtype == torch.float32
        assert (x.long() * torch.tensor(2)).device.type == "cuda"


def shapes_that_do_not_fit_are_refused_as_before():
    x, y = torch.empty(4, 3, device="cuda"), torch.empty(5, device="cuda")
    for _ in range(3):
        for wrong in (lambda: x + y, lambda: x @ x, lambda: x.view(5), lambda: x.add_(y)):
            with pytest.raises(RuntimeError):
                wrong()


def a_tensor_of_a_repeated_call_can_be_copied():
    for _ in range(2):
        x = torch.empty(3, device="cuda") * 2
        assert copy.deepcopy(x).shape == (3,)
        assert torch.nn.Parameter(x).shape == (3,)
        assert isinstance(float(x.sum()), float)


def attributes_of_one_tensor_are_not_those_of_another():
    one, other = (torch.empty(7, device="cuda") + 1 for _ in range(2))
    one.mark = "mine"
    assert not hasattr(other, "mark")
    assert not hasattr(torch.empty(7, device="cuda") + 1, "mark")


def scratch_memory_follows_the_settings_of_torch():
    recorder = _get_current_dispatch_mode().recorder
    gradient, tokens = torch.empty(64, 8, device="cuda"), torch.zeros(64, dtype=torch.int64, device="cuda")

    def storages():
        begin = len(recorder.storages["num_bytes"])
        torch.ops.aten.embedding_dense_backward(gradient, tokens, 1000, -1, False)
        return recorder.storages["num_bytes"][begin:]

    assert storages() == storages()
    images, weight = torch.empty(2, 8, 9, 9, device="cuda"), torch.empty(8, 8, 3, 3, device="cuda")
    seen = []
    try:
        for allowed in (True, False, True, False):
            torch.backends.cudnn.allow_tf32 = allowed
            begin = len(recorder.storages["num_bytes"])
            torch.nn.functional.conv2d(images, weight)
            seen.append(recorder.storages["num_bytes"][begin:])
    finally:
        torch.backends.cudnn.allow_tf32 = True
    assert seen[0] == seen[2]
    assert seen[1] == seen[3]
    assert seen[0] != seen[1]


def rows_of_repeated_calls_are_those_of_the_first():
    recorder = _get_current_dispatch_mode().recorder

    def rows():
        begin, products = recorder.num_operators, len(recorder.geometry)
        x = torch.empty(8, 16, device="cuda")
        (x @ x.t()).softmax(1)
        operators = [
            recorder.operators[name][begin:] for name in ("name", "dtype", "flops", "bytes_read", "bytes_written")
        ]
        return operators, [row[1:] for row in recorder.geometry[products:]]

    assert rows() == rows()


def a_cache_that_is_asked_for_another_mode_does_not_answer():
    from torch._subclasses.fake_tensor import FakeTensorMode

    from tightfit.capture.dispatch.operators import facts as facts_of

    operator = torch.ops.aten.relu.default
    x = torch.empty(3, device="cuda")
    cache = CallCache(FakeTensorMode())
    assert cache.key(operator, facts_of(operator), (x,), {}, is_adjusted=False) is None


def large_tensors_on_the_meta_device_stay_there():
    assert torch.empty(1 << 28, device="meta").device.type == "meta"
    assert torch.zeros_like(torch.empty(1 << 28, device="meta")).device.type == "meta"


def tensors_made_beside_an_operator_are_on_the_card():
    gpu = _get_current_dispatch_mode()
    made = gpu.new((1 << 20,), (1,), torch.float32)
    assert made.view(torch.bfloat16).shape == (1 << 21,)
    assert made.device.type == "cuda"
