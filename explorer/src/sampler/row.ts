// One row of logits, sorted once: ranks, probabilities and entropy of the model's own distribution.

import { Candidates } from "./candidates";

const ID_BITS = 2 ** 21;

export class Row {
  /** Token ids by descending logit; equal logits by ascending id. */
  readonly ids: Uint32Array;
  readonly entropy: number;
  /** The tokens that are not masked. */
  readonly candidates: Candidates;
  /** The model's probability by token id. */
  readonly probability: Float64Array;
  private readonly ranks: Uint32Array;
  private readonly logTotal: number;

  constructor(readonly logits: Float32Array | Float64Array) {
    this.ids = sortedIds(logits);
    const size = logits.length;
    this.ranks = new Uint32Array(size);
    const z = new Float64Array(size);
    let unmasked = size;
    for (let rank = size - 1; rank >= 0; rank--) {
      const id = this.ids[rank] as number;
      this.ranks[id] = rank;
      z[rank] = logits[id] as number;
      if (z[rank] === -Infinity) unmasked = rank;
    }
    this.candidates = new Candidates(this.ids.subarray(0, unmasked), z.subarray(0, unmasked));
    this.entropy = this.candidates.entropy;
    this.logTotal = Math.log(this.candidates.total);
    this.probability = new Float64Array(size);
    const [best, total] = [z[0] ?? 0, this.candidates.total];
    for (let rank = 0; rank < unmasked; rank++)
      this.probability[this.ids[rank] as number] = Math.exp((z[rank] as number) - best) / total;
  }

  /** The model's probability of the token at a rank (from 0). */
  p(rank: number): number {
    return this.probability[this.ids[rank] ?? -1] ?? 0;
  }

  logP(rank: number): number {
    const best = this.logits[this.ids[0] ?? 0] ?? NaN;
    return (this.logits[this.ids[rank] ?? -1] ?? -Infinity) - best - this.logTotal;
  }

  /** The rank of a token id, from 0; -1 for an id that the row does not have. */
  rankOf(id: number): number {
    return this.ranks[id] ?? -1;
  }
}

function sortedIds(logits: Float32Array | Float64Array): Uint32Array {
  const size = logits.length;
  if (size > ID_BITS || logits instanceof Float64Array)
    return Uint32Array.from(logits, (_, id) => id).sort((a, b) =>
      logits[a] === logits[b] ? a - b : (logits[b] as number) > (logits[a] as number) ? 1 : -1,
    );
  // One float64 key holds 32 bits of the logit and 21 of the id: sorting needs no comparison function.
  const bits = new Uint32Array(Float32Array.from(logits, (z) => z + 0).buffer); // -0 becomes 0
  const keys = new Float64Array(size);
  for (let id = 0; id < size; id++) {
    const pattern = bits[id] as number;
    const descending = pattern >>> 31 ? pattern : ~(pattern | 0x80000000) >>> 0;
    keys[id] = descending * ID_BITS + id;
  }
  keys.sort();
  return Uint32Array.from(keys, (key) => key % ID_BITS);
}
