"""What a run says: one line that changes on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io

from lmhead.train.progress import Progress


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Latin(io.StringIO):
    encoding = "latin-1"


def test_plain_lines_without_a_terminal() -> None:
    stream = io.StringIO()
    progress = Progress(10, stream)
    progress.step(1, 3.5, 1234.5, 61.0)
    progress.say("validation")
    progress.step(2, 3.25, 1234.5, 60.0)
    progress.close()
    assert stream.getvalue().splitlines() == [
        "step 1/10   loss 3.5000   1,234 tokens/s   1:01 left",
        "validation",
        "step 2/10   loss 3.2500   1,234 tokens/s   1:00 left",
    ]


def test_a_line_that_changes_on_a_terminal() -> None:
    stream = Terminal()
    progress = Progress(10, stream)
    progress.step(5, 3.5, 1234.5, 61.0)
    progress.step(6, 3.4, 1234.5, 61.0)  # within a tenth of a second: not shown
    progress.say("validation")
    progress.step(10, 3.25, 1234.5, 0.0)  # the last one always is
    progress.close()
    bar = "██████████··········"
    facts = "loss 3.5000   1,234 tokens/s   1:01 left"
    assert stream.getvalue() == (
        f"\r\x1b[2K{bar} 5/10   {facts}"
        "\r\x1b[2Kvalidation\n"
        f"\r\x1b[2K{'█' * 20} 10/10   loss 3.2500   1,234 tokens/s   0:00 left\n"
    )


def test_a_terminal_does_not_obey_sample_text() -> None:
    stream = Terminal()
    Progress(10, stream).sample("a\x1b[2Jb\n猫\x07\r")
    assert stream.getvalue() == "  │ a\ufffd[2Jb\n  │ 猫\ufffd\ufffd\n"


def test_letters_that_a_stream_does_not_know() -> None:
    stream = Latin()
    Progress(10, stream).sample("猫 é")
    assert stream.getvalue() == "  ? ? é\n"
