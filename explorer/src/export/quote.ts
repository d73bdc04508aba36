// Values as a shell and as Python read them, so that a copied line runs as it stands.

import { py } from "../ui/format";

// A terminal would obey these when a line is pasted, or show it in another order than it is run.
const UNSEEN = /[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/;
const ALL_UNSEEN = new RegExp(UNSEEN, "g");

/** One word of a POSIX shell's line; what cannot be seen is written in octal, in $'...'. */
export function shell(text: string): string {
  if (text !== "" && /^[\w@%+=:,./-]+$/.test(text)) return text;
  if (!UNSEEN.test(text)) return `'${text.replaceAll("'", "'\\''")}'`;
  const seen = text.replace(/[\\']/g, "\\$&").replace(ALL_UNSEEN, (c) => NAMED[c] ?? octal(c));
  return `$'${seen}'`;
}

const NAMED: Record<string, string> = { "\n": "\\n", "\t": "\\t", "\r": "\\r" };

function octal(c: string): string {
  return [...new TextEncoder().encode(c)].map((byte) => `\\${byte.toString(8).padStart(3, "0")}`).join("");
}

/** Whether a text can be a word of a shell's line at all. */
export function speakable(text: string): boolean {
  return !text.includes("\0");
}

/** A line of a shell that gives `text` to `lmhead COMMAND MODEL` as its last argument. */
export function commandLine(command: string, model: string, text: string, options: readonly string[]): string {
  const words = (...last: string[]): string => ["lmhead", command, shell(model), ...options, ...last].join(" ");
  if (text === "-") return `printf %s - | ${words("-")}`; // alone, it would stand for standard input
  return text.startsWith("-") ? words("--", shell(text)) : words(shell(text));
}

/** A string of Python. */
export function pyText(text: string): string {
  return JSON.stringify(text).replace(ALL_UNSEEN, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** Arguments by name: `temperature=0.8, order="hf"`; a float is written as one. */
export function pyOptions(options: Readonly<Record<string, string | number>>, wholes: readonly string[]): string {
  return Object.entries(options)
    .map(([name, value]) => `${name}=${typeof value === "string" ? pyText(value) : wholes.includes(name) ? value : py(value)}`)
    .join(", ");
}
