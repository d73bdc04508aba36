// What the tables of all pages mean to a reader: CSV has names for machines, and ranks from 0 as the library.

import type { Strings } from "../i18n";
import { visible } from "../next/tokens";

export interface Reading {
  /** The heading of a column. */
  head(column: string): string;
  /** A cell that holds a name, in words; one that would seem empty, made visible; any other as it is. */
  say(column: string, value: string): string;
  /** What its numbers begin at, if a machine begins at 0. */
  first(column: string): 0 | 1;
}

const RANKS = ["rank", "target_rank"];

export function reading({ exports: { columns, sums }, next, text, train: { cost } }: Strings): Reading {
  const heads: Readonly<Record<string, string>> = columns;
  const stages = { ...next, logits: next.given };
  const names: Readonly<Record<string, Readonly<Record<string, unknown>>>> = {
    stage: stages,
    cut_by: stages,
    sum: { ...sums, ...text.sums },
    way: cost,
    tensor: cost.names,
  };
  return {
    head: (column) => heads[column] ?? column,
    say: (column, value) => {
      const said = names[column]?.[value];
      if (typeof said === "string") return said;
      return value && !value.trim() ? visible(value) : value;
    },
    first: (column) => (RANKS.includes(column) ? 1 : 0),
  };
}
