"""The text of an estimate, on one made by hand: verdict first, aligned, names shortened where the terminal is narrow."""

import dataclasses
import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tightfit.reports.results import Estimate
from tightfit.reports.text.estimates import (
    ComparisonText,
    EstimateText,
    bar,
    category_table,
    fitted,
    write_comparison,
    write_estimate,
)
from tightfit.reports.text.table_columns import Column, fit_widths, shorten_middle, shorten_module, shorten_place
from tightfit.simulate.estimate import Band, Peak, PeakMoment, SiteAtPeak, SpanPeak
from tightfit.simulate.seconds_band import SecondsBand
from tightfit.simulate.throughput import StepCounts
from tightfit.tape import Assumption
from tightfit.units import GIB, MIB

ESTIMATE = Estimate(
    target="train.py",
    device="NVIDIA GeForce RTX 4060",
    capacity_bytes=8 * GIB,
    peak=Peak(
        allocated_bytes=9 * GIB,
        reserved_bytes=10 * GIB,
        device_bytes=10 * GIB + 150 * MIB,
        device_low_bytes=10 * GIB + 100 * MIB,
        device_high_bytes=10 * GIB + 250 * MIB,
    ),
    at_peak={
        "parameters": 1 * GIB,
        "gradients": 0,
        "optimizer_state": 2 * GIB,
        "activations": 5 * GIB,
        "temporaries": 1 * GIB,
        "inputs": 0,
        "workspace": 0,
        "cache": 1 * GIB,
        "context": 150 * MIB,
    },
    moment=PeakMoment(
        span="step 2", phase="backward", operator="aten.mm", module="Net.head", line="project/train.py:41"
    ),
    allocation_sites=(
        SiteAtPeak(
            category="activations",
            module="LanguageModel.transformer.layers.*.feed_forward.activation",
            operator="aten.native_layer_norm_backward",
            line="project/models/transformer.py:141",
            num_storages=24,
            num_bytes=5 * GIB,
        ),
        SiteAtPeak(
            category="optimizer_state",
            module="",
            operator="aten.zeros_like",
            line="project/train.py:41",
            num_storages=200,
            num_bytes=2 * GIB,
        ),
    ),
    spans=(
        SpanPeak(
            name="set-up",
            kind="setup",
            peak_allocated_bytes=GIB,
            peak_reserved_bytes=2 * GIB,
            end_allocated_bytes=GIB,
        ),
        SpanPeak(
            name="step 1",
            kind="step",
            peak_allocated_bytes=9 * GIB,
            peak_reserved_bytes=10 * GIB,
            end_allocated_bytes=3 * GIB,
        ),
    ),
    band=(Band(cause="CUDA context", less_bytes=50 * MIB, more_bytes=100 * MIB),),
    host_peak_bytes=300 * MIB,
    seconds_per_step=0.25,
    versions={"python": "3.11.7", "torch": "2.13.0", "cuda": ""},
    assumptions=(Assumption(where="train.py:44", what="a value read back from the GPU is assumed to be 1.0"),),
)
ROOMY = dataclasses.replace(ESTIMATE, device="NVIDIA GeForce RTX 4090", capacity_bytes=24 * GIB)
TIGHT = dataclasses.replace(ESTIMATE, capacity_bytes=10 * GIB + 200 * MIB)

REPORT = """\
does not fit: 2.15 GiB too much
train.py on NVIDIA GeForce RTX 4060, 8.00 GiB

peak GPU memory   10.15 GiB  10.10 GiB to 10.24 GiB (CUDA context)
reserved          10.00 GiB  by torch's caching allocator
allocated          9.00 GiB  by live tensors
host memory       300.0 MiB  in tensors
time per step      250.0 ms  estimated time
peak at           step 2, backward, mm, Net.head, project/train.py:41

largest: activations 5.00 GiB, optimizer state 2.00 GiB, parameters 1.00 GiB
to try:  a smaller batch, gradient checkpointing
or:      tightfit plan finds what makes it fit, without changing the program

memory at the peak, by category
parameters        1.00 GiB  10%  █████████▋
optimizer state   2.00 GiB  20%  ███████████████████▎
activations       5.00 GiB  49%  ████████████████████████████████████████████████
temporaries       1.00 GiB  10%  █████████▋
unused cache      1.00 GiB  10%  █████████▋
CUDA context     150.0 MiB   1%  █▍

top allocation sites
   bytes  blocks  what             your line           module                              operator
5.00 GiB      24  activations      transformer.py:141  ….layers.*.feed_forward.activation  native_l…_backward
2.00 GiB     200  optimizer state  …/train.py:41                                           zeros_like

step by step
        peak allocated  peak reserved  still allocated after the step
set-up        1.00 GiB       2.00 GiB                        1.00 GiB
step 1        9.00 GiB      10.00 GiB                        3.00 GiB

assumptions
- a value read back from the GPU is assumed to be 1.0 (train.py:44)

times are estimates, without data loading and logging
with python 3.11.7, torch 2.13.0; estimated in 1.5 s
"""


def text_of(estimate: Estimate, *, width: int, encoding: str = "utf-8", elapsed_seconds: float | None = None) -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    console = Console(file=file, width=width, highlight=False)
    console.print(EstimateText(estimate, elapsed_seconds=elapsed_seconds))
    file.seek(0)
    return "".join(line.rstrip() + "\n" for line in file.read().splitlines())


def section(text: str, title: str) -> list[str]:
    lines = text.partition(f"{title}\n")[2].partition("\n\n")[0]
    return lines.splitlines()


def test_the_whole_report() -> None:
    assert text_of(ESTIMATE, width=120, elapsed_seconds=1.5) == REPORT


@pytest.mark.parametrize("width", [60, 80, 120, 160, 240])
def test_no_line_is_wider_than_the_terminal_and_none_is_cut_by_it(width: int) -> None:
    text = text_of(ESTIMATE, width=width)
    assert max(map(len, text.splitlines())) <= min(width, 160)
    assert "141" in text
    assert "activation" in text


def test_a_narrow_terminal_shortens_folders_and_modules_and_drops_operators() -> None:
    heading, first, _ = section(text_of(ESTIMATE, width=80), "top allocation sites")
    assert heading.split() == ["bytes", "blocks", "what", "your", "line", "module"]
    assert "transformer.py:141" in first
    assert "project" not in first
    assert first.endswith("….feed_forward.activation")


def test_a_column_that_nothing_is_known_for_is_left_out() -> None:
    holders = tuple(dataclasses.replace(holder, line="") for holder in ESTIMATE.allocation_sites)
    heading, *_ = section(
        text_of(dataclasses.replace(ESTIMATE, allocation_sites=holders), width=120), "top allocation sites"
    )
    assert heading.split() == ["bytes", "blocks", "what", "module", "operator"]


def test_pinned_memory_is_said_beside_the_tensors_that_it_is_for() -> None:
    pinned = dataclasses.replace(ESTIMATE, pinned_peak_bytes=256 * MIB, pinned_tensor_bytes=150 * MIB)
    [line] = [line for line in text_of(pinned, width=160).splitlines() if line.startswith("host memory")]
    assert line.endswith(
        "300.0 MiB  in tensors; 256.0 MiB of it pinned, in blocks of powers of two for tensors of 150.0 MiB"
    )


def test_time_in_which_the_gpu_waits_is_said_where_it_counts() -> None:
    long, short = [
        next(line for line in text_of(estimate, width=160).splitlines() if line.startswith("time per step"))
        for estimate in (
            dataclasses.replace(ESTIMATE, idle_seconds_per_step=0.05),
            dataclasses.replace(ESTIMATE, idle_seconds_per_step=0.004),
        )
    ]
    assert long.endswith(
        "250.0 ms  estimated time; the GPU is idle for 50.0 ms of it, waiting for the host or for copies"
    )
    assert short.endswith("estimated time")


def test_the_range_of_the_time_is_beside_it_with_what_widens_it_most() -> None:
    band = SecondsBand(
        low_seconds=0.2304,
        high_seconds=0.2711,
        more={"matrix products": 0.07, "attention": 0.05, "other kernels": 0.001},
        less={"matrix products": 0.07, "attention": 0.05, "other kernels": 0.001},
    )
    [line] = lines_of(dataclasses.replace(ESTIMATE, seconds_band=band), "time per step")
    assert line.endswith("250.0 ms  (230-271) estimated time, matrix products, attention")


def test_throughput_is_said_where_tokens_or_samples_can_be_told() -> None:
    counts = StepCounts(flops=2e12, model_flops=1e12, utilisation=0.404, num_tokens=8192, num_samples=None)
    [line] = lines_of(dataclasses.replace(ESTIMATE, counts=counts), "throughput")
    assert line.split(maxsplit=1)[1] == "32,768 tokens/s  40% of the peak FLOP/s (MFU)"
    slow = dataclasses.replace(counts, num_tokens=None, num_samples=1, utilisation=None)
    [line] = lines_of(dataclasses.replace(ESTIMATE, counts=slow), "throughput")
    assert line.split(maxsplit=1)[1] == "4 samples/s"
    assert not lines_of(dataclasses.replace(ESTIMATE, counts=dataclasses.replace(slow, num_samples=None)), "throughput")


def lines_of(estimate: Estimate, beginning: str) -> list[str]:
    return [line.rstrip() for line in text_of(estimate, width=160).splitlines() if line.startswith(beginning)]


def test_a_wide_terminal_shortens_nothing() -> None:
    _, first, _ = section(text_of(ESTIMATE, width=240), "top allocation sites")
    assert "LanguageModel.transformer.layers.*.feed_forward.activation" in first
    assert "project/models/transformer.py:141" in first


@pytest.mark.parametrize(
    ("estimate", "verdict"),
    [
        (ROOMY, "fits: 13.85 GiB left"),
        (TIGHT, "fits without the safety margin: 50.0 MiB left, and the peak may be 100.0 MiB higher"),
        (ESTIMATE, "does not fit: 2.15 GiB too much"),
    ],
)
def test_the_verdict_comes_first(estimate: Estimate, verdict: str) -> None:
    assert text_of(estimate, width=100).splitlines()[0] == verdict


def test_what_fits_needs_no_advice() -> None:
    assert "to try" not in text_of(ROOMY, width=100)


def advice_for(estimate: Estimate = ESTIMATE, **at_peak: int) -> str:
    held = dict.fromkeys(ESTIMATE.at_peak, 0) | {name: gib * GIB for name, gib in at_peak.items()}
    return text_of(dataclasses.replace(estimate, at_peak=held), width=160).partition("to try:  ")[2].partition("\n")[0]


def test_advice_follows_what_is_held() -> None:
    assert advice_for(activations=8, parameters=2) == "a smaller batch, gradient checkpointing"
    assert advice_for(temporaries=4, parameters=6) == "a smaller batch"
    # Logits are not in a block that is recomputed.
    logits = SiteAtPeak(
        category="activations", module="", operator="", line="a.py:1", num_storages=1, num_bytes=7 * GIB
    )
    of_a_loss = dataclasses.replace(ESTIMATE, allocation_sites=(logits,))
    assert advice_for(of_a_loss, activations=8, parameters=2) == "a smaller batch"
    assert advice_for(activations=1, parameters=9).startswith("smaller weights, LoRA or an optimizer with less state")
    assert advice_for(cache=3, parameters=7).startswith("the allocator setting expandable_segments:True")


def test_equal_assumptions_are_said_once_with_their_places() -> None:
    places = tuple(Assumption(where=f"train.py:{line}", what="assumed to be 1.0") for line in (3, 5, 7, 9))
    many = tuple(Assumption(where="", what=f"assumption {i}") for i in range(9))
    text = text_of(dataclasses.replace(ESTIMATE, assumptions=places + many), width=100)
    assert section(text, "assumptions")[0] == "- assumed to be 1.0 (train.py:3, train.py:5 and 2 more places)"
    assert section(text, "assumptions")[-1] == "- and 2 more (--json lists all)"


def test_markup_in_the_users_names_is_text() -> None:
    odd = dataclasses.replace(ESTIMATE, target="[red]train[/].py")
    assert "[red]train[/].py on NVIDIA" in text_of(odd, width=100)


def test_a_terminal_without_unicode_gets_bars_of_ascii() -> None:
    text = text_of(ESTIMATE, width=100, encoding="ascii")
    assert "activations       5.00 GiB  49%  ####" in text
    assert "█" not in text


@given(share=st.floats(0, 1), cells=st.integers(1, 60))
def test_a_bar_shows_something_and_never_more_than_its_cells(share: float, cells: int) -> None:
    for drawn in (bar(share, cells), bar(share, cells, is_ascii=True)):
        assert 1 <= len(drawn) <= cells


def test_an_empty_run_costs_its_context() -> None:
    empty = dataclasses.replace(
        ROOMY,
        at_peak={"context": 150 * MIB},
        moment=PeakMoment(span="", phase="other", operator="", module="", line=""),
        allocation_sites=(),
        spans=(),
        band=(),
        assumptions=(),
        seconds_per_step=0.0,
    )
    text = text_of(empty, width=100)
    assert "top allocation" not in text
    assert "step by step" not in text
    assert "assumptions" not in text
    assert "time per step" not in text


def test_several_cards_are_rows_in_the_order_given() -> None:
    console = Console(file=io.StringIO(), width=120, highlight=False)
    console.print(ComparisonText([ROOMY, ESTIMATE, TIGHT]))
    assert isinstance(console.file, io.StringIO)
    rows = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert rows[0] == "train.py"
    assert rows[3:6] == [
        "GeForce RTX 4090 fits 24.00 GiB 10.15 GiB 10.10 GiB 10.24 GiB 13.85 GiB 250.0 ms",
        "GeForce RTX 4060 does not fit 8.00 GiB 10.15 GiB 10.10 GiB 10.24 GiB −2.15 GiB 250.0 ms",
        "GeForce RTX 4060 fits without margin 10.20 GiB 10.15 GiB 10.10 GiB 10.24 GiB 50.0 MiB 250.0 ms",
    ]
    assert rows.count("- a value read back from the GPU is assumed to be 1.0 (train.py:44)") == 1


def test_several_cards_fit_a_narrow_terminal_without_their_ranges() -> None:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    console.print(ComparisonText([ROOMY, dataclasses.replace(ESTIMATE, device="NVIDIA RTX 6000 Ada Generation")]))
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    assert lines[2].split() == ["GPU", "capacity", "peak", "left", "time", "per", "step"]
    assert lines[4].startswith("RTX 600")
    assert lines[4].endswith("does not fit   8.00 GiB  10.15 GiB  −2.15 GiB       250.0 ms")


def test_the_command_writes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    write_estimate(ESTIMATE, elapsed_seconds=1.5)
    write_comparison([ESTIMATE, ROOMY], elapsed_seconds=1.5)
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.startswith("does not fit: 2.15 GiB too much\n")
    assert "\x1b" not in captured.out


def test_a_stdout_that_cannot_write_a_character_gets_another(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", stdout)
    write_estimate(dataclasses.replace(ESTIMATE, target="訓練.py"), elapsed_seconds=1.5)
    stdout.seek(0)
    assert "??.py on NVIDIA GeForce RTX 4060" in stdout.read()


class TestAnEstimateShowsItself:
    def test_in_a_few_sentences(self) -> None:
        assert ESTIMATE.explain().splitlines() == [
            "train.py does not fit on NVIDIA GeForce RTX 4060 (2.15 GiB too much).",
            "Its peak is 10.15 GiB of 8.00 GiB, between 10.10 GiB and 10.24 GiB, "
            "in step 2 (backward, Net.head, project/train.py:41).",
            "Largest: activations 5.00 GiB, optimizer state 2.00 GiB, parameters 1.00 GiB.",
            "To try: a smaller batch, gradient checkpointing.",
        ]
        assert "To try" not in ROOMY.explain()

    def test_with_rich(self) -> None:
        console = Console(file=io.StringIO(), width=120)
        console.print(ESTIMATE)
        assert isinstance(console.file, io.StringIO)
        assert console.file.getvalue().startswith("does not fit: 2.15 GiB too much")

    def test_in_a_notebook_as_html_that_holds_no_markup_of_the_user(self) -> None:
        html = dataclasses.replace(ESTIMATE, target="<script>.py")._repr_html_()
        assert html.startswith("<div style=")
        assert "does not fit" in html
        assert "<script>" not in html


class TestShortening:
    @pytest.mark.parametrize(
        ("width", "short"),
        [
            (40, "GPT.transformer.h.*.mlp.act"),
            (26, "….transformer.h.*.mlp.act"),
            (14, "….h.*.mlp.act"),
            (8, "….act"),
            (2, "…t"),
        ],
    )
    def test_a_module_keeps_its_end(self, width: int, short: str) -> None:
        assert shorten_module("GPT.transformer.h.*.mlp.act", width) == short

    def test_a_place_keeps_its_file_and_line(self) -> None:
        assert shorten_place("a/long/folder/train.py:41", 20) == "…/folder/train.py:41"
        assert shorten_place("a/long/folder/train.py:41", 13) == "…/train.py:41"
        assert shorten_place("a/long/folder/train.py:41", 11) == "train.py:41"

    @given(text=st.text(alphabet="ab./:*", max_size=40), width=st.integers(1, 45))
    def test_never_wider_than_asked_and_whole_if_it_fits(self, text: str, width: int) -> None:
        for shorten in (shorten_middle, shorten_module, shorten_place):
            short = shorten(text, width)
            assert len(short) <= width
            assert (short == text) == (len(text) <= width)

    def test_columns_give_way_in_their_order_and_not_below_their_least(self) -> None:
        columns = (
            Column(heading="fixed"),
            Column(heading="first", shorten=shorten_middle, least_width=6, yields=2),
            Column(heading="second", shorten=shorten_middle, least_width=5, yields=1),
        )
        rows = [("12345", "1234567890", "1234567890")]
        assert fit_widths(columns, rows, 29) == [5, 10, 10]
        assert fit_widths(columns, rows, 27) == [5, 8, 10]
        assert fit_widths(columns, rows, 22) == [5, 6, 7]
        assert fit_widths(columns, rows, 10) == [5, 6, 6]

    def test_what_a_cut_at_a_dot_frees_is_for_a_column_that_wraps(self) -> None:
        columns = [
            Column(heading="where", shorten=shorten_module, least_width=8, yields=1),
            Column(heading="settings", least_width=10, yields=2, wraps=True),
        ]
        rows = [("TransformerEncoder.layers", "4 chunks, in the forward pass")]
        # Within 35 the name is cut to `….layers`, and the settings take what is left.
        assert fit_widths(columns, rows, 35) == [8, 25]
        assert fit_widths(columns, rows, 80) == [25, 29]

    def test_names_in_texts_that_wrap_are_broken_only_where_nothing_else_gives_way(self) -> None:
        columns = [
            Column(heading="where", shorten=shorten_module, least_width=8, yields=1),
            Column(heading="settings", least_width=10, yields=2, wraps=True),
        ]
        rows = [("Net.h.1.mlp.down", "keeps `mlp.gate_proj.out`")]
        assert fit_widths(columns, rows, 37) == [16, 19]
        assert fit_widths(columns, rows, 31) == [10, 19]
        assert fit_widths(columns, rows, 25) == [6, 17]


@pytest.mark.parametrize("width", [40, 60, 120])
def test_figures_are_whole_in_a_narrow_terminal_and_bars_are_left_out(width: int) -> None:
    table = category_table(
        {"parameters": 440 << 20, "workspace": 8 << 20, "context": 16}, 448 << 20, width, is_ascii=False
    )
    output = io.StringIO()
    Console(file=output, width=width).print(table)
    assert "440.0 MiB" in output.getvalue() and "98%" in output.getvalue() and "…" not in output.getvalue()
    assert ("█" in output.getvalue()) == (width > 40)


COLUMNS = [Column(heading=""), Column(heading="memory", is_number=True), Column(heading="settings")]
ROWS = [("checkpointing", "−1.0 GiB", "keeps `attn`"), ("optimizer_kernel", "", "fused=True")]


def printed(width: int) -> list[str]:
    file = io.StringIO()
    Console(file=file, width=width, highlight=False).print(fitted(COLUMNS, ROWS, width, title="techniques"))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_columns_that_do_not_fit_beside_each_other_are_not_cut() -> None:
    heading, _, first, _ = printed(40)
    assert (heading, first.split()) == ("techniques", ["checkpointing", "−1.0", "GiB", "keeps", "`attn`"])
    assert printed(32) == [
        "techniques",
        "checkpointing",
        "  memory −1.0 GiB; settings",
        "  keeps `attn`",
        "optimizer_kernel",
        "  settings fused=True",
    ]
    assert all(word in " ".join(printed(20)) for word in ("checkpointing", "−1.0", "fused=True"))
