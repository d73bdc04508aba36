// A report as one HTML file: pictures, tables, code, and parts with sliders and numbers under the pointer.
// It loads nothing; its only script is `liveScript`.
//
// Its tables are those of the CSV with translated headings, rounded numbers, and ranks from 1.

import { LANGUAGES } from "../i18n/strings";
import { fixed, grouped } from "../ui/format";
import type { Cell, Table } from "./csv";
import { dataText, liveScript, type Live } from "./live";
import { reportHeadings, type ReportHeadings } from "./reportHeadings";

export interface Report {
  readonly title: string;
  readonly lang: string;
  /** The page's colors, by custom property. */
  readonly colours: Readonly<Record<string, string>>;
  /** Lines with version, date, model, prompt and settings. */
  readonly about: readonly string[];
  /** SVG, made by `svgText`. */
  readonly pictures: readonly string[];
  readonly live?: Live | undefined;
  readonly tables: readonly Table[];
  readonly lines: readonly (readonly [string, string])[];
  readonly foot: string;
}

// Even if markup slipped through, the report may not load anything, or run anything but its own script.
const POLICY = "default-src 'none'; style-src 'unsafe-inline'";
const STYLE = `
body { margin: 0 auto; max-width: 72rem; padding: 2rem 1.25rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.6 system-ui, "Noto Sans", "PingFang SC", "Microsoft YaHei", "Noto Sans CJK SC", sans-serif; }
h1, h2 { line-height: 1.25; font-weight: 600; }
h2 { margin-top: 2.5rem; font-size: 1.25rem; }
.about { margin: 0; color: var(--soft); overflow-wrap: anywhere; }
figure { margin: 1.5rem 0; }
figure > svg { max-width: 100%; height: auto; }
h1:lang(en), h2:lang(en) { text-wrap: balance; }
.wide { overflow-x: auto; }
table { width: max-content; border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9375rem; }
th, td { padding: 0.2rem 1rem 0.2rem 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; }
th { color: var(--soft); font-weight: 400; }
td { max-width: 40rem; white-space: pre-wrap; overflow-wrap: break-word; }
.n { text-align: right; white-space: nowrap; }
pre { padding: 0.9rem 1rem; border: 1px solid var(--line); border-radius: 8px; background: var(--panel); overflow-x: auto;
  font: 0.8125rem/1.6 ui-monospace, Menlo, Consolas, monospace; }
footer { margin-top: 3rem; color: var(--soft); font-size: 0.875rem; }
.live-controls { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: 0.3rem 1.5rem; }
.live-controls label { display: flex; gap: 0.6rem; align-items: center; color: var(--soft); }
.live-controls input { flex: 1; accent-color: var(--accent); }
.live-controls output { min-width: 2.5rem; color: var(--ink); }
.live-bars { width: 100%; margin-top: 0.8rem; }
.live-bar { width: 60%; min-width: 4rem; vertical-align: middle; }
.live-bar i { display: block; min-width: 1px; height: 1rem; background: var(--accent); }
.live-text { line-height: 2; white-space: pre-wrap; overflow-wrap: anywhere; }
.live-cell { background: color-mix(in srgb, var(--accent) var(--share, 0%), var(--panel)); cursor: default; }
.live-cell:is(:hover, :focus) { outline: 2px solid var(--ink); }
.live-grid td { padding: 0.2rem 0.6rem; white-space: nowrap; }
.live-grid small { display: block; }
.live-grid th:first-child { position: sticky; left: 0; background: var(--ground); }
.live-status { min-height: 1.6em; }
@media print { body { max-width: none; padding: 0; } }
`;

export function reportText(report: Report): string {
  const { title, lang, colours, about, pictures, live, tables, lines, foot } = report;
  const nonce = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16)).join("");
  const policy = live ? `${POLICY}; script-src 'nonce-${nonce}'` : POLICY;
  const { strings } = Object.values(LANGUAGES).find(({ tag }) => tag === lang) ?? LANGUAGES.en;
  const read = reportHeadings(strings);
  const root = Object.entries(colours).map(([name, value]) => `${name}: ${value.replace(/[^\w#(),.%\s-]/g, "")};`);
  return [
    "<!doctype html>",
    `<html lang="${escaped(lang)}">`,
    "<head>",
    '<meta charset="utf-8">',
    `<meta http-equiv="Content-Security-Policy" content="${policy}">`,
    '<meta name="viewport" content="width=device-width, initial-scale=1">',
    `<title>${escaped(title)}</title>`,
    `<style>:root { ${root.join(" ")} }${STYLE}</style>`,
    "</head>",
    "<body>",
    `<h1>${escaped(title)}</h1>`,
    ...about.map((line) => `<p class="about">${escaped(line)}</p>`),
    ...(live ? [`<script type="application/json">${dataText(live)}</script>`] : []),
    ...pictures.map((svg) => `<figure>${svg}</figure>`),
    ...tables.map((table) => tableText(table, read)),
    ...lines.map(([name, code]) => `<h2>${escaped(name)}</h2>\n<pre><code>${escaped(code)}</code></pre>`),
    `<footer>${escaped(foot)}</footer>`,
    ...(live ? [`<script nonce="${nonce}">(${liveScript.toString()})()</script>`] : []),
    "</body>",
    "</html>",
    "",
  ].join("\n");
}

function tableText({ title, columns, rows }: Table, { head, translate, first }: ReportHeadings): string {
  const made = columns.map((column, at) => {
    const values = rows.flatMap((row) => (typeof row[at] === "number" ? [row[at]] : []));
    const numbers = values.length > 0;
    const figure = figures(values, column);
    const kind = numbers ? ' class="n"' : "";
    const cellText = (value: Cell): string => {
      if (!numbers) return escaped(translate(column, String(value ?? "")));
      return typeof value === "number" ? figure(value + first(column)) : "–";
    };
    return {
      top: `<th scope="col"${kind}>${escaped(head(column))}</th>`,
      cell: (value: Cell) => `<td${kind}>${cellText(value)}</td>`,
    };
  });
  const heads = made.map(({ top }) => top);
  const body = rows.map((row) => `<tr>${made.map(({ cell }, at) => cell(row[at])).join("")}</tr>`);
  return `<h2>${escaped(title)}</h2>
<div class="wide"><table><thead><tr>${heads.join("")}</tr></thead>
<tbody>
${body.join("\n")}
</tbody></table></div>`;
}

/**
 * How the numbers of a column are written, all in one way: integers as they are, large ones rounded, others with four
 * decimals or, if tiny, with an exponent. A column of totals has a way for each.
 */
function figures(values: readonly number[], column: string): (x: number) => string {
  if (column === "id") return String; // a name
  const integers = column !== "value" && values.every((x) => Number.isInteger(x) || !Number.isFinite(x));
  const large = column !== "value" && values.some((x) => Number.isFinite(x) && Math.abs(x) >= 1000);
  return (x) => {
    if (!Number.isFinite(x)) return "–";
    if (integers || large || (column === "value" && Number.isInteger(x)))
      return grouped(Math.round(x)).replace("-", "−");
    return x && Math.abs(x) < 0.001 ? x.toExponential(2).replaceAll("-", "−") : fixed(x, 4);
  };
}

const ENTITIES: Record<string, string> = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };

/** Escape text for elements and attributes; bidirectional controls are shown by code point. */
export function escaped(text: string): string {
  return text
    .replace(/[&<>"']/g, (c) => ENTITIES[c] ?? c)
    .replace(/[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (c) => `⟨${code(c)}⟩`);
}

function code(c: string): string {
  return c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0");
}
