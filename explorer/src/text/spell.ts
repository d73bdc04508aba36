// The tokens of a text as they are shown in it: a character cut into several tokens stands at the first.

import type { Token } from "../ask";
import { visible } from "../next/tokens";
import { decoded, lengthOf } from "../utf8";

export interface Spelled {
  /** The bytes of a character that an earlier token began: ⟨BD⟩⟨A0⟩. */
  readonly rest: string;
  /** What begins in this token: the text reads as all of these in a row. */
  readonly own: string;
  /** Both. */
  readonly shown: string;
  /** How many lines end in it. */
  readonly breaks: number;
}

export function spell(tokens: readonly Token[]): Spelled[] {
  const parts = tokens.map(() => ({ rest: "", own: "" }));
  const bytes = tokens.flatMap((token, at) => token.bytes.map((byte) => ({ byte, part: parts[at] as { rest: string; own: string } })));
  for (let i = 0; i < bytes.length; ) {
    const { byte, part } = bytes[i] as (typeof bytes)[number];
    const length = lengthOf(byte);
    const c = decoded(bytes.slice(i, i + length).map((entry) => entry.byte));
    part.own += c === undefined ? boxed(byte) : readable(c);
    const end = i + (c === undefined ? 1 : length);
    for (const later of bytes.slice(i + 1, end)) if (later.part !== part) later.part.rest += boxed(later.byte);
    i = end;
  }
  return tokens.map((token, at) => {
    const { rest, own: text } = parts[at] ?? { rest: "", own: "" };
    const own = token.bytes.length ? (/^ +$/.test(text) ? visible(text) : text) : visible(token.text);
    return { rest, own, shown: rest + own, breaks: token.bytes.filter((byte) => byte === 10).length };
  });
}

function boxed(byte: number): string {
  return `⟨${byte.toString(16).toUpperCase().padStart(2, "0")}⟩`;
}

/** A space stays one; what cannot be seen is shown by its number. */
function readable(c: string): string {
  return c === " " ? c : visible(c);
}

/** The text of tokens; undefined where they are none, e.g. end inside a character. */
export function textOf(tokens: readonly Token[]): string | undefined {
  return decoded(tokens.flatMap((token) => [...token.bytes]));
}
