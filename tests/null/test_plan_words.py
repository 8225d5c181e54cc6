"""What a plan says of its techniques: settings in words, changes with a sign, and nothing cut to fit a terminal."""

import io

import pytest
from rich.console import Console
from tests.plans import GIB, a_plan

from tightfit.planner.plan import Alternative, Choice
from tightfit.planner.setting_words import setting_words
from tightfit.reports.plans import PlanText
from tightfit.units import SIGNS_IN_ASCII, format_bytes_change, format_seconds_change


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keep": [3, 5], "outputs": ["q_proj", "mlp.down_proj"]}, "keeps the outputs of `q_proj`, `mlp.down_proj`"),
        ({"keep": [3, 5]}, "keeps the outputs of products 3, 5 of its forward pass"),
        ({"num_chunks": 8, "gradients_in": "forward"}, "8 chunks, gradients computed in the forward pass"),
        ({"begin": 2, "end": 6, "num_tiles": 1}, "layers 2 to 5, 1 tile"),
        ({"kernel": "fused", "clips": False}, "fused=True"),
        ({"kernel": "for-loop"}, "foreach=False, fused=False"),
        ({"num_parts": 4, "draws_anew": True}, "4 micro-batches, random numbers drawn for each part"),
        ({"of_another_package": 3}, "of_another_package=3"),
        ({}, ""),
    ],
)
def test_settings_are_words(settings: dict[str, object], words: str) -> None:
    assert setting_words(settings) == words


def test_a_change_has_its_sign_and_no_change_is_empty() -> None:
    assert [format_bytes_change(n) for n in (20 << 10, -3 << 29, 0)] == ["+20.0 KiB", "−1.50 GiB", ""]
    assert [format_seconds_change(s) for s in (-406e-6, 0.0012, 0.0)] == ["−406.0 µs", "+1.2 ms", ""]


def test_a_stream_without_these_signs_has_those_of_ascii_and_never_loses_a_minus() -> None:
    assert "−406.0 µs … 訓".encode("ascii", SIGNS_IN_ASCII) == b"-406.0 us ~ ?"


@pytest.mark.parametrize(
    ("width", "figures"),
    # In the narrowest one a row is a paragraph.
    [(80, "memory +19.5 KiB; time −406.0 µs"), (100, "+19.5 KiB  −406.0 µs"), (120, "+19.5 KiB  −406.0 µs")],
)
def test_neither_settings_nor_alternatives_are_cut(width: int, figures: str) -> None:
    outputs = [f"layers.0.self_attn.{name}_proj" for name in ("q", "k", "v", "o")]
    choice = Choice(
        technique="selective_checkpointing",
        where="LlamaForCausalLM.model.layers.0",
        settings={"keep": [0, 1, 2, 3], "outputs": outputs},
        saves_bytes=-19968,
        adds_seconds=-406e-6,
        exact=True,
    )
    name = " + ".join(("chunked_loss", "selective_checkpointing", "optimizer_kernel", "tiled_tokens"))
    other = Alternative(
        name=name, device_bytes=GIB, seconds_per_step=1.0, fits=True, exact=True, why="fits, but is slower"
    )
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(PlanText(a_plan(choices=(choice,), alternatives=(other,))))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert figures in text
    words = "".join(text.split())
    assert all(word in words for word in ("chunked_loss+", "tiled_tokens", "fits,but"))
    # A name may go on in the next line, beside other cells, but no part of it is replaced by an ellipsis.
    assert "…" not in text.partition("techniques applied")[2].replace("….model.layers.0", "").replace("….layers.0", "")
