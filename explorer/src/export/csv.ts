// Tables as CSV (RFC 4180), safe to open in a spreadsheet: a token is text there, never a formula.

export type Cell = string | number | boolean | null | undefined;

/** A table of a page: what its columns are called, and its rows. */
export interface Table {
  readonly title: string;
  readonly columns: readonly string[];
  readonly rows: readonly (readonly Cell[])[];
}

// What a spreadsheet takes for the start of a formula, also in the full width of Chinese keyboards.
const FORMULA = /^[=+\-@\t\r＝＋－＠]/;
const NUMBER = /^[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?$/i;

export function csvText({ columns, rows }: Pick<Table, "columns" | "rows">): string {
  return [columns, ...rows].map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}

function cell(value: Cell): string {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return Number.isFinite(value) ? String(value) : "";
  const text = String(value);
  const safe = FORMULA.test(text) && !NUMBER.test(text) ? `'${text}` : text;
  return /[",\r\n]/.test(safe) || safe !== safe.trim() ? `"${safe.replaceAll('"', '""')}"` : safe;
}
