"""The page of a server: its bar adds up to the card, what it says is inert, and what does not fit is shown as missing."""

import dataclasses
import itertools
import re

from tests.hostile_text import HOSTILE_TEXTS

from tightfit.reports.html.inert_text import inert
from tightfit.reports.html.serving_page import serving_page
from tightfit.reports.text.serving_estimates import memory_rows
from tightfit.serving.costs.seconds_range import SecondsRange
from tightfit.serving.costs.serving_speed import ServingSpeed
from tightfit.serving.serve_settings import ResolvedSettings
from tightfit.serving.serving_curves import doubled_lengths
from tightfit.serving.serving_estimate import ServingEstimate
from tightfit.serving.serving_points import LoadPoint, ServingCurves
from tightfit.units import GIB

SETTINGS = ResolvedSettings(
    num_gpus=1, kv_dtype="auto", max_model_len=8192, max_num_seqs=256, max_num_batched_tokens=2048,
    gpu_memory_utilization=0.9, enforce_eager=False, is_chunked=True,
)  # fmt: skip
RANGE = SecondsRange(low=0.01, high=0.02)
FOUND = ServingEstimate(
    model="llama-3-8b", device="NVIDIA L4", capacity_bytes=20 * GIB, settings=SETTINGS, engine="vllm",
    engine_version="0.21.0", weights_bytes=10 * GIB, activation_bytes=GIB, non_torch_bytes=0, context_bytes=GIB // 2,
    graph_bytes=GIB // 2, counts_graphs=True, kv_bytes=6 * GIB, kv_bytes_per_token=131072, request_bytes=GIB,
    kv_tokens=49152, max_concurrency=6.0, concurrency_at_lengths=6.0, why="", assumptions=("one",),
    speed=ServingSpeed(prompt_tokens=2000, answer_tokens=300, num_requests=6, first_token=RANGE, each_token=RANGE),
    launch={"vllm": ["vllm", "serve", "x"]},
    curves=ServingCurves(
        room=((128, 256.0), (256, 128.0), (300, 100.0)),
        loads=(LoadPoint(rate=1, first_token=(0.1, 0.2), each_token=(0.01, 0.02)),
               LoadPoint(rate=2, first_token=(0.2, 0.5), each_token=(0.02, 0.04))),
    ),
)  # fmt: skip


def _bar(page: str) -> list[tuple[str, float, float]]:
    found = re.findall(r'<rect x="([\d.]+)" y="6" width="([\d.]+)" height="40" class="part (\w+)"', page)
    return [(kind, float(x), float(width)) for x, width, kind in found]


def test_the_parts_follow_one_another_and_fill_the_card() -> None:
    bar = _bar(serving_page(FOUND))
    assert [kind for kind, *_ in bar] == ["weights", "activations", "graphs", "outside", "cache", "unused"]
    for (_, x, width), (_, after, _) in itertools.pairwise(bar):
        assert abs(x + width - after) <= 0.2
    assert abs(bar[-1][1] + bar[-1][2] - 1000) <= 0.2


def test_what_does_not_fit_stands_behind_the_end_of_the_card() -> None:
    small = dataclasses.replace(
        FOUND, capacity_bytes=8 * GIB, kv_bytes=0, why="no memory is left", speed=None, curves=None, launch={}
    )  # fmt: skip
    page = serving_page(small)
    bar = _bar(page)
    assert bar[-1][0] == "missing"
    # 12 GiB are taken, of which the card has 8.
    assert abs(bar[-1][1] - 1000 * 8 / 12) <= 0.2
    assert "Does not start" in page


def test_charts_have_a_point_for_each_length_and_rate() -> None:
    page = serving_page(FOUND)
    assert len(re.findall("<circle", page)) == 3 + 4 + 4
    assert "100.0 of 300 tokens" in page
    assert "Not simulated: no lengths" in serving_page(
        dataclasses.replace(FOUND, curves=ServingCurves(room=(), loads=(), no_loads="no lengths"))
    )


def test_it_has_what_the_text_has() -> None:
    page = serving_page(FOUND)
    for name, figure, words in memory_rows(FOUND):
        assert name in page and figure in page and inert(words) in page
    part = serving_page(
        dataclasses.replace(
            FOUND, engine="llama.cpp", layers_on_card=30, num_layers=33, host_bytes=GIB, change="all layers with q6_k weights"
        )
    )  # fmt: skip
    assert '<span class="doubt">Fits in part</span>' in part
    assert "Smallest change: all layers with q6_k weights." in part and "30 of 33" in part and "host memory" in part
    assert '<pre class="command"><code>vllm serve x</code></pre>' in page


def test_names_are_inert() -> None:
    for text in HOSTILE_TEXTS:
        page = serving_page(dataclasses.replace(FOUND, model=f"a{text}b", assumptions=(text,)))
        assert "<script" not in page
        assert text == inert(text) or text not in page


def test_lengths_are_doubled_up_to_the_longest() -> None:
    assert doubled_lengths(1000) == [128, 256, 512, 1000]
    assert doubled_lengths(100) == [100]
