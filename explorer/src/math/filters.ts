// The stages of a sampler: logits in, logits out, a word that is cut gets -Infinity.
//
// Chapters 10 and 12 of `lmhead.reference`. Ties go to the lowest id.

import type { Vector } from "./linear";
import { entropy, logSoftmax, softmax } from "./softmax";

export type StageName = "temperature" | "top_k" | "top_p" | "min_p" | "typical_p";

export interface Stage {
  readonly name: StageName;
  readonly value: number;
}

/** Ids, best first; of equal ones the lowest first. */
export function descendingOrder(z: Vector): number[] {
  return z.map((_, id) => id).sort((a, b) => at(z, b) - at(z, a) || a - b);
}

export function topK(z: Vector, k: number): number[] {
  return keep(z, descendingOrder(z).slice(0, k));
}

/** Best words first, until their probabilities reach topP. */
export function topP(z: Vector, share: number): number[] {
  if (share === 1) return [...z];
  return keep(z, until(descendingOrder(z), softmax(z), share));
}

/** Words with p >= minP · max p. */
export function minP(z: Vector, share: number): number[] {
  const best = Math.max(...z);
  return z.map((value) => (Math.exp(value - best) >= share || value === best ? value : -Infinity));
}

/** Words whose surprise is nearest to the entropy, until they reach the share. */
export function typical(z: Vector, share: number): number[] {
  if (share === 1) return [...z];
  const logP = logSoftmax(z);
  const expected = entropy(z);
  const nearness = logP.map((value) => -Math.abs(-value - expected));
  return keep(z, until(descendingOrder(nearness), logP.map(Math.exp), share));
}

export function apply(stage: Stage, z: Vector): number[] {
  switch (stage.name) {
    case "temperature":
      return z.map((value) => value / stage.value);
    case "top_k":
      return topK(z, stage.value);
    case "top_p":
      return topP(z, stage.value);
    case "min_p":
      return minP(z, stage.value);
    case "typical_p":
      return typical(z, stage.value);
  }
}

export interface Trace {
  readonly stage: Stage;
  readonly logits: number[];
  /** Ids that this stage struck out. */
  readonly cut: number[];
}

/** Every stage in turn, with what it struck out. */
export function run(stages: readonly Stage[], z: Vector): { logits: number[]; trace: Trace[] } {
  let logits = [...z];
  const trace: Trace[] = [];
  for (const stage of stages) {
    const next = apply(stage, logits);
    const cut = next.flatMap((value, id) =>
      value === -Infinity && at(logits, id) !== -Infinity ? [id] : [],
    );
    trace.push({ stage, logits: next, cut });
    logits = next;
  }
  return { logits, trace };
}

/** Ids that are left, best first. */
export function kept(z: Vector): number[] {
  return descendingOrder(z).filter((id) => at(z, id) !== -Infinity);
}

/** A word stays if those before it sum to less than the share. */
function until(order: readonly number[], p: Vector, share: number): number[] {
  const stays: number[] = [];
  let before = 0;
  for (const id of order) {
    if (before >= share) break;
    stays.push(id);
    before += at(p, id);
  }
  return stays.length > 0 ? stays : order.slice(0, 1);
}

function keep(z: Vector, ids: readonly number[]): number[] {
  const stays = new Set(ids);
  return z.map((value, id) => (stays.has(id) ? value : -Infinity));
}

function at(x: Vector, i: number): number {
  return x[i] ?? NaN;
}
