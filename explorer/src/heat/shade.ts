// Colour by a share from 0 to 1. The colours themselves are in style/heat.css, for light and dark.
//
// Never colour alone: whoever uses this shows the value too, in the cell, in a tip and in a table.

export type Tone = "cool" | "warm";

export interface Shade {
  readonly class: string;
  readonly style: Record<string, string>;
}

/** From here on the ink changes, where the ground is light, and where it is dark. */
export const DEEP = 0.83;
export const HIGH = 0.59;

export function shade(share: number, tone: Tone = "cool"): Shade {
  const clean = Number.isFinite(share) ? Math.min(Math.max(share, 0), 1) : 0;
  const names = ["heat", tone, clean > HIGH ? "high" : "", clean > DEEP ? "deep" : ""];
  return { class: names.filter(Boolean).join(" "), style: { "--heat": `${(100 * clean).toFixed(1)}%` } };
}
