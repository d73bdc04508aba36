// How tokens are shown in a text: a character that takes several tokens is shown at the first.

import type { Token } from "../api";
import { visible } from "../ui/tokenText";
import { decoded, lengthOf } from "../utf8";

export interface Spelled {
  /** The remaining bytes of a character that started in an earlier token: ⟨BD⟩⟨A0⟩. */
  readonly rest: string;
  /** The characters that start in this token. */
  readonly own: string;
  /** Both. */
  readonly shown: string;
  /** The number of line ends in it. */
  readonly breaks: number;
}

export function spell(tokens: readonly Token[]): Spelled[] {
  const parts = tokens.map(() => ({ rest: "", own: "" }));
  const bytes = tokens.flatMap((token, at) =>
    token.bytes.map((byte) => ({ byte, part: parts[at] as { rest: string; own: string } })),
  );
  for (let i = 0; i < bytes.length;) {
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

/** Keep spaces; show invisible characters by code point. */
function readable(c: string): string {
  return c === " " ? c : visible(c);
}

/** The text of tokens; undefined if they are not valid UTF-8, e.g. end inside a character. */
export function textOf(tokens: readonly Token[]): string | undefined {
  return decoded(tokens.flatMap((token) => [...token.bytes]));
}
