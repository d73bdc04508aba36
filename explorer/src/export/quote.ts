// Quote values for a shell and for Python.

import { py } from "../ui/format";

// Control characters and bidirectional controls, which change what a terminal does or shows.
const INVISIBLE = /[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/;
const ALL_UNSEEN = new RegExp(INVISIBLE, "g");

/** One argument of a POSIX shell; invisible characters are written in octal, in $'...'. */
export function shell(text: string): string {
  if (text !== "" && /^[\w@%+=:,./-]+$/.test(text)) return text;
  if (!INVISIBLE.test(text)) return `'${text.replaceAll("'", "'\\''")}'`;
  const seen = text.replace(/[\\']/g, "\\$&").replace(ALL_UNSEEN, (c) => NAMED[c] ?? octal(c));
  return `$'${seen}'`;
}

const NAMED: Record<string, string> = { "\n": "\\n", "\t": "\\t", "\r": "\\r" };

function octal(c: string): string {
  return [...new TextEncoder().encode(c)].map((byte) => `\\${byte.toString(8).padStart(3, "0")}`).join("");
}

/** Whether a text can be an argument of a shell. */
export function fitsShell(text: string): boolean {
  return !text.includes("\0");
}

/** A shell command with `text` as the last argument of `lmhead COMMAND MODEL`. */
export function commandLine(command: string, model: string, text: string, options: readonly string[]): string {
  const line = (...last: string[]): string => ["lmhead", command, shell(model), ...options, ...last].join(" ");
  if (text === "-") return `printf %s - | ${line("-")}`; // "-" alone means standard input
  return text.startsWith("-") ? line("--", shell(text)) : line(shell(text));
}

/** A Python string literal. */
export function pyText(text: string): string {
  return JSON.stringify(text).replace(ALL_UNSEEN, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** Keyword arguments: `temperature=0.8, order="hf"`; those in `integers` are integers, other numbers floats. */
export function pyOptions(options: Readonly<Record<string, string | number>>, integers: readonly string[]): string {
  return Object.entries(options)
    .map(
      ([name, value]) =>
        `${name}=${typeof value === "string" ? pyText(value) : integers.includes(name) ? value : py(value)}`,
    )
    .join(", ");
}
