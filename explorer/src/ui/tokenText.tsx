// Show tokens as text: invisible characters are made visible, markup is never interpreted.
//
// A token may be a part of a character. Its bytes are code points from U+DC80, as in Python's
// "surrogateescape", so that adjacent tokens can be joined to characters.

import type { JSX } from "preact";

/** Tokens of at most this number of characters are not broken into two lines. */
const ONE_LINE = 12;

const NAMED: Record<string, string> = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };
const BYTES = /[\udc80-\udcff]/u; // alone, not as the second half of a character

// An emoji made of several code points is one unit; everything else is one code point.
const UNITS =
  /\p{Extended_Pictographic}(?:\ufe0f|[\u{1f3fb}-\u{1f3ff}]|\u200d\p{Extended_Pictographic})*|[\u{1f1e6}-\u{1f1ff}]{2}|[^]/gu;

// Control characters and separators, and signs without a picture of their own: joiners, variation selectors, fillers.
const UNSEEN = /^[\p{C}\p{Z}\p{Default_Ignorable_Code_Point}\u2800]/u;

/** Make spaces, line ends and invisible characters visible. */
export function visible(text: string): string {
  const shown = (text.match(UNITS) ?? []).map((c) => NAMED[c] ?? (UNSEEN.test(c) ? `⟨${hex(c)}⟩` : c)).join("");
  return shown === "" ? "∅" : shown;
}

function hex(c: string): string {
  const code = c.codePointAt(0) ?? 0;
  if (BYTES.test(c)) return (code - 0xdc00).toString(16).toUpperCase();
  return code.toString(16).toUpperCase().padStart(4, "0");
}

/** Join the texts of tokens; bytes of one character become that character. */
export function joined(texts: readonly string[]): string {
  const text = texts.join("");
  if (!BYTES.test(text)) return text;
  const bytes = [...text].flatMap((c) =>
    BYTES.test(c) ? [(c.codePointAt(0) ?? 0) - 0xdc00] : [...new TextEncoder().encode(c)],
  );
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(new Uint8Array(bytes));
}

/** The end of a text in one line of at most `width` characters. */
export function ending(text: string, width = 26): string {
  const line = [...text.replace(/\s+/g, " ").trim()].map((c) => (c === " " ? c : visible(c)));
  return line.length > width ? `…${line.slice(1 - width).join("")}` : line.join("");
}

export function TokenText({ text }: { text: string }): JSX.Element {
  const shown = visible(text);
  return <bdi class={shown.length > ONE_LINE ? "token" : "token short"}>{shown}</bdi>;
}
