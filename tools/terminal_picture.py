"""Draws what `tightfit estimate` prints as an SVG, from a real run, for the README.

python tools/terminal_picture.py docs/images/estimate.svg examples/train_gpt2.py "RTX 4060"
"""

import io
import sys
import time

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

import tightfit
from tightfit.reports.text.estimates import EstimateText

WIDTH = 120
THEME = TerminalTheme(
    (16, 20, 28),
    (205, 211, 222),
    [
        *((90, 98, 112), (236, 95, 103), (153, 199, 148), (250, 200, 99)),
        *((102, 153, 204), (197, 148, 197), (95, 179, 179), (205, 211, 222)),
    ],
    [
        *((110, 118, 132), (255, 115, 123), (173, 219, 168), (255, 220, 119)),
        *((122, 173, 224), (217, 168, 217), (115, 199, 199), (255, 255, 255)),
    ],
)
# Fonts of the reader's own machine: a picture in a README may not load any.
SVG = """\
<svg class="{unique_id}" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def main(path: str, target: str, device: str) -> None:
    """Estimates `target` on `device` and draws the answer."""
    started = time.monotonic()
    found = tightfit.estimate(target, device)
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor", highlight=False
    )
    console.print(Text.assemble(("$ ", "green"), f'tightfit estimate {target} --device "{device}"'))
    console.print(EstimateText(found, elapsed_seconds=time.monotonic() - started))
    console.save_svg(path, title="", theme=THEME, code_format=SVG, unique_id="terminal")


if __name__ == "__main__":
    main(*sys.argv[1:])
