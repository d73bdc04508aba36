"""Record the output of `lmhead demo` as a picture: docs/images/demo.svg.

    pip install rich
    python scripts/record_demo.py

The command runs in a terminal of its own, so that it is drawn as a user sees it, colours included.
"""

from __future__ import annotations

import io
import os
import pty
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "demo.svg"
COLUMNS = 80


def main() -> None:
    """Run the demo, draw what it printed."""
    program = shutil.which("lmhead", path=str(Path(sys.executable).parent))
    if program is None:
        raise SystemExit("lmhead is not installed beside this Python")
    os.environ.update(COLUMNS=str(COLUMNS), TERM="xterm-256color")
    output: list[bytes] = []

    def read(terminal: int) -> bytes:
        output.append(os.read(terminal, 65536))
        return output[-1]

    if pty.spawn([program, "demo"], read):
        raise SystemExit("the demo failed")
    lines = b"".join(output).decode().replace("\r\n", "\n").split("\n")
    # What progress wrote over is not part of the picture.
    text = "\n".join(line.rsplit("\x1b[2K", 1)[-1].rsplit("\r", 1)[-1] for line in lines)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi("$ make demo\n" + text.rstrip() + "\n"))
    PICTURE.write_text(console.export_svg(title="lmhead", code_format=_format()))
    print(f"Written: {PICTURE}")


def _format() -> str:
    """Return Rich's SVG template of a terminal, without fonts from other hosts."""
    from rich._export_format import CONSOLE_SVG_FORMAT

    begin, end = CONSOLE_SVG_FORMAT.index("@font-face"), CONSOLE_SVG_FORMAT.rindex("@font-face")
    end = CONSOLE_SVG_FORMAT.index("}}", end) + 2
    return CONSOLE_SVG_FORMAT[:begin] + CONSOLE_SVG_FORMAT[end:]


if __name__ == "__main__":
    main()
