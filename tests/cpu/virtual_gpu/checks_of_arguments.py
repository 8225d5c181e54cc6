"""Arguments that no kernel takes: what ends a program on a card must not be traced as if it ran. The host is asked for the reference."""

import pytest
import torch
import torch.nn.functional as F

HALF, LONG = torch.float16, torch.long


def _refused(call, device):
    try:
        call(device)
    except (RuntimeError, IndexError, NotImplementedError) as error:
        return error
    return None


def _refused_as_on_the_host(*calls):
    for call in calls:
        assert _refused(call, "cpu") is not None
        assert _refused(call, "cuda") is not None


def _run_as_on_the_host(*calls):
    for call in calls:
        call("cpu")
        call("cuda")


def _randn(*size, dtype=torch.float32):
    return lambda device: torch.randn(*size, device=device, dtype=dtype)


def _ones(*size, dtype=LONG):
    return lambda device: torch.ones(*size, device=device, dtype=dtype)


def _of(function, *tensors, **others):
    return lambda device: function(*(make(device) if callable(make) else make for make in tensors), **others)


def products_of_two_dtypes_are_refused():
    square, half, double = _randn(4, 4), _randn(4, 4, dtype=HALF), _randn(4, 4, dtype=torch.float64)
    _refused_as_on_the_host(
        _of(torch.mm, square, half),
        _of(torch.matmul, square, double),
        _of(torch.matmul, square, _ones(4, 4)),
        _of(F.linear, square, half, _randn(4)),
        _of(F.linear, square, square, _randn(4, dtype=HALF)),
        _of(F.linear, _randn(2, 3, 4), half),
        _of(torch.bmm, _randn(2, 4, 4), _randn(2, 4, 4, dtype=HALF)),
    )
    with pytest.raises(RuntimeError, match="mat1 and mat2 must have the same dtype, but got Float and BFloat16"):
        torch.addmm(
            torch.randn(4, device="cuda", dtype=torch.bfloat16),
            torch.randn(4, 4, device="cuda"),
            torch.randn(4, 4, device="cuda", dtype=torch.bfloat16),
        )
    with torch.autocast("cuda"):
        F.linear(
            torch.randn(4, 4, device="cuda"),
            torch.randn(4, 4, device="cuda", dtype=torch.bfloat16),
            torch.randn(4, device="cuda"),
        )


def images_of_another_dtype_than_the_weights_are_refused():
    weight = _randn(4, 3, 3, 3)
    _refused_as_on_the_host(
        _of(F.conv2d, _ones(2, 3, 8, 8, dtype=torch.uint8), weight),
        _of(F.conv2d, _randn(2, 3, 8, 8), _randn(4, 3, 3, 3, dtype=HALF)),
        _of(F.conv2d, _randn(2, 3, 8, 8), weight, _randn(4, dtype=HALF)),
        _of(F.conv_transpose2d, _randn(2, 4, 8, 8), _randn(4, 3, 3, 3, dtype=HALF)),
    )
    with pytest.raises(RuntimeError, match=r"Input type \(torch.cuda.ByteTensor\) and weight type \(torch.cuda.Float"):
        F.conv2d(torch.ones(2, 3, 8, 8, device="cuda", dtype=torch.uint8), weight("cuda"))


def losses_of_targets_in_another_dtype_are_refused():
    scores, chances = _randn(4, 5), lambda device: torch.rand(4, device=device)
    _refused_as_on_the_host(
        _of(F.cross_entropy, scores, _ones(4, dtype=torch.int32)),
        _of(F.cross_entropy, scores, _ones(4), _randn(5, dtype=torch.float64)),
        _of(F.cross_entropy, _ones(4, 5), _ones(4)),
        _of(F.binary_cross_entropy, chances, _ones(4)),
        _of(F.binary_cross_entropy, chances, _ones(4, dtype=torch.float64)),
        _of(F.cross_entropy, _randn(2, 5, 3), _ones(2, 3, dtype=torch.uint8)),
        _of(F.binary_cross_entropy_with_logits, scores, _ones(4, 5, dtype=LONG)),
        _of(F.binary_cross_entropy_with_logits, scores, _ones(4, 5, dtype=torch.bool)),
    )
    _run_as_on_the_host(
        _of(F.cross_entropy, scores, _ones(4)),
        _of(F.cross_entropy, scores, _ones(4, dtype=LONG), _randn(5)),
        _of(F.mse_loss, scores, _ones(4, 5)),
    )


def a_huber_loss_of_two_dtypes_is_refused_in_its_backward_pass():
    def trained(dtype):
        def run(device):
            F.huber_loss(
                torch.randn(4, 5, device=device, requires_grad=True), _ones(4, 5, dtype=dtype)(device)
            ).backward()

        return run

    _refused_as_on_the_host(*map(trained, (HALF, torch.float64, LONG)))
    _run_as_on_the_host(trained(torch.float32))


def a_loss_of_two_dtypes_is_in_that_of_the_scores_and_classes_may_be_bytes():
    def trained(loss, dtype, *size, scores=HALF):
        def run(device):
            given = torch.randn(4, 5, device=device).to(scores).requires_grad_()
            result = loss(given, _ones(*size, dtype=dtype)(device))
            (gradient,) = torch.autograd.grad(result, given)
            assert {result.dtype, gradient.dtype} == {scores}

        return run

    several = (torch.float32, torch.float64, LONG)
    _run_as_on_the_host(
        *(trained(F.soft_margin_loss, dtype, 4, 5) for dtype in several),
        *(trained(loss, torch.uint8, 4, scores=torch.float32) for loss in (F.cross_entropy, F.nll_loss)),
    )
    assert F.huber_loss(_randn(4, 5, dtype=HALF)("cuda"), _randn(4, 5)("cuda")).dtype == HALF
    _refused_as_on_the_host(trained(F.soft_margin_loss, torch.bool, 4, 5))


def what_is_written_to_a_tensor_of_another_dtype_is_refused():
    rows = _ones(2)
    _refused_as_on_the_host(
        lambda device: torch.zeros(4, 4, device=device).__setitem__(rows(device), _randn(2, 4, dtype=HALF)(device)),
        lambda device: torch.zeros(4, 4, device=device).__setitem__(
            torch.ones(4, device=device, dtype=torch.bool), _randn(4, 4, dtype=HALF)(device)
        ),
        lambda device: torch.zeros(4, 4, device=device).index_add(0, rows(device), _randn(2, 4, dtype=HALF)(device)),
        lambda device: torch.zeros(4, 4, device=device).index_copy(0, rows(device), _randn(2, 4, dtype=HALF)(device)),
        lambda device: torch.ones(4, device=device, dtype=LONG).mul_(torch.randn(4, device=device)),
        lambda device: torch.ones(4, device=device, dtype=LONG).div_(2),
    )
    _run_as_on_the_host(
        lambda device: torch.zeros(4, 4, device=device).__setitem__(rows(device), 1),
        lambda device: torch.zeros(4, 4, device=device).__setitem__(
            torch.ones(4, 4, device=device, dtype=torch.bool), torch.tensor(1.0, dtype=HALF)
        ),
        lambda device: torch.zeros(4, device=device, dtype=HALF).add_(torch.randn(4, device=device)),
        lambda device: torch.zeros(4, device=device).mul_(torch.ones(4, device=device, dtype=LONG)),
        lambda device: torch.zeros(4, device=device, dtype=LONG).add_(1),
    )


def a_value_of_the_card_is_not_cast_behind_a_mask():
    mask, half = torch.ones(4, 4, device="cuda", dtype=torch.bool), torch.tensor(1.0, device="cuda", dtype=HALF)
    with pytest.raises(RuntimeError, match="got Float for the destination and Half for the source"):
        torch.zeros(4, 4, device="cuda")[mask] = half


def parameters_of_a_normalisation_in_another_dtype_are_refused():
    half, single = _randn(2, 4, 3, dtype=HALF), _randn(2, 4, 3)
    weights = {dtype: torch.ones(4, device="cuda", dtype=dtype) for dtype in (HALF, torch.float32, torch.bfloat16)}
    for given, weight, bias in (
        (half, torch.float32, torch.float32),
        (single, HALF, HALF),
        (single, torch.float32, HALF),
    ):
        with pytest.raises(RuntimeError, match="expected scalar type"):
            F.layer_norm(given("cuda").mT, (4,), weights[weight], weights[bias])
        with pytest.raises(RuntimeError, match="expected scalar type"):
            F.group_norm(given("cuda"), 2, weights[weight], weights[bias])
    # A batch in half precision is normalised with parameters in float32 too.
    for weight in (HALF, torch.float32):
        assert F.batch_norm(half("cuda"), None, None, weights[weight], weights[weight], True).dtype == HALF
    for given, weight, bias in (
        (half, torch.float32, HALF),
        (half, torch.bfloat16, torch.bfloat16),
        (single, HALF, HALF),
    ):
        with pytest.raises(RuntimeError, match="Expected"):
            F.batch_norm(given("cuda"), None, None, weights[weight], weights[bias], True)


def masks_are_not_subtracted():
    mask, numbers = torch.ones(4, device="cuda", dtype=torch.bool), torch.ones(4, device="cuda")
    for call in (lambda: 1 - mask, lambda: 1.0 - mask, lambda: numbers - mask, lambda: F.l1_loss(numbers, mask)):
        with pytest.raises(RuntimeError, match="with a bool tensor is not supported"):
            call()
    with pytest.raises(RuntimeError, match="with two bool tensors is not supported"):
        mask - mask
    assert (~mask).dtype == torch.bool


def numbers_of_eight_bits_are_cast_and_moved_and_not_computed_with():
    eight = torch.ones(16, 16, device="cuda", dtype=torch.float8_e4m3fn)
    for call in (
        lambda: eight + eight,
        lambda: eight * 2,
        lambda: eight @ eight,
        lambda: F.linear(eight, eight),
        lambda: F.softmax(eight, -1),
    ):
        with pytest.raises(NotImplementedError, match="not implemented for 'Float8_e4m3fn'"):
            call()
    assert torch.cat([eight.clone(), eight[:2].to(torch.float8_e4m3fn)]).float().sum().shape == ()
    scale = torch.ones((), device="cuda")
    assert torch._scaled_mm(eight, eight.t(), scale, scale, out_dtype=torch.bfloat16).dtype == torch.bfloat16


def attention_takes_one_dtype():
    query, value = _randn(1, 2, 4, 8)("cuda"), _randn(1, 2, 4, 8, dtype=HALF)("cuda")
    with pytest.raises(RuntimeError, match=r"query.dtype: float key.dtype: float and value.dtype: c10::Half"):
        F.scaled_dot_product_attention(query, query, value)


def conditions_of_bytes_are_cast_and_small_constants_pass_every_kernel():
    ones, bytes_ = torch.ones(2, 4, 3, device="cuda"), torch.ones(2, 4, 3, device="cuda", dtype=torch.uint8)
    assert torch.where(bytes_, ones, ones).dtype == torch.float32
    four = torch.ones(4, device="cuda")
    assert F.batch_norm(ones, four, four).shape == F.logsigmoid(ones).shape == ones.shape
    assert F.embedding_bag(torch.ones(2, 3, device="cuda", dtype=LONG), torch.ones(5, 4, device="cuda")).shape == (2, 4)


def numbers_put_behind_a_mask_fill_it():
    numbers = torch.randn(512, 1000, device="cuda")
    mask = numbers > 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for where in (mask, mask[:, 0], (slice(None), mask[0])):
        numbers[where] = 0.0
        numbers[where] = torch.tensor(1.0, dtype=HALF)
    # Places of all that are true would take 16 bytes for each.
    assert torch.cuda.max_memory_allocated() == before
    assert torch.index_put(numbers, (mask,), torch.tensor(1.0)).shape == numbers.shape


def functions_of_floating_numbers_refuse_whole_ones():
    numbers = _ones(4, 4)
    _refused_as_on_the_host(
        _of(torch.softmax, numbers, dim=1),
        _of(F.gelu, numbers),
        _of(F.silu, numbers),
        _of(torch.std, numbers),
        _of(torch.bitwise_and, _randn(4), _randn(4)),
        lambda device: torch.ones(4, device=device, dtype=torch.bool) | torch.randn(4, device=device),
        lambda device: torch.randn(4, device=device) & 1,
    )
    _run_as_on_the_host(
        _of(torch.softmax, numbers, dim=1, dtype=torch.float32),
        lambda device: torch.ones(4, device=device, dtype=LONG) & 1,
        lambda device: torch.ones(4, device=device, dtype=torch.bool) ^ torch.ones(4, device=device, dtype=torch.bool),
    )


def attention_refuses_a_mask_of_whole_numbers():
    heads = _randn(2, 2, 4, 8)
    _refused_as_on_the_host(_of(F.scaled_dot_product_attention, heads, heads, heads, _ones(4, 4)))
    _run_as_on_the_host(_of(F.scaled_dot_product_attention, heads, heads, heads, _ones(4, 4, dtype=torch.bool)))


def a_ctc_loss_refuses_lengths_beyond_its_input():
    def loss(device, *, length=10, targets=2):
        scores = torch.randn(10, 2, 5, device=device).log_softmax(2)
        labels = torch.ones(targets, 4, dtype=LONG, device=device)
        return F.ctc_loss(scores, labels, torch.tensor([10, length]), torch.tensor([4, 4]))

    _refused_as_on_the_host(lambda device: loss(device, length=11), lambda device: loss(device, targets=3))
    _run_as_on_the_host(loss)


def weights_that_were_left_on_the_host_are_refused():
    image, kernel = torch.randn(1, 3, 8, 8, device="cuda"), torch.randn(4, 3, 3, 3)
    with pytest.raises(RuntimeError, match=r"Input type \(torch.cuda.FloatTensor\) and weight type \(torch.FloatTen"):
        F.conv2d(image, kernel)
    with pytest.raises(RuntimeError, match=r"torch.FloatTensor\) and weight type \(torch.cuda.FloatTensor\) should"):
        F.conv2d(image.cpu(), kernel.cuda())
    net = torch.nn.LSTM(3, 4).cuda()
    state = (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
    with pytest.raises(RuntimeError, match="hidden tensors are not at the same device, found input tensor at cuda:0"):
        net(torch.randn(5, 2, 3, device="cuda"), state)
    net(torch.randn(5, 2, 3, device="cuda"), tuple(each.cuda() for each in state))


def indices_on_the_card_of_what_is_on_the_host_are_refused():
    rows = torch.randn(4)
    for index in (torch.zeros(2, dtype=LONG, device="cuda"), torch.randn(4, device="cuda") > 0):
        with pytest.raises(RuntimeError, match="indices should be either on cpu or on the same device"):
            _ = rows[index]
        # Where something is written the kernel of the host reads them.
        rows[index] = 0.0
        rows[index] = torch.ones((), device="cuda")
        assert rows[index.cpu()].device.type == "cpu"
    # The other way round the kernel moves them, and one number is read back.
    assert rows.cuda()[torch.zeros(2, dtype=LONG)].shape == (2,)
    assert rows[torch.tensor(1, device="cuda")].shape == ()


def generators_of_the_other_device_are_refused():
    ours, theirs = torch.Generator("cuda").manual_seed(0), torch.Generator().manual_seed(0)
    assert torch.randn(3, device="cuda", generator=ours).shape == torch.randn(3, generator=theirs).shape == (3,)
    torch.empty(3, device="cuda").normal_(generator=ours)
    torch.multinomial(torch.rand(3, device="cuda"), 1, generator=ours)
    torch.randperm(3, generator=theirs)
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        torch.randn(3, device="cuda", generator=theirs)
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        torch.empty(3, device="cuda").normal_(generator=theirs)
    with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'cuda'"):
        torch.randperm(3, generator=ours)


def what_is_on_the_card_cannot_be_pinned():
    with pytest.raises(RuntimeError, match=r"cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors"):
        torch.randn(3, device="cuda").pin_memory()
    assert torch.randn(3).pin_memory().is_pinned()
