"""Models behind the built page, and what a page saves: for tests of pages that need a model."""

from pathlib import Path

from llama2c_files import (
    random_weights,
    tiny_model,
    vocabulary,
    write_checkpoint,
    write_vocabulary,
)
from playwright.sync_api import Page

from lmhead.models import LanguageModel, load_llama2c

HOSTILE = ["<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", "\u202egnp", "{n}"]
FORMULA = "=cmd|'/c calc'!A1"
# A text gets a token of its own only where each merge on the way to it is a token too.
ELEMENT = "<img>"
STEPS = [*"<img>", "<i", "<im", "<img", ELEMENT]


def site_models(folder: Path) -> tuple[dict[str, LanguageModel], dict[str, str]]:
    """A tiny model, one whose tokens are markup and formulas, and their files."""
    models, given = {}, {}
    for name, tokens in (("tiny", None), ("hostile", [" ", "a", "b", *HOSTILE, FORMULA, *STEPS])):
        place = folder / name
        place.mkdir()
        if tokens is None:
            models[name] = tiny_model(place)
        else:
            write_vocabulary(place / "tok300.bin", vocabulary(tokens))
            models[name] = load_llama2c(write_checkpoint(place / "tiny.bin", random_weights(3)))
        given[name] = str(place / "tiny.bin")
    return models, given


def saved(page: Page, kind: str) -> Path:
    """The file that a button of the exports gives."""
    with page.expect_download() as download:
        page.locator(f'[data-export="{kind}"]').click()
    assert download.value.suggested_filename.endswith(f".{kind}")
    return Path(download.value.path())
