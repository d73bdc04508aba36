// The measures of a position: how each is formatted and colored.

import type { Step } from "../heat/legend";
import type { Tone } from "../heat/color";
import { fixed, signed } from "../ui/format";
import type { Place } from "./useCompare";

export type Measure = "kl" | "variation" | "gain";

/** The available measures; total variation is computed for samplers only. */
export function measuresOf(samplers: boolean): readonly Measure[] {
  return samplers ? ["variation", "kl", "gain"] : ["kl", "gain"];
}

/** The server sends null for infinity. */
export function valueOf(place: Place, measure: Measure): number {
  if (measure === "kl") return place.kl ?? Infinity;
  if (measure === "variation") return place.total_variation ?? NaN;
  const [a, b] = [place.log_prob_a ?? -Infinity, place.log_prob_b ?? -Infinity];
  return a === b ? 0 : b - a; // both may be -Infinity
}

/** The value of the strongest color. */
export function maxOf(places: readonly Place[], measure: Measure): number {
  if (measure === "variation") return 1;
  const found = places.map((place) => Math.abs(valueOf(place, measure))).filter(Number.isFinite);
  return Math.max(0.1, ...found);
}

export function shareOf(value: number, max: number): { share: number; tone: Tone } {
  const share = Number.isFinite(value) ? Math.sqrt(Math.abs(value) / max) : 1;
  return { share: Math.min(share, 1), tone: value < 0 ? "cool" : "warm" };
}

export function shown(value: number, measure: Measure, digits = 4): string {
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  return measure === "gain" ? signed(value, digits) : fixed(value, digits);
}

export function legendOf(measure: Measure, max: number): Step[] {
  const parts = measure === "gain" ? [-1, -0.25, 0, 0.25, 1] : [0, 1 / 16, 1 / 4, 9 / 16, 1];
  return parts.map((part) => ({ text: shown(part * max, measure, 2), ...shareOf(part * max, max) }));
}

/** Whether the top tokens differ. */
export function parted(place: Place): boolean {
  return place.best_a.id !== place.best_b.id;
}
