// The tokens of a text as they are shown in it: a character cut into several tokens stands at the first.

import type { Token } from "../ask";
import { visible } from "../next/tokens";
import { decoded, lengthOf } from "../utf8";

/** Stands for the rest of a character that an earlier token began. */
export const REST = "·";

export interface Spelled {
  readonly shown: string;
  /** How many lines end in it. */
  readonly breaks: number;
}

export function spell(tokens: readonly Token[]): Spelled[] {
  const parts = tokens.map(() => "");
  const bytes = tokens.flatMap((token, at) => token.bytes.map((byte) => ({ byte, at })));
  const add = (at: number, c: string): void => void (parts[at] += c);
  for (let i = 0; i < bytes.length; ) {
    const { byte, at } = bytes[i] as { byte: number; at: number };
    const length = lengthOf(byte);
    const c = decoded(bytes.slice(i, i + length).map((entry) => entry.byte));
    add(at, c === undefined ? `⟨${byte.toString(16).toUpperCase().padStart(2, "0")}⟩` : readable(c));
    const end = i + (c === undefined ? 1 : length);
    for (; ++i < end; ) {
      const other = bytes[i]?.at ?? at;
      if (other !== at && !parts[other]) add(other, REST);
    }
  }
  return tokens.map((token, at) => {
    const shown = token.bytes.length ? (parts[at] ?? "") : visible(token.text);
    return { shown: /^ +$/.test(shown) ? visible(shown) : shown, breaks: token.bytes.filter((byte) => byte === 10).length };
  });
}

/** A space stays one; what cannot be seen is shown by its number. */
function readable(c: string): string {
  return c === " " ? c : visible(c);
}

/** The text of tokens; undefined where they are none, e.g. end inside a character. */
export function textOf(tokens: readonly Token[]): string | undefined {
  return decoded(tokens.flatMap((token) => [...token.bytes]));
}
