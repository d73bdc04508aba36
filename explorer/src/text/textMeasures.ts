// The measures that color a token, in eight levels.

import { chance } from "../next/rankedTokens";
import { fixed, grouped } from "../ui/format";
import type { Scored } from "./score";

export const MEASURES = ["bits", "entropy", "rank", "p"] as const;
export type Measure = (typeof MEASURES)[number];

interface Scale {
  /** The lower bounds of all levels but the first. */
  readonly bounds: readonly number[];
  /** Whether a smaller value is more surprising. */
  readonly falling: boolean;
  of(token: Scored): number;
  show(value: number): string;
  /** The legend of a level, from its bounds. */
  range(low: number | undefined, high: number | undefined): string;
}

const between =
  (show: (x: number) => string) =>
  (low: number | undefined, high: number | undefined): string =>
    low === undefined ? `< ${show(high ?? NaN)}` : high === undefined ? `≥ ${show(low)}` : `${show(low)}–${show(high)}`;

export const SCALES: Record<Measure, Scale> = {
  bits: {
    bounds: [1, 2, 4, 6, 8, 11, 15],
    falling: false,
    of: (token) => token.bits ?? Infinity,
    show: (x) => fixed(x, 2),
    range: between(String),
  },
  entropy: {
    bounds: [1, 2, 3, 4, 6, 8, 10],
    falling: false,
    of: (token) => token.entropy / Math.LN2, // in bits, like the surprisal beside it
    show: (x) => fixed(x, 2),
    range: between(String),
  },
  rank: {
    bounds: [1, 3, 10, 30, 100, 1000, 10_000],
    falling: false,
    of: (token) => token.rank,
    show: (x) => grouped(x + 1),
    range: (low, high) => {
      const [first, last] = [(low ?? 0) + 1, high];
      return last === undefined
        ? `> ${grouped(first - 1)}`
        : first === last
          ? grouped(first)
          : `${grouped(first)}–${grouped(last)}`;
    },
  },
  p: {
    bounds: [0.5, 0.2, 0.1, 0.05, 0.01, 0.001, 0.0001],
    falling: true,
    of: (token) => token.p,
    show: chance,
    range: (low, high) => (high === undefined ? `< ${low}` : `≥ ${high}`),
  },
};

export const LEVELS = 8;

/** From 0 (expected) to 7 (most surprising). */
export function level(measure: Measure, value: number): number {
  const { bounds, falling } = SCALES[measure];
  return bounds.filter((bound) => (falling ? value < bound : value >= bound)).length;
}

/** The legend texts: "< 1", "1–2", ... */
export function legend(measure: Measure): string[] {
  const { bounds, range } = SCALES[measure];
  return Array.from({ length: LEVELS }, (_, at) => range(bounds[at - 1], bounds[at]));
}
