// The weights that `nn.Linear` starts with, and the logits that they give: the numbers that torch draws.

import { variance } from "../math/linear";
import { MersenneTwister } from "../math/mersenne";

/** Rows of the layer: enough to see the distribution of the logits. */
export const ROWS = 256;
export const WIDTHS = ["4", "16", "64", "256", "1024"] as const;
export type Width = (typeof WIDTHS)[number];

export interface InitialLayer {
  /** 1 / √D: kaiming_uniform_ with a = √5. */
  readonly bound: number;
  /** (ROWS × D), row by row. */
  readonly weight: Float32Array;
  /** Of a vector with mean square 1. */
  readonly logits: readonly number[];
  readonly weightDeviation: number;
  readonly logitDeviation: number;
}

export function initialLayer(seed: number, width: number): InitialLayer {
  const torch = new MersenneTwister(seed);
  const bound = 1 / Math.sqrt(width);
  const weight = torch.uniform(bound, ROWS * width);
  const drawn = torch.uniform(1, width);
  const size = Math.sqrt(drawn.reduce((sum, value) => sum + value * value, 0) / width);
  const x = drawn.map((value) => value / size);
  const logits = Array.from({ length: ROWS }, (_, v) => {
    let z = 0;
    for (let d = 0; d < width; d++) z += (weight[v * width + d] as number) * (x[d] as number);
    return z;
  });
  const [weightDeviation, logitDeviation] = [deviation(weight), deviation(logits)];
  return { bound, weight, logits, weightDeviation, logitDeviation };
}

/** How many values fall into each of `bins` equal parts of -limit to limit. */
export function histogram(values: ArrayLike<number>, limit: number, bins: number): number[] {
  const counts = new Uint32Array(bins);
  for (let at = 0; at < values.length; at++) {
    const bin = Math.floor((((values[at] as number) + limit) / (2 * limit)) * bins);
    const place = Math.min(bins - 1, Math.max(0, bin));
    counts[place] = (counts[place] as number) + 1;
  }
  return [...counts];
}

function deviation(values: ArrayLike<number>): number {
  return Math.sqrt(variance(Array.from(values)));
}
