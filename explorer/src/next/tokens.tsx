// Tokens as text that can be seen: hostile or invisible, always as text nodes.

import type { JSX } from "preact";

const NAMED: Record<string, string> = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };

/** Spaces, line ends and characters without a shape, made visible. */
export function visible(text: string): string {
  const shown = [...text].map((c) => NAMED[c] ?? (/[\p{C}\p{Z}]/u.test(c) ? `⟨${hex(c)}⟩` : c)).join("");
  return shown === "" ? "∅" : shown;
}

function hex(c: string): string {
  return (c.codePointAt(0) ?? 0).toString(16).toUpperCase().padStart(4, "0");
}

export function TokenText({ text }: { text: string }): JSX.Element {
  return <bdi class="token">{visible(text)}</bdi>;
}
