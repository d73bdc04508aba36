// Headings and names for the tables of a report. CSV has the library's names, and ranks from 0.

import type { Strings } from "../i18n/strings";
import { visible } from "../ui/tokenText";

export interface ReportHeadings {
  /** The heading of a column. */
  head(column: string): string;
  /** A cell in the page's language where it holds a name; white space made visible; any other as it is. */
  translate(column: string, value: string): string;
  /** What its ranks start from. */
  first(column: string): 0 | 1;
}

/** Columns that count from 0 in CSV and from 1 in a report. */
export const FROM_ZERO = ["rank", "target_rank", "position"];

/** Columns that hold tokens. */
const TOKENS = ["text", "token", "read", "target", "best", "best_a", "best_b"];

export function reportHeadings({
  exports: { columns, sums },
  next,
  sampler,
  text,
  train: { cost },
}: Strings): ReportHeadings {
  const heads: Readonly<Record<string, string>> = columns;
  const stages = { ...sampler.stages, logits: next.given };
  const names: Readonly<Record<string, Readonly<Record<string, unknown>>>> = {
    stage: stages,
    cut_by: stages,
    sum: { ...text.sums, ...sums },
    way: cost,
    tensor: cost.names,
  };
  return {
    head: (column) => heads[column] ?? column,
    translate: (column, value) => {
      const translated = names[column]?.[value];
      if (typeof translated === "string") return translated;
      return TOKENS.includes(column) || (value && !value.trim()) ? visible(value) : value;
    },
    first: (column) => (FROM_ZERO.includes(column) ? 1 : 0),
  };
}
