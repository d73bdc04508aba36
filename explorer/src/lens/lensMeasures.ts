// The four measures of a cell: how each is formatted and colored.
//
// A stronger color is always closer to the final prediction: a likely target, a good rank, a low
// entropy, a small divergence.

import { escaped, type Token } from "../api";
import type { Step } from "../heat/legend";
import { fixed, grouped } from "../ui/format";

export type Measure = "p" | "rank" | "entropy" | "kl";
export const MEASURES: readonly Measure[] = ["p", "rank", "entropy", "kl"];

export type { Token };

/** The text of a token; parts of characters as in `escaped`. */
export function textOfToken(token: Token | undefined): string {
  return token ? escaped(token.text, token.bytes) : "";
}

export interface Cell {
  readonly best: readonly (Token & { readonly p: number })[];
  readonly entropy: number;
  readonly target_p: number;
  readonly target_rank: number;
  readonly kl: number;
}

export interface Lens {
  readonly prompt: readonly Token[];
  readonly targets: readonly Token[];
  readonly layers: readonly { readonly layer: number; readonly cells: readonly Cell[] }[];
  /** How many layers there will be when all have arrived. */
  readonly rows: number;
}

/** Smaller divergences have the strongest color. */
const MIN_KL = 0.01;

/** What the color scale needs to know about the whole grid. */
export interface Scale {
  readonly vocabSize: number;
  readonly maxKl: number;
}

export function scaleOf(lens: Lens, vocabSize: number): Scale {
  const found = lens.layers.flatMap(({ cells }) => cells.map(({ kl }) => kl));
  return { vocabSize, maxKl: Math.max(1, ...found.map(Math.ceil)) };
}

export function valueOf(cell: Cell, measure: Measure): number {
  return { p: cell.target_p, rank: cell.target_rank, entropy: cell.entropy, kl: cell.kl }[measure];
}

/** From 0 (weakest color) to 1. */
export function shareOf(value: number, measure: Measure, scale: Scale): number {
  switch (measure) {
    case "p":
      return Math.sqrt(value);
    case "rank":
      return 1 - Math.log(value + 1) / Math.log(Math.max(scale.vocabSize, 2));
    case "entropy":
      return 1 - value / Math.log(Math.max(scale.vocabSize, 2));
    case "kl":
      // A log scale from MIN_KL: large values of early layers would hide the rest.
      return value <= MIN_KL ? 1 : 1 - Math.log(value / MIN_KL) / Math.log(scale.maxKl / MIN_KL);
  }
}

/** A short text for a cell. Ranks start from 1. */
export function brief(value: number, measure: Measure): string {
  if (measure === "p") return chance(value);
  if (measure === "rank") return shortInteger(value + 1);
  return fixed(value, value < 9.95 ? 2 : 1);
}

/** The exact value. */
export function exact(value: number, measure: Measure): string {
  if (measure === "p") return value >= 1e-4 || value === 0 ? fixed(value, 6) : power(value, 3);
  return measure === "rank" ? grouped(value + 1) : fixed(value, 4);
}

export function legendOf(measure: Measure, scale: Scale): Step[] {
  const max = Math.log(scale.vocabSize);
  const values = {
    p: [0, 0.01, 0.1, 0.5, 1],
    rank: [1, 10, 100, 1000, 10_000, 100_000]
      .map((n) => n - 1)
      .filter((rank) => rank < scale.vocabSize)
      .reverse(),
    entropy: [max, max * 0.75, max / 2, max / 4, 0],
    kl: [...new Set([scale.maxKl, 10, 1, 0.1, MIN_KL])].filter((kl) => kl <= scale.maxKl),
  }[measure];
  return values.map((value) => ({ text: brief(value, measure), share: shareOf(value, measure, scale) }));
}

/** Percent: "0", "<0.1%", "0.4%", "12%". */
function chance(p: number): string {
  if (p === 0) return "0";
  if (p < 0.0005) return "<0.1%";
  return `${(100 * p).toFixed(p < 0.0095 ? 1 : 0)}%`;
}

/** At max four characters: 942, 1.2k, 49k. */
function shortInteger(n: number): string {
  if (n < 1000) return String(n);
  return n < 9950 ? `${(n / 1000).toFixed(1)}k` : `${Math.floor(n / 1000)}k`;
}

function power(x: number, digits: number): string {
  return x.toExponential(digits).replace("-", "−");
}
