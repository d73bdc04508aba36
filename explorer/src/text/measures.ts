// What a token can be coloured by, in eight levels with bounds that the legend names.

import { chance } from "../next/ranked";
import { fixed, whole } from "../ui/format";
import type { Scored } from "./score";

export const MEASURES = ["bits", "entropy", "rank", "p"] as const;
export type Measure = (typeof MEASURES)[number];

interface Scale {
  /** Where each level after the first begins. */
  readonly bounds: readonly number[];
  /** Whether a smaller value is the more surprising one. */
  readonly falling: boolean;
  of(token: Scored): number;
  show(value: number): string;
  /** A level in the legend, from its bounds. */
  range(low: number | undefined, high: number | undefined): string;
}

const between = (show: (x: number) => string) => (low: number | undefined, high: number | undefined): string =>
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
    bounds: [0.5, 1, 2, 3, 4, 5, 7],
    falling: false,
    of: (token) => token.entropy,
    show: (x) => fixed(x, 2),
    range: between(String),
  },
  rank: {
    bounds: [1, 3, 10, 30, 100, 1000, 10_000],
    falling: false,
    of: (token) => token.rank,
    show: (x) => whole(x + 1),
    range: (low, high) => {
      const [first, last] = [(low ?? 0) + 1, high];
      return last === undefined ? `> ${whole(first - 1)}` : first === last ? whole(first) : `${whole(first)}–${whole(last)}`;
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

/** 0 for what was expected, 7 for what was least so. */
export function level(measure: Measure, value: number): number {
  const { bounds, falling } = SCALES[measure];
  return bounds.filter((bound) => (falling ? value < bound : value >= bound)).length;
}

/** The levels in words: "< 1", "1–2", ... */
export function legend(measure: Measure): string[] {
  const { bounds, range } = SCALES[measure];
  return Array.from({ length: LEVELS }, (_, at) => range(bounds[at - 1], bounds[at]));
}
