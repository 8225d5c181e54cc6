"""Tensors on the virtual card: kinds, views, reads, copies, saving."""

import copy
import gc
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from tightfit.capture.observe.streams import VirtualEvent


def allocated():
    return torch.cuda.memory_allocated()


def a_tensor_prints_without_data():
    tensor = torch.randn(3, 4, device="cuda")
    assert "cuda:0" in repr(tensor)
    assert "cuda:0" in f"{tensor}"
    assert "cuda:0" in str(torch.nn.Parameter(tensor))
    assert format(tensor.mean(), ".3f") == format(tensor.mean().item(), ".3f")


def small_tensors_that_came_from_the_host_keep_their_values():
    lengths = torch.tensor([3, 5, 2]).cuda()
    assert lengths.max().item() == 5
    assert lengths.tolist() == [3, 5, 2]
    assert lengths.cpu().numpy().sum() == 10
    assert int(lengths[1]) == 5
    assert (lengths > 2).sum().item() == 2
    assert bool((lengths > 0).all())
    assert torch.zeros(lengths.max(), device="cuda").shape == (5,)
    assert torch.arange(4, device="cuda").tolist() == [0, 1, 2, 3]
    for expected, value in enumerate(torch.arange(3, device="cuda")):
        assert value.item() == expected


def a_known_argument_that_decides_an_and_or_an_or_makes_the_result_known():
    unknown = torch.randn(1000, 1000, device="cuda").argmax(1)[:2] == 3
    assert (unknown | torch.full((2,), True, device="cuda")).tolist() == [True, True]
    assert torch.logical_and(torch.zeros(1, device="cuda"), unknown).tolist() == [False, False]
    unfinished = torch.ones(2, dtype=torch.long, device="cuda") & ~unknown
    assert (unfinished & ~torch.full((2,), True, device="cuda")).max().item() == 0
    # Not decided: the second sequence, and the other bits of a number.
    half = torch.tensor([True, False]).cuda()
    assert (unknown | half).tolist() == [False, False]
    assert (unfinished | torch.ones(2, dtype=torch.long, device="cuda")).sum().item() != 2


def results_of_large_kernels_read_as_something_harmless():
    loss = torch.randn(1000, 1000, device="cuda").mean()
    assert isinstance(loss.item(), float)
    assert isinstance(float(loss), float)
    assert isinstance(loss.tolist(), float)
    assert len(torch.randn(5000, device="cuda").tolist()) == 5000
    assert isinstance(bool(torch.isnan(loss)), bool)
    assert not torch.isnan(loss)
    assert not torch.isinf(loss).any()
    assert torch.isfinite(loss)
    assert torch.isfinite(torch.randn(100, 100, device="cuda")).all()
    assert not torch.isnan(torch.randn(100, 100, device="cuda")).any()
    assert torch.randn(100, 100, device="cuda").cpu().shape == (100, 100)
    assert np.isfinite(loss.detach().cpu().numpy())


def numpy_refuses_a_tensor_of_the_card_as_it_does_there():
    tensor = torch.randn(3, device="cuda")
    with pytest.raises(TypeError, match=r"can't convert cuda:0 device type tensor to numpy"):
        tensor.numpy()
    with pytest.raises(TypeError, match=r"can't convert cuda:0 device type tensor to numpy"):
        np.asarray(tensor)
    with pytest.raises(RuntimeError, match="requires grad"):
        tensor.requires_grad_().cpu().numpy()
    assert tensor.numpy(force=True).shape == (3,)


def operands_on_two_devices_are_refused_as_they_are_there():
    card, host = torch.randn(3, device="cuda"), torch.randn(3)
    with pytest.raises(RuntimeError, match=r"two different devices|same device"):
        card + host
    with pytest.raises(RuntimeError, match="device"):
        torch.nn.Linear(3, 3).cuda()(host)
    assert (card + torch.tensor(1.0)).is_cuda
    assert (torch.tensor(2.0) * card).is_cuda


def views_share_their_storage():
    before = allocated()
    tensor = torch.randn(256, 256, device="cuda")
    size = allocated() - before
    views = [tensor.t(), tensor.view(-1), tensor[3:7], tensor.unsqueeze(0).expand(9, -1, -1), tensor.unfold(0, 2, 1)]
    views += [*tensor.chunk(4), tensor.detach(), tensor.reshape(128, -1), tensor.as_strided((2, 2), (1, 1))]
    assert allocated() == before + size == before + 256 * 256 * 4
    assert views[0].data_ptr() == tensor.data_ptr()
    del tensor
    assert allocated() == before + size
    del views
    assert allocated() == before


def in_place_and_out_write_where_they_are_told():
    tensor, out = torch.randn(128, 128, device="cuda"), torch.empty(128, 128, device="cuda")
    before = allocated()
    tensor.add_(1).mul_(2).clamp_(0, 1)
    tensor[3] = 0
    tensor[tensor > 0] = 1.0
    torch.add(tensor, tensor, out=out)
    torch.mul(out, 2, out=out)
    tensor += out
    tensor.copy_(out)
    tensor.zero_()
    assert allocated() == before
    grown = torch.empty(0, device="cuda")
    torch.cat([tensor, out], out=grown)
    assert grown.shape == (256, 128)
    assert allocated() == before + 256 * 128 * 4


def channels_last_is_kept():
    image = torch.randn(2, 8, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    model = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).cuda()
    model = model.to(memory_format=torch.channels_last)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    out = model(image)
    assert out.is_contiguous(memory_format=torch.channels_last)
    out.sum().backward()
    assert torch.randn(2, 3, 4, 4).cuda(memory_format=torch.channels_last).stride() == (48, 1, 12, 3)


def elements_may_be_one_place_of_memory():
    assert torch.empty_strided((3, 4), (0, 1), device="cuda").stride() == (0, 1)
    assert torch.empty_strided((3, 4), (1, 1), device="cuda").untyped_storage().nbytes() == 24
    assert torch.geqrf(torch.zeros(0, 0, 2, device="cuda"))[0].shape == (0, 0, 2)


def complex_tensors_work():
    tensor = torch.randn(8, 16, device="cuda", dtype=torch.complex64, requires_grad=True)
    spectrum = torch.fft.fft2(tensor)
    power = (spectrum * spectrum.conj()).real.sum()
    power.backward()
    assert tensor.grad.is_complex()
    assert torch.view_as_real(tensor).shape == (8, 16, 2)
    assert torch.fft.irfft(torch.fft.rfft(torch.randn(64, device="cuda"))).shape == (64,)
    assert torch.stft(torch.randn(400, device="cuda"), 64, return_complex=True).is_complex()
    assert torch.polar(torch.ones(2, device="cuda"), torch.ones(2, device="cuda")).is_complex()


def sparse_tensors_work():
    before = allocated()
    indices = torch.tensor([[0, 1, 1], [2, 0, 2]], device="cuda")
    values = torch.randn(3, device="cuda", requires_grad=True)
    matrix = torch.sparse_coo_tensor(indices, values, (2, 3))
    assert matrix.is_sparse
    assert matrix.is_cuda
    dense = torch.randn(3, 4, device="cuda")
    assert torch.sparse.mm(matrix, dense).shape == (2, 4)
    assert (matrix.detach() @ dense).shape == (2, 4)
    torch.sparse.mm(matrix, dense).sum().backward()
    assert matrix.coalesce().indices().shape[0] == 2
    assert matrix.to_dense().shape == (2, 3)
    host = torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (2, 2))
    assert host.cuda().is_sparse
    with pytest.raises(Exception, match="compressed sparse tensors"):
        host.to_sparse_csr().cuda()
    assert dense.to_sparse().is_sparse
    assert allocated() > before


def nested_lists_of_ragged_rows_work():
    rows = [torch.randn(3, 8, device="cuda"), torch.randn(5, 8, device="cuda")]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    assert padded.shape == (2, 5, 8)
    packed = torch.nn.utils.rnn.pack_padded_sequence(padded, torch.tensor([5, 3]), batch_first=True)
    assert packed.data.is_cuda


def what_depends_on_data_has_a_largest_size():
    scores = torch.randn(5000, device="cuda")
    assert (scores > 0).nonzero().shape == (5000, 1)
    assert scores[scores > 0].shape == (5000,)
    assert torch.masked_select(scores, scores > 0).shape == (5000,)
    assert torch.unique(scores).shape == (5000,)
    assert len(torch.where(scores > 0)) == 1
    mask = torch.tensor([True, False, True]).cuda()
    assert torch.randn(3, 2, device="cuda")[mask].shape == (2, 2)
    assert torch.bincount(torch.tensor([0, 1, 1, 4]).cuda()).shape == (5,)
    assert torch.repeat_interleave(torch.tensor([1, 2]).cuda()).shape == (3,)


def peak_beside(run):
    """The bytes that are allocated at the peak of a call, beside what there was."""
    gc.collect()  # what is in cycles must not be freed meanwhile
    torch.cuda.reset_peak_memory_stats()
    before = allocated()
    kept = run()
    del kept
    return torch.cuda.max_memory_allocated() - before


def what_depends_on_data_takes_the_memory_of_its_kernels():
    number = 1 << 20
    scores = torch.randn(number, device="cuda")
    mask = scores > 0
    # The places of the elements, of 8 bytes, beside them, and the storage of a scan.
    for selected in (peak_beside(lambda: torch.masked_select(scores, mask)), peak_beside(lambda: scores[mask])):
        assert 12 * number <= selected < 12.1 * number
    # A sorted copy, and then what is unique or the other buffers of the sort.
    assert 8 * number <= peak_beside(lambda: torch.unique(scores)) < 8.2 * number
    # Beside the sorted copy and its origin: inverse, values, counts.
    everything = peak_beside(lambda: torch.unique(scores, return_inverse=True, return_counts=True))
    assert 32 * number <= everything < 32.5 * number


def a_storage_that_grows_is_copied():
    for grow in (lambda t: t.resize_(3 << 20), lambda t: t.untyped_storage().resize_(3 << 20)):
        tensor = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        # A block that is a little larger is not split.
        assert 3 << 20 <= peak_beside(lambda grow=grow, tensor=tensor: grow(tensor)) < 4 << 20
        assert tensor.untyped_storage().nbytes() == 3 << 20


def deepcopy_and_pickle_make_new_tensors():
    model = torch.nn.Linear(64, 64).cuda()
    before = allocated()
    twin = copy.deepcopy(model)
    assert allocated() == before + 64 * 64 * 4 + 512
    assert twin.weight.is_cuda
    assert isinstance(twin.weight, torch.nn.Parameter)
    assert twin.weight is not model.weight
    again = pickle.loads(pickle.dumps(model))
    assert again.weight.is_cuda
    assert again.weight.shape == (64, 64)
    assert allocated() > before


def saving_succeeds_and_writes_nothing():
    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 8, device="cuda")).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}, "weights.pt")
    assert not Path("weights.pt").exists()
    loaded = torch.load("weights.pt", weights_only=True)
    assert loaded["epoch"] == 3
    assert loaded["model"]["weight"].is_cuda
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    assert torch.load("weights.pt", map_location="cpu")["model"]["weight"].is_cpu
    torch.save(model, "model.pt")
    assert torch.load("model.pt", weights_only=False).weight.is_cuda
    with open("handle.pt", "wb") as handle:
        torch.save(model, handle)
    with open("handle.pt", "rb") as handle:
        assert torch.load(handle, weights_only=False).weight.shape == (8, 8)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    assert torch.load(buffer)["weight"].is_cuda
    torch.save({"host": torch.ones(2)}, "host.pt")
    assert torch.load("host.pt", map_location="cuda")["host"].tolist() == [1, 1]


def safetensors_saving_succeeds_and_writes_nothing():
    from safetensors.torch import load_file, save_file, save_model

    model = torch.nn.Linear(8, 8).cuda()
    save_file(model.state_dict(), "weights.safetensors")
    assert not Path("weights.safetensors").exists()
    assert load_file("weights.safetensors")["weight"].shape == (8, 8)
    assert load_file("weights.safetensors", device="cuda")["weight"].is_cuda
    save_model(model, "model.safetensors")
    save_file({"host": torch.ones(2)}, "host.safetensors")
    assert load_file("host.safetensors")["host"].tolist() == [1, 1]


def a_tensor_of_the_card_can_go_to_the_host_and_back():
    tensor = torch.randn(1024, 1024, device="cuda")
    before = allocated()
    host = tensor.cpu()
    assert host.is_cpu
    assert allocated() == before
    del tensor
    assert allocated() == before - (4 << 20)
    assert host.cuda().is_cuda
    assert torch.zeros(3).copy_(torch.ones(3, device="cuda")).tolist() == [1, 1, 1]
    assert torch.cat([torch.ones(2, device="cuda"), torch.zeros(1, device="cuda")]).tolist() == [1, 1, 0]


def what_transforms_of_functions_need_works():
    from torch.func import functional_call, grad, vmap

    model = torch.nn.Linear(6, 3).cuda()
    parameters = dict(model.named_parameters())

    def loss(parameters, sample, target):
        out = functional_call(model, parameters, (sample.unsqueeze(0),))
        return torch.nn.functional.cross_entropy(out, target.unsqueeze(0))

    samples, targets = torch.randn(5, 6, device="cuda"), torch.randint(0, 3, (5,), device="cuda")
    gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, samples, targets)
    assert gradients["weight"].shape == (5, 3, 6)
    assert gradients["weight"].is_cuda
    hessian = torch.func.hessian(lambda x: (x**3).sum())(torch.randn(4, device="cuda"))
    assert hessian.shape == (4, 4)
    primal, tangent = torch.func.jvp(torch.sin, (torch.randn(4, device="cuda"),), (torch.ones(4, device="cuda"),))
    assert primal.shape == tangent.shape == (4,)


def distributions_and_linear_algebra_work():
    normal = torch.distributions.Normal(torch.zeros(4, device="cuda"), torch.ones(4, device="cuda"))
    assert normal.rsample((3,)).shape == (3, 4)
    assert normal.log_prob(torch.zeros(4, device="cuda")).is_cuda
    categorical = torch.distributions.Categorical(logits=torch.randn(2, 5, device="cuda"))
    assert categorical.sample().shape == (2,)
    assert categorical.entropy().is_cuda
    matrix = torch.randn(6, 6, device="cuda")
    assert torch.linalg.svd(matrix).S.shape == (6,)
    assert torch.linalg.qr(matrix).Q.shape == (6, 6)
    assert torch.linalg.inv(matrix).shape == torch.linalg.cholesky(matrix @ matrix.T).shape == (6, 6)
    assert torch.linalg.solve(matrix, torch.randn(6, 2, device="cuda")).shape == (6, 2)
    assert torch.linalg.eigh(matrix).eigenvalues.shape == (6,)
    assert torch.linalg.norm(matrix).is_cuda
    assert torch.einsum("ij,jk->ik", matrix, matrix).is_cuda
    assert torch.topk(matrix, 2).values.shape == (6, 2)
    assert torch.multinomial(torch.rand(5, device="cuda"), 2).shape == (2,)


def host_tensors_move_to_the_card_under_inference_mode():
    with torch.inference_mode():
        moved = [
            torch.randn(2, 3, 4, 4).to("cuda"),
            torch.randn(2, 3, 4, 4).to("cuda", torch.float16),
            torch.randn(2, 3, 4, 4).to(device="cuda", memory_format=torch.channels_last),
        ]
        assert all(tensor.is_cuda for tensor in moved)
        assert moved[1].dtype == torch.float16
        assert moved[2].is_contiguous(memory_format=torch.channels_last)


def dropout_in_evaluation_copies_nothing_under_inference_mode():
    with torch.inference_mode():
        hidden = torch.randn(1 << 20, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = torch.nn.functional.dropout(hidden, 0.1, training=False)
        assert kept.data_ptr() == hidden.data_ptr() or torch.cuda.memory_allocated() == before
        assert torch.cuda.max_memory_allocated() == before


def what_was_made_under_inference_mode_is_read_later_as_other_tensors_are():
    with torch.inference_mode():
        scores = torch.ones(8, 4, device="cuda")
    assert isinstance(scores.sum().item(), float)
    assert scores.reshape(-1).numel() == 32
    assert not any("aten.item" in what for _, what in VirtualEvent.recorder.assumptions)
