// Tokens as text that can be seen: hostile or invisible, always as text nodes.
//
// A token may be a part of a character. The server gives its bytes as the code points from U+DC80
// on, as Python's "surrogateescape" does, so that tokens side by side make whole characters again.

import type { JSX } from "preact";

const NAMED: Record<string, string> = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };
const BYTES = /[\udc80-\udcff]/u; // alone, not as the second half of a character

/** Spaces, line ends and characters without a shape, made visible. */
export function visible(text: string): string {
  const shown = [...text].map((c) => NAMED[c] ?? (/[\p{C}\p{Z}]/u.test(c) ? `⟨${hex(c)}⟩` : c)).join("");
  return shown === "" ? "∅" : shown;
}

function hex(c: string): string {
  const code = c.codePointAt(0) ?? 0;
  if (BYTES.test(c)) return (code - 0xdc00).toString(16).toUpperCase();
  return code.toString(16).toUpperCase().padStart(4, "0");
}

/** The text of several tokens; bytes that make a character together become that character. */
export function joined(texts: readonly string[]): string {
  const text = texts.join("");
  if (!BYTES.test(text)) return text;
  const bytes = [...text].flatMap((c) =>
    BYTES.test(c) ? [(c.codePointAt(0) ?? 0) - 0xdc00] : [...new TextEncoder().encode(c)],
  );
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(new Uint8Array(bytes));
}

/** The end of a text as a name: one line, no more than so many characters. */
export function ending(text: string, most = 26): string {
  const line = [...text.replace(/\s+/g, " ").trim()].map((c) => (c === " " ? c : visible(c)));
  return line.length > most ? `…${line.slice(1 - most).join("")}` : line.join("");
}

export function TokenText({ text }: { text: string }): JSX.Element {
  return <bdi class="token">{visible(text)}</bdi>;
}
