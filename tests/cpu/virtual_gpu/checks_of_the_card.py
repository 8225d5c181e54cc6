"""What a program asks of `torch.cuda` and `torch.accelerator`, and the ways to say `cuda`."""

import gc

import pytest
import torch

from tightfit.capture.observe.streams import VirtualStream

MIB = 1 << 20


def the_device_is_cuda_however_it_is_spelt():
    for tensor in (
        torch.zeros(3, device="cuda"),
        torch.zeros(3, device="cuda:0"),
        torch.zeros(3, device=torch.device("cuda", 0)),
        torch.zeros(3, device=torch.device("cuda")),
        torch.zeros(3, device=0),
        torch.zeros(3).cuda(),
        torch.zeros(3).cuda(0),
        torch.zeros(3).cuda(non_blocking=True),
        torch.zeros(3).to("cuda"),
        torch.zeros(3).to(0),
        torch.zeros(3).to(torch.zeros(1, device="cuda")),
        torch.tensor([1.0, 2.0, 3.0], device="cuda"),
        torch.as_tensor([1.0, 2.0, 3.0], device="cuda"),
        torch.from_numpy(torch.zeros(3).numpy()).cuda(),
        torch.zeros(3, device="cuda").new_zeros(3),
        torch.zeros_like(torch.zeros(3), device="cuda"),
        torch.cuda.FloatTensor(3),
        torch.cuda.FloatTensor([1, 2, 3]),
        torch.zeros(3).type(torch.cuda.FloatTensor),
    ):
        assert tensor.is_cuda
        assert tensor.device == torch.device("cuda", 0)
        assert tensor.device.index == 0
        assert tensor.get_device() == 0
        assert tensor.shape == (3,)
        assert not tensor.is_cpu
        assert not tensor.is_meta
        assert tensor.type() == "torch.cuda.FloatTensor"


def a_default_device_makes_everything_on_the_card():
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(2).is_cuda
        assert torch.nn.Linear(2, 2).weight.is_cuda
        assert torch.randn(2, 3).is_cuda
        assert torch.arange(4).is_cuda
        assert torch.tensor([1, 2]).is_cuda
        assert torch.get_default_device() == torch.device("cuda", 0)
    finally:
        torch.set_default_device("cpu")
    with torch.device("cuda"):
        assert torch.nn.Conv2d(1, 1, 1).bias.is_cuda
        assert torch.tensor(1.0).is_cuda
    assert torch.zeros(2).is_cpu
    torch.set_default_device(None)


def the_card_has_the_properties_of_the_chosen_one():
    properties = torch.cuda.get_device_properties(0)
    assert "4090" in properties.name
    assert (properties.major, properties.minor) == (8, 9)
    assert properties.multi_processor_count == 128
    assert 20 << 30 < properties.total_memory < 25 << 30
    assert torch.cuda.get_device_name() == torch.cuda.get_device_name("cuda:0") == properties.name
    assert torch.cuda.get_device_capability() == (8, 9)
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    assert torch.cuda.is_available()
    assert torch.cuda.is_initialized()
    assert torch.cuda.is_bf16_supported()
    assert "sm_89" in torch.cuda.get_arch_list()
    assert torch.version.cuda
    assert torch.backends.cudnn.is_available()
    assert torch.backends.cudnn.version() > 8000
    assert torch.backends.cuda.is_built()
    assert torch.cuda.get_device_properties("cuda").warp_size == 32
    torch.cuda.set_device(0)
    torch.cuda.set_device("cuda:0")
    with torch.cuda.device(0):
        assert torch.zeros(1, device="cuda").is_cuda


def the_accelerator_is_the_card():
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator().type == "cuda"
    assert torch.accelerator.device_count() == 1
    assert torch.accelerator.current_device_index() == 0
    torch.accelerator.synchronize()
    held = torch.zeros(MIB, dtype=torch.uint8, device=torch.accelerator.current_accelerator())
    assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated() >= held.nbytes
    assert torch.accelerator.max_memory_allocated() >= MIB
    assert torch.accelerator.memory_reserved() >= 2 * MIB
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()


def memory_statistics_come_from_the_simulated_allocator():
    gc.collect()
    before = torch.cuda.memory_allocated()
    tensor = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    small = torch.empty(1, device="cuda")
    assert torch.cuda.memory_allocated() == before + 3 * MIB + 512
    assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
    assert torch.cuda.max_memory_allocated() >= before + 3 * MIB
    del tensor, small
    assert torch.cuda.memory_allocated() == before
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == before
    torch.cuda.empty_cache()
    statistics = torch.cuda.memory_stats()
    assert statistics["allocated_bytes.all.current"] == before
    assert statistics["num_ooms"] == 0
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < total
    assert "PyTorch CUDA memory summary" in torch.cuda.memory_summary()
    assert torch.cuda.memory_cached() == torch.cuda.memory_reserved()
    assert isinstance(torch.cuda.memory_snapshot(), list)
    torch.cuda.memory._record_memory_history(max_entries=100)
    torch.cuda.memory._dump_snapshot("never-written.pickle")
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.set_per_process_memory_fraction(0.5)
    assert VirtualStream.recorder.memory_fraction == 0.5


def streams_and_events_can_be_used():
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        tensor = torch.zeros(10, device="cuda")
    tensor.record_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(side)
    assert torch.cuda.current_stream() == torch.cuda.default_stream() != side
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    end.record()
    end.synchronize()
    torch.cuda.synchronize()
    torch.cuda.synchronize("cuda")
    assert start.elapsed_time(end) > 0
    assert end.query()
    assert isinstance(torch.cuda.current_stream().cuda_stream, int)


def ranges_and_marks_of_the_profiler_can_be_used():
    torch.cuda.nvtx.range_push("step")
    torch.cuda.nvtx.mark("here")
    torch.cuda.nvtx.range_pop()
    with torch.cuda.nvtx.range("step"):
        torch.zeros(1, device="cuda")
    with torch.autograd.profiler.record_function("step"):
        torch.zeros(1, device="cuda")
    with torch.cuda.profiler.profile():
        torch.zeros(1, device="cuda")


def random_state_can_be_set_and_kept():
    torch.manual_seed(0)
    torch.cuda.manual_seed(1)
    torch.cuda.manual_seed_all(1)
    state = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(state)
    torch.cuda.set_rng_state_all(torch.cuda.get_rng_state_all())
    assert state.dtype == torch.uint8
    with torch.random.fork_rng():
        torch.randn(2, device="cuda")
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert generator.device.type == "cuda"
    assert torch.randn(2, device="cuda", generator=generator).is_cuda
    assert torch.randint(0, 9, (4,), device="cuda", generator=generator).is_cuda
    assert torch.randperm(5, device="cuda").is_cuda


def the_error_of_memory_that_has_run_out_exists():
    assert issubclass(torch.cuda.OutOfMemoryError, RuntimeError)
    assert torch.OutOfMemoryError is torch.cuda.OutOfMemoryError
    try:
        torch.zeros(1, device="cuda")
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()


def pinned_memory_says_that_it_is_pinned():
    tensor = torch.zeros(4).pin_memory()
    assert tensor.is_pinned()
    assert not torch.zeros(4).is_pinned()
    assert torch.zeros(4, pin_memory=True).is_pinned()
    assert tensor.to("cuda", non_blocking=True).is_cuda


def a_second_card_does_not_exist():
    for ask in (
        lambda: torch.zeros(1, device="cuda:1"),
        lambda: torch.zeros(1).to("cuda:1"),
        lambda: torch.zeros(1).cuda(1),
        lambda: torch.nn.Linear(1, 1).cuda(1),
        lambda: torch.cuda.set_device(1),
        lambda: torch.zeros(1, device="cuda").to("cuda:1"),
    ):
        with pytest.raises(Exception, match="one GPU is simulated"):
            ask()


def settings_of_the_backends_can_be_made():
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.deterministic = False
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_flash_sdp(True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        q = torch.zeros(1, 2, 8, 16, device="cuda")
        assert torch.nn.functional.scaled_dot_product_attention(q, q, q).shape == q.shape


def a_graph_of_launches_can_be_captured():
    graph = torch.cuda.CUDAGraph()
    static = torch.zeros(4, 4, device="cuda")
    with torch.cuda.graph(graph):
        out = static @ static
    graph.replay()
    assert out.is_cuda
