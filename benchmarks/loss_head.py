"""The memory of a loss head, whole and in chunks, on the virtual GPU, beside published measurements.

python -m benchmarks.loss_head ROWS.csv[.gz]      the rows of Liger-Kernel's benchmarks (benchmark/data/all_benchmark_data.csv of
https://github.com/linkedin/Liger-Kernel), of which those of `fused_linear_cross_entropy` are taken: a bfloat16 head of width H with V classes for BT
tokens, forward and backward, gradients kept from one time to the next. In chunks both do the same but for one thing: Liger sums the gradient
of the weight in bfloat16, tightfit in float32 (`forward`), or once over all tokens (`backward`).
"""

import argparse
import csv
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from tightfit.fit import estimate
from tightfit.planner.plan import Choice
from tightfit.techniques.loss_head.chunked_loss import ChunkedLoss
from tightfit.techniques.session import Session

_CARD = "A100 80GB"
_MIB = 2**20


class Head(torch.nn.Module):
    """A linear head and its cross-entropy."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, num_classes, bias=False, dtype=torch.bfloat16)

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The mean loss of hidden states `(N, H)` and classes `(N,)`."""
        return torch.nn.functional.cross_entropy(self.linear(hidden), target)


def workload(
    num_tokens: int = 4096,
    width: int = 4096,
    num_classes: int = 128256,
    num_chunks: int = 0,
    gradients_in: str = "forward",
) -> Iterator[None]:
    """Forward and backward passes of `Head`, in chunks if `num_chunks` is given."""
    head = Head(width, num_classes).cuda()
    other = Head(width, num_classes).cuda()  # the measuring program makes the heads of both ways, and runs one
    hidden = torch.randn(num_tokens, width, requires_grad=True, dtype=torch.bfloat16, device="cuda")
    target = torch.randint(num_classes, (num_tokens,), device="cuda")
    if num_chunks:
        settings = {"num_chunks": num_chunks, "gradients_in": gradients_in}
        chosen = Choice(
            technique="chunked_loss",
            where="Head.linear",
            settings=settings,
            saves_bytes=0,
            adds_seconds=0.0,
            exact=True,
        )
        ChunkedLoss().apply(Session(model=head, optimizers=[]), [chosen])
    while True:
        head(hidden, target).backward()
        yield
    del other


def published(path: Path) -> dict[tuple[str, int], tuple[float, int, int]]:
    """Measured MiB, width and classes by provider ("liger", "huggingface") and number of tokens."""
    found = {}
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for row in csv.DictReader(file):
            if row["kernel_name"] == "fused_linear_cross_entropy" and row["metric_name"] == "memory":
                shape = json.loads(row["extra_benchmark_config_str"])
                key = row["kernel_provider"], int(float(row["x_value"]))
                found[key] = float(row["y_value_50"]), shape["H"], shape["V"]
    return found


def chunks_of_liger(num_tokens: int, width: int, num_classes: int) -> int:
    """The number of chunks that Liger-Kernel takes (src/liger_kernel/ops/fused_linear_cross_entropy.py)."""
    factor = -(-num_classes // width)
    size = 1 << (-(-num_tokens // factor) - 1).bit_length()
    return -(-num_tokens // size)


def predicted(**parameters: int | str) -> float:
    """MiB allocated at the peak of `workload` on the virtual GPU."""
    given = [f"{name}={value}" for name, value in parameters.items()]
    return estimate(f"{__file__}:workload", device=_CARD, parameters=given).peak.allocated_bytes / _MIB


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    rows = published(parser.parse_args().rows)
    print(f"{'tokens':>7} {'way':<22}{'measured':>10}{'predicted':>11}{'ratio':>8}")
    for num_tokens in sorted({tokens for _, tokens in rows}):
        whole, width, classes = rows["huggingface", num_tokens]
        liger = rows["liger", num_tokens][0]
        shape = {"num_tokens": num_tokens, "width": width, "num_classes": classes}
        num_chunks = chunks_of_liger(num_tokens, width, classes)
        for way, measured, more in (
            ("whole", whole, {}),
            (f"{num_chunks} chunks, forward", liger, {"num_chunks": num_chunks, "gradients_in": "forward"}),
            (f"{num_chunks} chunks, backward", liger, {"num_chunks": num_chunks, "gradients_in": "backward"}),
        ):
            found = predicted(**shape, **more)
            print(f"{num_tokens:>7} {way:<22}{measured:>10.0f}{found:>11.0f}{found / measured:>8.3f}", flush=True)


if __name__ == "__main__":
    main()
