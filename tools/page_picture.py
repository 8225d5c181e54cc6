"""Takes a picture of a page that `tightfit report` wrote, for the README and the guide, with Debian's Chromium and Pillow.

tightfit report examples/train_gpt2.py --device "RTX 4060" -o gpt2.html
python tools/page_picture.py gpt2.html docs/images/report-lm.png --height 1480 [--dark]
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

# A page of scripts has drawn itself long before; headless Chromium takes the picture when this virtual time is over.
_MILLISECONDS = 4000


def main() -> None:
    """Opens the page in a window of that size and writes what it shows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=1600)
    parser.add_argument("--dark", action="store_true")
    given = parser.parse_args()
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("needs chromium (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory() as profile:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        flags += [f"--window-size={given.width},{given.height}", f"--virtual-time-budget={_MILLISECONDS}"]
        # How Blink is told what a system with a dark theme prefers.
        flags += ["--blink-settings=preferredColorScheme=0"] if given.dark else []
        command = [program, *flags, f"--screenshot={given.picture.resolve()}", given.page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    # A palette makes it a quarter as large, and nobody sees the difference.
    Image.open(given.picture).convert("RGB").quantize(256).save(given.picture, optimize=True)


if __name__ == "__main__":
    main()
