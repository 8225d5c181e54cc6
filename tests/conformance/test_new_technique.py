"""The technique of the tutorial works as it is printed: a package with that one file and an entry point passes the suite that all techniques pass."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-it-works" / "new-technique.md"


def test_the_technique_of_the_tutorial_passes_the_conformance_suite(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "channels_last.py").write_text(code)
    information = tmp_path / "tutorial-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: tutorial\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[tightfit.techniques]\nchannels_last = channels_last:ChannelsLast\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    suite = [str(ROOT / "tests" / "conformance" / "test_techniques.py"), "-k", "channels_last"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *suite],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "CONFORMANCE_MODELS": "llama,convolutions",
            # All that it has, and not what has its turn.
            "TIGHTFIT_COMMIT": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    # It is lossy, so it need not train the same; all else is tried, and that it changes no bytes, as it promises none.
    assert re.search(r"[34] passed", done.stdout), done.stdout[-3000:]
