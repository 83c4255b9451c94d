"""Open a page in headless Chromium, let a script act as a reader would, see what is there.

The script runs in a copy of the page when it is complete; what it returns comes back as JSON.
"""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
MISSING = "needs Chromium: apt-get install chromium"
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--enable-logging=stderr"),
)

_PROBE = """
<script>
"use strict";
{
  const act = () => {
SCRIPT
  };
  let result = null;
  try { result = act(); } catch (error) { console.error(error); }
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify(result);
  parent.document.body.append(out);
}
</script>
"""


_NARROWEST = 500  # pixels of a window; a frame may be narrower


def look(
    html: str, script: str, folder: Path, *flags: str, size: tuple[int, int] = (1440, 1000)
) -> tuple[Any, list[str]]:
    """Return what the script returned, and what the browser's console said.

    Args:
        html: the page.
        script: the body of a function; it runs at once, before the browser draws a frame.
        folder: for the copy of the page and the browser's profile.
        flags: more of Chromium's, such as ``--force-dark-mode``.
        size: of what the page is shown in, in pixels.
    """
    assert CHROMIUM is not None
    path = folder / "page.html"
    text = html.replace("</body>", _PROBE.replace("SCRIPT", script) + "</body>")
    if size[0] < _NARROWEST:
        box = f'width="{size[0]}" height="{size[1]}" style="border:0"'
        text = f'<!doctype html><body><iframe {box} srcdoc="{escape(text)}"></iframe></body>'
    path.write_text(text)
    done = subprocess.run(
        [
            *(CHROMIUM, *_FLAGS, *flags, f"--user-data-dir={folder / 'profile'}"),
            *(f"--window-size={size[0]},{size[1]}", "--dump-dom", path.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return json.loads(unescape(found[1])), console
