// Divergences of two distributions over one vocabulary.

import { Processed } from "../sampler/process";
import type { Row } from "../sampler/row";
import type { SamplerState } from "../sampler/useSampler";

/** Probabilities by id. */
export type Distribution = Float64Array;

export interface Pair {
  /** KL(a ‖ b) in nats; Infinity if b gives probability 0 to a token of a. */
  readonly kl: number;
  /** ½ Σ |a - b|. */
  readonly variation: number;
  readonly entropyA: number;
  readonly entropyB: number;
  readonly bestA: number;
  readonly bestB: number;
}

/** The model's distribution, or what its sampler draws from. */
export function distribution(row: Row, sampler?: Pick<SamplerState, "stages">): Distribution {
  return sampler ? new Processed(row, sampler.stages).probability : row.probability;
}

export function pair(a: Distribution, b: Distribution): Pair {
  let [kl, apart, entropyA, entropyB, bestA, bestB] = [0, 0, 0, 0, 0, 0];
  for (let id = 0; id < a.length; id++) {
    const [p, q] = [at(a, id), at(b, id)];
    if (p > 0) {
      kl += p * (Math.log(p) - Math.log(q)); // infinite where q is 0
      entropyA -= p * Math.log(p);
    }
    if (q > 0) entropyB -= q * Math.log(q);
    apart += Math.abs(p - q);
    if (p > at(a, bestA)) bestA = id;
    if (q > at(b, bestB)) bestB = id;
  }
  return { kl: Math.max(kl, 0), variation: apart / 2, entropyA, entropyB, bestA, bestB };
}

export type Sort = "most" | "apart";

/** The ids of the n tokens to show: the most probable of either side, or those with the largest difference. */
export function shownTokens(a: Distribution, b: Distribution, n: number, sort: Sort): number[] {
  const score = (id: number): number =>
    sort === "most" ? Math.max(at(a, id), at(b, id)) : Math.abs(at(a, id) - at(b, id));
  const best: { id: number; value: number }[] = [];
  for (let id = 0; id < a.length; id++) {
    const value = score(id);
    if (best.length === n && value <= (best.at(-1)?.value ?? 0)) continue;
    let place = best.length;
    while (place > 0 && (best[place - 1]?.value ?? 0) < value) place--;
    best.splice(place, 0, { id, value });
    if (best.length > n) best.pop();
  }
  return best.map(({ id }) => id);
}

export function massOf(p: Distribution, ids: readonly number[]): number {
  return Math.min(
    1,
    ids.reduce((sum, id) => sum + at(p, id), 0),
  );
}

function at(x: Distribution, id: number): number {
  return x[id] ?? NaN;
}
