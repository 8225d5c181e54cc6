"""Batches that are copied through a ring: what a program gets is what torch would have given it, whatever it does to the batch, to the copy and around both.

On the host the ring and its order are those of a card, a thread is the copy engine, and `tensor.to("cpu")` counts as a copy to the card.
"""

import contextlib
import copy
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tests.conformance.models import MODELS
from tests.conformance.training import Habits, train
from tests.sampled import every_second
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from tightfit.engine.batch_copies import BatchCopies, CopyLane, HostLane
from tightfit.engine.copy_engines import HostCopies
from tightfit.techniques.offload.apply_asynchronous_copies import ProgramCopies
from tightfit.torch_hooks.tensor_moves import on_tensor_moves

HOST = torch.device("cpu")
KIB = 1 << 10
Statistics = dict[str, int]


@contextlib.contextmanager
def copied(host_bytes: int = 8 * KIB, card_bytes: int = 4 * KIB, lane: CopyLane | None = None) -> Iterator[Statistics]:
    """Copies to the host itself go through a ring inside; counts them."""
    statistics: Statistics = {}
    copies = BatchCopies(host_bytes=host_bytes, card_bytes=card_bytes, device=HOST, lane=lane or HostLane())
    owner = ProgramCopies(copies, HOST, statistics)
    leave = on_tensor_moves(owner)
    try:
        yield statistics
    finally:
        leave()
        copies.end()


class AtOnce(CopyLane):
    """Copies when it is asked to."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, *, is_beside: bool) -> Any:
        target.copy_(source)

    def mark(self) -> Any:
        pass

    def hold_back(self, event: Any) -> None:
        pass

    def wait(self, event: Any) -> None:
        pass

    def finish(self, event: Any) -> None:
        pass


def number_of(statistics: Statistics) -> int:
    return statistics.get("batch copies", 0)


class Images(Dataset[Any]):
    """Augmented by Python's, numpy's and torch's random numbers."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(16) + float(np.random.rand())
        return noise + number, number % 4


def trained(copies: Callable[[torch.Tensor], torch.Tensor], num_workers: int = 0) -> list[torch.Tensor]:
    """Two epochs of a loop that writes to batches once they are copied, and to copies; its losses, weights and random numbers."""
    torch.manual_seed(0)
    np.random.seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    kept, found = [], []
    for _ in range(2):
        loader = DataLoader(Images(), batch_size=5, shuffle=True, num_workers=num_workers)
        for images, labels in loader:
            on_card, targets = copies(images), copies(labels)
            images.fill_(float("nan"))
            labels.numpy()[:] = 0
            on_card.mul_(0.5)
            kept.append(on_card)
            loss = nn.functional.cross_entropy(model(on_card), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
    return [*found, *kept, *model.state_dict().values(), torch.get_rng_state(), torch.rand(3)]


@pytest.mark.parametrize("card_bytes", [0, 512, 4 * KIB])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_trains_the_same_to_the_bit(card_bytes: int, num_workers: int) -> None:
    plain = trained(lambda tensor: tensor.to("cpu", copy=True), num_workers)
    # So small that each range is used again and again.
    with copied(host_bytes=KIB, card_bytes=card_bytes) as statistics:
        found = trained(lambda tensor: tensor.to("cpu"), num_workers)
    assert number_of(statistics) == 2 * 2 * 10
    assert all(torch.equal(one, other) for one, other in zip(plain, found, strict=True))


@pytest.mark.parametrize("model", every_second(MODELS))
def test_models_train_the_same_to_the_bit(model: str) -> None:
    habits = Habits(clips=True, accumulates=2, schedules=True, scales=True, reloads_at=1, evaluates=True)
    plain = train(model, (), num_steps=3, habits=habits)
    with copied(host_bytes=96 * KIB, card_bytes=48 * KIB) as statistics:
        found = train(model, (), num_steps=3, habits=habits)
    assert number_of(statistics) >= 6
    assert plain.losses == found.losses
    for one, other in zip((*plain.gradients, plain.state), (*found.gradients, found.state), strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def tensors() -> dict[str, torch.Tensor]:
    numbers = torch.randn(2, 3, 4, 5)
    return {
        "contiguous": numbers,
        "channels last": numbers.to(memory_format=torch.channels_last),
        "channels last, volumes": torch.randn(1, 2, 3, 2, 2).to(memory_format=torch.channels_last_3d),
        "transposed": numbers.transpose(1, 3),
        "every second": numbers[:, ::2],
        "a slice in the middle": numbers.flatten()[7:31],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "one number": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "of one row": numbers[:1, :1],
        "bool": numbers > 0,
        "bfloat16": numbers.bfloat16(),
        "complex": torch.randn(3, 2, dtype=torch.complex64),
        "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
        "negated": torch._neg_view(torch.randn(3)),
        "sparse": torch.eye(3).to_sparse(),
        "bytes of nan": torch.tensor([0x7FC01234, -4321, 0x7F800001], dtype=torch.int32).view(torch.float32),
        "a gradient is wanted": torch.randn(3, requires_grad=True),
        "of a graph": torch.randn(3, requires_grad=True) * 2,
        "larger than the ring": torch.randn(5000),
    }


@pytest.mark.parametrize("name", list(tensors()))
@pytest.mark.parametrize("card_bytes", [0, 4 * KIB])
def test_a_copy_looks_as_torchs_own(name: str, card_bytes: int) -> None:
    tensor = tensors()[name]
    plain = tensor.to("cpu", copy=True)
    with copied(card_bytes=card_bytes) as statistics:
        found = tensor.to(device="cpu", copy=True, non_blocking=True)
    assert number_of(statistics) == (
        name in ("contiguous", "channels last", "channels last, volumes", "a slice in the middle", "one number")
        or name in ("of one row", "bool", "bfloat16", "complex", "bytes of nan")
    )
    for of in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "_version", "grad_fn", "__dict__"):
        one, other = getattr(found, of), getattr(plain, of)
        assert type(one) is type(other) if of == "grad_fn" else one == other, of
    assert type(found) is type(plain) and found._is_view() == plain._is_view()
    if plain.layout == torch.strided:
        assert found.stride() == plain.stride() and found.storage_offset() == plain.storage_offset()
        assert found.untyped_storage().nbytes() == plain.untyped_storage().nbytes()
        assert found.is_conj() == plain.is_conj() and found.is_neg() == plain.is_neg()
        one, other = (each.resolve_conj().resolve_neg().detach().contiguous() for each in (found, plain))
        assert bytes(one.flatten().view(torch.uint8).tolist()) == bytes(other.flatten().view(torch.uint8).tolist())


def test_what_asks_for_more_than_a_copy_is_torchs() -> None:
    numbers = torch.arange(6.0)
    # What torch says of wrong arguments it goes on to say.
    wrong: list[Callable[[], Any]] = [
        lambda: numbers.to("cpu", device="cpu"),
        lambda: numbers.to("no such device"),
        lambda: numbers.to("cpu", torch.float32, False, False, None, None),
        lambda: numbers.to("cpu", colour=1),
        lambda: numbers.to("cpu", non_blocking="yes"),
    ]
    plain = []
    for call in wrong:
        with pytest.raises((RuntimeError, TypeError)) as error:
            call()
        plain.append((type(error.value), str(error.value).splitlines()[0]))
    with copied() as statistics:
        for call, (kind, text) in zip(wrong, plain, strict=True):
            with pytest.raises(kind) as error:
                call()
            assert str(error.value).splitlines()[0] == text
        others = [
            numbers.to(torch.float64),
            numbers.to("cpu", torch.float64),
            numbers.to(torch.zeros(1, dtype=torch.int64)),
            numbers.to("meta"),
            numbers.to("cpu", memory_format=torch.contiguous_format),
            numbers.view(2, 3).to("cpu", torch.float32, False, True).to(dtype=torch.int32),
        ]
    assert [other.dtype for other in others] == [torch.float64, torch.float64, torch.int64] + [torch.float32] * 2 + [
        torch.int32
    ]
    assert others[3].device.type == "meta" and number_of(statistics) == 0


def test_a_gradient_goes_through_a_copy() -> None:
    image = torch.randn(4, requires_grad=True)
    with copied() as statistics:
        (image.to("cpu", copy=True) ** 2).sum().backward()
    assert torch.equal(image.grad, 2 * image) and number_of(statistics) == 0


def test_copies_are_no_part_of_the_ring() -> None:
    with copied(host_bytes=KIB, card_bytes=512) as statistics:
        kept = [torch.full((100,), float(number)).to("cpu") for number in range(50)]
        kept[3].add_(100)
    assert number_of(statistics) == 50
    assert [each.unique().tolist() for each in kept] == [[103.0 if i == 3 else float(i)] for i in range(50)]


def test_batches_grow_and_shrink() -> None:
    sizes = [1, 200, 7, 1024, 3, 900, 1500, 2, 1024]
    with copied(host_bytes=4 * KIB, card_bytes=2 * KIB) as statistics:
        for size in sizes:
            numbers = torch.randn(size)
            assert torch.equal(numbers.to("cpu", copy=True), numbers)
    # One was larger than the ring.
    assert number_of(statistics) == len(sizes) - 1


def test_threads_copy_at_once() -> None:
    def work(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        are_same = True
        for _ in range(40):
            numbers = torch.randn(150, generator=generator)
            expected = numbers.clone()
            found = numbers.to("cpu")
            numbers.zero_()
            are_same &= torch.equal(found, expected)
        return are_same

    with copied(host_bytes=2 * KIB, card_bytes=KIB) as statistics, ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert number_of(statistics) > 0


def test_a_fork_copies_by_itself() -> None:
    with copied() as statistics:
        torch.ones(3).to("cpu")
        child = os.fork()
        if not child:
            status = 1
            try:
                numbers = torch.arange(50.0)
                is_right = torch.equal(numbers.to("cpu", copy=True), numbers) and number_of(statistics) == 1
                gc.collect()
                status = 0 if is_right else 2
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(torch.full((5,), 2.0).to("cpu"), torch.full((5,), 2.0)) and number_of(statistics) == 2


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Named(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Tagged(torch.Tensor):
    """A class of the program's own."""


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_whoever_looks_sees_torchs_own_operation() -> None:
    numbers = torch.randn(3, 4)
    with copied() as statistics:
        with Seen() as seen:
            numbers.to("cpu", copy=True)
        with Named() as named:
            numbers.to("cpu", copy=True)
        with torch.inference_mode():
            assert numbers.to("cpu", copy=True).is_inference()
        mapped = torch.func.vmap(lambda row: row.to("cpu", copy=True) * 2)(numbers)
        tagged = numbers.as_subclass(Tagged).to("cpu", copy=True)
        frozen = nn.Parameter(numbers, requires_grad=False).to("cpu", copy=True)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(numbers, torch.ones_like(numbers)).to("cpu", copy=True)
            assert torch.autograd.forward_ad.unpack_dual(dual).tangent is not None
    assert seen.names == ["aten._to_copy.default"] and named.names == ["to"]
    assert torch.equal(mapped, 2 * numbers) and type(tagged) is Tagged and torch.equal(frozen, numbers)
    assert number_of(statistics) == 0


def test_a_compiled_step_copies() -> None:
    @torch.compile(backend="eager")
    def step(numbers: torch.Tensor) -> torch.Tensor:
        return numbers.to("cpu", copy=True) * 2

    with copied():
        assert torch.equal(step(torch.ones(3)), torch.full((3,), 2.0))


def test_what_a_model_copies_is_left_to_torch() -> None:
    model = nn.Linear(3, 3)
    owner = ProgramCopies(BatchCopies(host_bytes=KIB, card_bytes=0, device=HOST, lane=HostLane()), HOST, {})
    leave = on_tensor_moves(owner)
    inside = torch.ones(3)

    def forward(numbers: torch.Tensor) -> torch.Tensor:
        # On the host torch's own is no copy.
        assert inside.to("cpu") is inside
        return model(numbers)

    assert owner.around_forward(forward, inside).shape == (3,)
    assert inside.to("cpu") is not inside
    leave()
    assert inside.to("cpu") is inside
    assert "to" not in vars(torch.Tensor) and "copy_" not in vars(torch.Tensor) and "cuda" not in vars(torch.Tensor)


class _Fails(HostCopies):
    """A copy engine whose thread cannot be started."""

    def begin(self, source: Any, target: Any, *, to_host: bool, held: tuple[Any, ...] = ()) -> Any:
        self._pool.shutdown()
        return super().begin(source, target, to_host=to_host, held=held)


def test_the_copy_thread_dies() -> None:
    lane = HostLane()
    lane._copies = _Fails()
    copies = BatchCopies(host_bytes=KIB, card_bytes=512, device=HOST, lane=lane)
    for number in range(10):
        found = copies.copy(torch.full((100,), float(number)))
        assert found is not None and found.tolist() == [float(number)] * 100
    copies.end()


def test_an_interrupt_loses_a_range_and_no_value() -> None:
    lane = HostLane()
    copies = BatchCopies(host_bytes=2 * KIB, card_bytes=KIB, device=HOST, lane=lane)
    begin = lane.copy
    interrupts = {2, 3, 5}
    number = 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        ticket = begin(*args, **kwargs)
        if number in interrupts:
            raise KeyboardInterrupt
        return ticket

    lane.copy = interrupted  # ty: ignore
    for number in range(40):
        expected = torch.full((100,), float(number))
        try:
            found = copies.copy(expected)
        except KeyboardInterrupt:
            continue
        # Where too much is lost torch copies.
        assert found is None or torch.equal(found, expected)
    copies.end()


def test_a_signal_at_any_moment_is_no_wrong_copy() -> None:
    def alarm(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, alarm)
    wrong = done = 0
    try:
        # Without a thread, whose start Python's own library does not finish when it is interrupted.
        with copied(host_bytes=16 * KIB, card_bytes=8 * KIB, lane=AtOnce()):
            for number in range(300):
                expected = torch.full((64,), float(number))
                found = None
                try:
                    signal.setitimer(signal.ITIMER_REAL, 1e-5 * (number % 12 + 1))
                    found = expected.to("cpu")
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    pass
                if found is not None:
                    done += 1
                    wrong += not torch.equal(found, torch.full((64,), float(number)))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert done and not wrong


def test_two_models_have_a_ring_each_and_one_copies() -> None:
    with copied() as first, copied() as second:
        numbers = torch.randn(8)
        assert torch.equal(numbers.to("cpu"), numbers)
    assert (number_of(first), number_of(second)) == (1, 0)


def test_a_copy_of_the_ring_owner_is_none() -> None:
    model = nn.Linear(2, 2)
    copies = BatchCopies(host_bytes=KIB, card_bytes=0, device=HOST, lane=HostLane())
    owner = ProgramCopies(copies, HOST, {})
    from tightfit.techniques.session import Session

    session = Session(model=model, optimizers=[])
    session.wrap_forward(model, owner.around_forward)
    other = copy.deepcopy(model)
    assert torch.equal(other(torch.ones(2)), model(torch.ones(2)))
    session.undo()
    assert threading.active_count() < 50
