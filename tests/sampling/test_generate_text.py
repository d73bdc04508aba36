"""Generation as text: where it stops, what may be shown when, and what an interruption leaves."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmhead.sampling.events import Generation, TokenEvent
from lmhead.sampling.generation import generate, stream_generate


class Letters:
    """Ids are bytes."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < 256 else b"<end>"


@dataclass
class Texts:
    """A cache that is the text of every row."""

    rows: list[list[int]]

    def select(self, rows: Tensor) -> "Texts":
        assert rows.dtype == torch.int64
        return Texts([self.rows[row] for row in rows])


def parrot(*texts: bytes, eos: Sequence[int] = (256,)) -> Any:
    """A model that goes on from a prompt as one of the texts does, and then says 256."""

    def body(ids: Tensor, cache: Texts | None, mask: Tensor) -> tuple[Tensor, Texts]:
        if cache is None:
            rows = [row[real].tolist() for row, real in zip(ids, mask, strict=True)]
        else:
            rows = [[*old, *new] for old, new in zip(cache.rows, ids.tolist(), strict=True)]
        assert mask.sum(-1).tolist() == [len(row) for row in rows]
        hidden = torch.tensor([next_token(row) for row in rows])
        return hidden[:, None, None].expand(-1, ids.shape[1], -1), Texts(rows)

    def next_token(row: list[int]) -> int:
        (text,) = {text for text in texts if [*text[: len(row)]] == row}
        return text[len(row)] if len(row) < len(text) else 256

    def head(hidden: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(hidden[:, 0], 257).double() * 50

    return SimpleNamespace(body=body, head=head, eos_token_ids=tuple(eos), tokenizer=Letters())


def generate_bytes(text: bytes, prompt: str = "p", **options: Any) -> Generation:
    return generate(parrot(prompt.encode() + text), prompt, **({"max_new_tokens": 50} | options))


def test_eos_ends_a_text_and_is_not_in_it() -> None:
    made = generate_bytes(b"hello")
    assert (made.text, made.finish_reason) == ("hello", "eos")
    assert made.tokens == [*b"hello", 256]
    assert made.stopped_by is None


def test_eos_can_be_changed() -> None:
    assert generate_bytes(b"hello", eos_token_ids=[ord("l")]).text == "he"
    model = parrot(b"phi", eos=(ord("h"),))
    assert generate(model, "p", max_new_tokens=3, eos_token_ids=()).text == "hi<end>"


@pytest.mark.parametrize("count", [0, 1, 3])
def test_length_ends_a_text(count: int) -> None:
    made = generate_bytes(b"hello", max_new_tokens=count)
    assert (made.text, made.finish_reason) == ("hello"[:count], "length")
    assert len(made.events) == count


@pytest.mark.parametrize(
    ("stop", "text", "by"),
    [
        ("lo", "hel", "lo"),
        ("h", "", "h"),
        (["zz", "l"], "he", "l"),
        (["ello", "ell"], "h", "ell"),  # what is complete first
        (ord("e"), "h", ord("e")),
        (["lo", ord("o")], "hell", ord("o")),  # an id is seen before it is text
        ("nothing", "hello", None),
        (["hello", "oh"], "", "hello"),
    ],
)
def test_stops(stop: Any, text: str, by: Any) -> None:
    made = generate_bytes(b"hello", stop=stop)
    assert (made.text, made.stopped_by) == (text, by)
    assert made.finish_reason == ("eos" if by is None else "stop")


def test_a_stop_string_in_the_prompt_does_not_stop() -> None:
    assert generate_bytes(b"rompt", prompt="p stop p", stop=["stop", "p r"]).text == "rompt"


def test_text_waits_while_it_may_become_a_stop_string() -> None:
    model = parrot(b"pab stab stop it")
    events = list(stream_generate(model, "p", max_new_tokens=50, stop="stop"))
    assert [event.text for event in events] == [
        *["a", "b", " ", "", "", "sta", "b", " ", "", "", "", ""]
    ]
    assert [event.finish_reason for event in events] == [None] * 11 + ["stop"]


@pytest.mark.parametrize("end", ["eos", "length", "stop"])
def test_what_waited_comes_out_at_the_end(end: str) -> None:
    options: dict[str, Any] = {"length": {"max_new_tokens": 3}, "stop": {"stop": ["sto!", 256]}}
    events = list(
        stream_generate(
            parrot(b"psto"), "p", **({"max_new_tokens": 9, "stop": "sto!"} | options.get(end, {}))
        )
    )
    assert [event.text for event in events][:2] == ["", ""]
    assert events[-1].text == "sto"
    assert events[-1].finish_reason == end


def test_characters_come_out_whole() -> None:
    events = list(stream_generate(parrot("p你é🙂".encode()), "p", max_new_tokens=50))
    assert [e.text for e in events] == ["", "", "你", "", "é", "", "", "", "🙂", ""]
    cut = generate_bytes("你".encode(), max_new_tokens=2)
    assert cut.text == "\ufffd"
    assert generate_bytes(b"\xe4\xbda\xff").text == "\ufffda\ufffd"
    # A prompt may end in the middle of a character.
    assert generate(parrot("你好".encode()), [0xE4, 0xBD], max_new_tokens=50).text == "你好"
    assert generate(parrot(b"\xe4"), [0xE4], max_new_tokens=0).text == ""
    assert generate(parrot(b"\xe4"), [0xE4], max_new_tokens=9).text == ""


def test_rows_of_text_finish_one_by_one() -> None:
    texts = [b"a short", b"bb much longer", b"ccc stop here", b"dddd"]
    for stop, ends in ((None, ["eos"] * 4), ("stop", ["eos", "eos", "stop", "eos"])):
        made = generate(parrot(*texts), ["a", "bb", "ccc", "dddd"], max_new_tokens=50, stop=stop)
        shown = [" short", " much longer", " " if stop else " stop here", ""]
        assert [row.text for row in made] == shown
        assert [row.finish_reason for row in made] == ends


# --- streaming and interruption -------------------------------------------------------------------


@pytest.mark.parametrize("where", ["body", "head", "stream"])
@pytest.mark.parametrize("step", [0, 1, 5])
def test_an_interruption_keeps_what_was_made(where: str, step: int) -> None:
    text = b"pa sto\xe4\xbd"
    model, calls = parrot(text + b"\xa0 more"), 0

    def interrupting(function: Any) -> Any:
        def call(*given: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == step + 1:
                raise KeyboardInterrupt
            return function(*given)

        return call

    stream = None
    if where == "stream":
        stream = interrupting(lambda event: event)
    else:
        setattr(model, where, interrupting(getattr(model, where)))
    made = generate(model, "p", max_new_tokens=50, stop="stop", stream=stream)
    count = step + (where == "stream")
    assert made.finish_reason == "interrupted"
    assert made.tokens == list(text[1 : 1 + count])
    assert made.text == text[1 : 1 + count].decode(
        "utf-8", "replace"
    )  # "sto" too, which waited for its "p"


def test_an_interruption_leaves_finished_rows_finished() -> None:
    def interrupt(event: TokenEvent) -> None:
        if event.row == 1 and event.token == ord("n"):
            raise KeyboardInterrupt

    model = parrot(b"ab", b"bb long")
    first, second, third = generate(model, ["a", "bb", "a"], max_new_tokens=9, stream=interrupt)
    assert first == replace(third, events=first.events)
    assert (first.text, first.finish_reason) == ("b", "eos")
    assert (second.text, second.finish_reason) == (" lon", "interrupted")


def test_a_state_that_cannot_be_selected_is_refused() -> None:
    def sampler(logits: Tensor, *_: Any, **__: Any) -> Any:
        token = logits.argmax(-1)
        unknown = torch.zeros(len(token))
        return SimpleNamespace(
            token=token, log_prob=unknown, raw_log_prob=unknown, state={"rows": 2}
        )

    model = parrot(b"a", b"bb long")
    with pytest.raises(TypeError, match=r"sampler's state must be .*select\(rows\); got dict"):
        generate(model, ["a", "bb"], sampler, max_new_tokens=3)
