// Tables as CSV (RFC 4180), safe for spreadsheets: a token is never read as a formula.

import { FROM_ZERO } from "./reportHeadings";

export type Cell = string | number | boolean | null | undefined;

/** A table with its title and column names. */
export interface Table {
  readonly title: string;
  readonly columns: readonly string[];
  readonly rows: readonly (readonly Cell[])[];
}

// The start of a formula in a spreadsheet, also with full-width signs.
const FORMULA = /^[=+\-@\t\r＝＋－＠]/;
// Columns in nats, where others are in bits.
const NATS = ["entropy", "kl"];
const NUMBER = /^[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?$/i;

export function csvText({ columns, rows }: Pick<Table, "columns" | "rows">): string {
  const heads = columns.map((column) =>
    FROM_ZERO.includes(column) ? `${column}_from_0` : NATS.includes(column) ? `${column}_nats` : column,
  );
  return [heads, ...rows].map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}

function cell(value: Cell): string {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return Number.isFinite(value) ? String(value) : "";
  const text = String(value);
  const safe = FORMULA.test(text) && !NUMBER.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) || safe !== safe.trim() ? `"${safe.replaceAll('"', '""')}"` : safe;
}
