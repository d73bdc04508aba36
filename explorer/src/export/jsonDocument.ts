// JSON documents as `lmhead COMMAND --json` prints them; infinities and NaN become null.

import type { Model } from "../api";

/** The schema version, see docs/json.md. */
export const SCHEMA = 1;

// Valid in JSON, but control characters for a terminal.
const CONTROLS = /[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;

/** A document as the command `command` would print it. */
export function documentText(command: string, version: string, body: object): string {
  return `${jsonText({ command, schema: SCHEMA, lmhead: version, ...body })}\n`;
}

/** The model entry of a document. */
export function modelJson({ name, vocab_size, hidden_size, max_length, engine }: Model): object {
  return { name, vocab_size, hidden_size, max_length, engine };
}

/** JSON with one entry per line in the outer `lines` levels, compact inside. */
export function jsonText(value: unknown, lines = 2): string {
  return dump(value, lines, "\n").replace(CONTROLS, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

function dump(value: unknown, lines: number, newline: string): string {
  const inner = `${newline}  `;
  const list = (parts: string[]): string => inner + parts.join(`,${inner}`) + newline;
  if (Array.isArray(value)) {
    if (lines && typeof value[0] === "object" && value[0] !== null)
      return `[${list(value.map((entry) => dump(entry, lines - 1, inner)))}]`;
    return `[${value.map((entry) => dump(entry, 0, "")).join(", ")}]`;
  }
  if (typeof value === "object" && value !== null) {
    const parts = Object.entries(value)
      .filter(([, entry]) => entry !== undefined)
      .map(([key, entry]) => `${JSON.stringify(key)}: ${dump(entry, Math.max(lines - 1, 0), inner)}`);
    return lines && parts.length ? `{${list(parts)}}` : `{${parts.join(", ")}}`;
  }
  return JSON.stringify(value) ?? "null"; // infinities and NaN become null
}
