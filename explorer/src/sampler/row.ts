// One row of logits, sorted once: ranks, probabilities and entropy of the model's own distribution.

import { gumbels } from "../math/philox";
import { Candidates } from "./candidates";

const ID_BITS = 2 ** 21;

export class Row {
  /** Token ids by descending logit; equal logits by ascending id. */
  readonly ids: Uint32Array;
  /** The tokens that are not masked. */
  readonly candidates: Candidates;
  private readonly ranks: Uint32Array;
  private byId: Float64Array | undefined;

  constructor(readonly logits: Float32Array | Float64Array) {
    this.ids = sortedIds(logits);
    const size = logits.length;
    this.ranks = new Uint32Array(size);
    const [inOrder, z] = [new Uint32Array(size), new Float64Array(size)];
    let unmasked = size;
    for (let rank = size - 1; rank >= 0; rank--) {
      const id = this.ids[rank] as number;
      this.ranks[id] = rank;
      inOrder[rank] = rank;
      z[rank] = logits[id] as number;
      if (z[rank] === -Infinity) unmasked = rank;
    }
    this.candidates = new Candidates(inOrder.subarray(0, unmasked), z.subarray(0, unmasked), this.ids);
  }

  /** In nats. */
  get entropy(): number {
    return this.candidates.entropy;
  }

  /** The model's probability by token id. */
  get probability(): Float64Array {
    return (this.byId ??= this.candidates.probability());
  }

  /** The model's probability of the token at a rank (from 0). */
  p(rank: number): number {
    return rank < this.candidates.size ? this.candidates.p(rank) : 0;
  }

  logP(rank: number): number {
    return rank < this.candidates.size ? this.candidates.logP(rank) : -Infinity;
  }

  /** The model's probability of tokens given by rank, best first. */
  mass(ranks: Uint32Array): number {
    const { e, sum } = this.candidates;
    let mass = 0;
    for (let at = ranks.length - 1; at >= 0; at--) mass += e[ranks[at] as number] as number;
    return Math.min(1, mass / sum);
  }

  /** The rank of a token id, from 0; -1 for an id that the row does not have. */
  rankOf(id: number): number {
    return this.ranks[id] ?? -1;
  }

  /** Gumbel noise by rank: the largest sum of logit and noise is a draw from the softmax. */
  noise(seed: number, position: number): Float64Array {
    const noise = gumbels(seed, position, this.ids.length);
    return Float64Array.from(this.ids, (id) => noise[id] as number);
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
