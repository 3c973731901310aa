"""Draw reports/example.png, the first screen of a run's report: `python -m tests.docs.picture RUN`.

The picture is stamped with a digest of the first screen of a fixed run, words and styles: a test
compares it with today's.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from auditor.conclusions import secret_details
from auditor.records.result_file import read_result
from auditor.reports import html
from tests.reports.conftest import lab_run
from tests.reports.test_print import lab_of_readme

PICTURE = Path(__file__).parents[2] / "reports" / "example.png"
STAMP = "first-screen"
_SIZE = "1200,1000"  # pixels


def compute_first_screen_digest() -> str:
    """Return the digest of all that is above the limits of a good result, and of the styles."""
    page = html.render_html_report(lab_of_readme(lab_run()))
    first_screen = page[: page.index('<section id="limits"')]
    return hashlib.sha256(first_screen.encode()).hexdigest()


def draw_picture(run: Path) -> None:
    """Write the picture of the run's report as a browser shows it."""
    chromium = shutil.which("chromium") or "google-chrome"
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        details = secret_details.read_secret_details(run)
        page.write_text(html.render_html_report(read_result(run), details), encoding="utf-8")
        drawn = Path(folder) / "drawn.png"
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
        command = [chromium, *flags, f"--window-size={_SIZE}", f"--screenshot={drawn}"]
        subprocess.run([*command, page.as_uri()], check=True, capture_output=True)
        stamp = PngInfo()
        stamp.add_text(STAMP, compute_first_screen_digest())
        flat = Image.open(drawn).convert("RGB").quantize(dither=Image.Dither.NONE)
        flat.save(PICTURE, pnginfo=stamp, optimize=True)


if __name__ == "__main__":
    draw_picture(Path(sys.argv[1]))
