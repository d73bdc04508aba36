"""Text from bytes: whole characters only, and nothing of a stop string, wherever tokens end."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmhead.sampling.text import TextStream, bytes_after, bytes_of


def cut(data: bytes, places: list[int]) -> list[bytes]:
    borders = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(borders)]


def shown(stream: TextStream, pieces: list[bytes]) -> str:
    text = ""
    for piece in pieces:
        text += stream.push(piece)
        if stream.stopped_by is not None:
            return text
    return text + stream.finish()


def by_character(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text up to the first stop string to be complete, the longest of several."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


# Bytes that are often the beginning of something: characters of 1 to 4 bytes, and broken ones.
BYTES = st.lists(
    st.sampled_from([b"a", b"b", b"\xc3\xa9", b"\xe4\xbd\xa0", b"\xf0\x9f\x99\x82"])
    | st.sampled_from([b"\xe4", b"\xbd", b"\xf0\x9f", b"\xff", b"\xed\xa0\x80", b"\xc0\x80"]),
    max_size=12,
).map(b"".join)
PLACES = st.lists(st.integers(0, 100), max_size=12)


@given(BYTES, PLACES)
def test_pieces_make_the_whole_text_wherever_they_end(data: bytes, places: list[int]) -> None:
    assert shown(TextStream(), cut(data, places)) == data.decode("utf-8", "replace")


@given(st.text("ab你", max_size=12), PLACES)
def test_a_character_comes_out_with_its_last_byte(text: str, places: list[int]) -> None:
    stream, seen, data = TextStream(), "", b""
    for piece in cut(text.encode(), places):
        seen, data = seen + stream.push(piece), data + piece
        assert seen == data.decode("utf-8", "ignore")  # all that is complete, nothing broken
    assert stream.finish() == ""


@settings(max_examples=300)
@given(
    st.text("ab你", max_size=14),
    st.lists(st.text("ab你", min_size=1, max_size=4), min_size=1, max_size=3),
    PLACES,
)
def test_stop_strings_are_found_across_pieces(
    text: str, stops: list[str], places: list[int]
) -> None:
    stream = TextStream(stops)
    expected, stop = by_character(text, stops)
    assert shown(stream, cut(text.encode(), places)) == expected
    assert stream.stopped_by == stop


@given(st.text("ab", max_size=10), st.text("ab", min_size=1, max_size=4))
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stop: str) -> None:
    _, found = by_character(text, [stop])
    if found:
        return
    stream = TextStream([stop])
    seen = "".join(stream.push(character.encode()) for character in text)
    held = text[len(seen) :]
    assert stop.startswith(held)
    longer = [n for n in range(len(held) + 1, len(stop)) if text.endswith(stop[:n])]
    assert not longer
    assert stream.finish() == held


def test_broken_bytes_wait_only_as_long_as_they_can_be_completed() -> None:
    stream = TextStream()
    assert stream.push(b"\xf0\x9f") == ""
    assert stream.push(b"\x99") == ""
    assert stream.push(b"a") == "\ufffda"
    assert stream.push(b"\xff") == "\ufffd"
    assert stream.push(b"\xe4\xbd") == ""
    assert stream.finish() == "\ufffd"


def test_after_a_stop_string_nothing_comes_out() -> None:
    stream = TextStream(["b"])
    assert stream.push(b"ab a") == "a"
    assert (stream.push(b"a"), stream.finish(), stream.stopped_by) == ("", "", "b")


def test_a_character_begun_before_the_text() -> None:
    stream = TextStream(before=b"a\xe4\xbd")
    assert stream.push(b"\xa0b") == "你b"
    # As long as nothing is added to it, it is not ours.
    stream = TextStream(before=b"a\xe4\xbd")
    assert (stream.push(b""), stream.finish()) == ("", "")
    stream = TextStream(before=b"a\xe4\xbd")
    assert (stream.push(b"b"), stream.finish()) == ("\ufffdb", "")


class Spaced:
    """Drops the space at the beginning, as tokenizers of the Llama family do."""

    def encode(self, text: str) -> list[int]:
        return [len(word) for word in text.split()]

    def token_bytes(self, id: int) -> bytes:
        return b" " + b"x" * id

    def bytes_after(self, previous: int | None, id: int) -> bytes:
        return self.token_bytes(id)[previous is None :]


class Plain:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_bytes(self, id: int) -> bytes:
        return bytes([id])


@pytest.mark.parametrize(("tokenizer", "first"), [(Spaced(), b"xx"), (Plain(), b"\2")])
def test_a_tokenizer_may_look_at_the_token_before(tokenizer: Spaced, first: bytes) -> None:
    assert bytes_after(tokenizer, None, 2) == first
    assert bytes_after(tokenizer, 1, 2) == tokenizer.token_bytes(2)
    assert bytes_of(tokenizer, [2, 3]) == first + tokenizer.token_bytes(3)
