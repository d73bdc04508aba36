// Colors by a share from 0 to 1. The colors are in style/heat.css, for light and dark.
//
// Color is never the only sign: every user of this also shows the value.

export type Tone = "cool" | "warm";

export interface Shade {
  readonly class: string;
  readonly style: Record<string, string>;
}

/** Shares from which the text color changes, in the light and the dark theme. */
export const DEEP = 0.83;
export const HIGH = 0.59;

export function shade(share: number, tone: Tone = "cool"): Shade {
  const clean = Number.isFinite(share) ? Math.min(Math.max(share, 0), 1) : 0;
  const names = ["heat", tone, clean > HIGH ? "high" : "", clean > DEEP ? "deep" : ""];
  return { class: names.filter(Boolean).join(" "), style: { "--heat": `${(100 * clean).toFixed(1)}%` } };
}
