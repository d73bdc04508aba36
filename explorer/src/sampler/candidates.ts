// The tokens that can still be drawn, with their logits, best first; and the operations of the stages on them.
//
// Tokens are held by their rank in the model's own row, so that the arrays of a large vocabulary are read in order.

import type { Edit } from "./penalties";

/** Beyond this distance of logits, exponentials relative to the old largest logit are computed again. */
const FAR = 30;

export class Candidates {
  private moments: { readonly sum: number; readonly entropy: number } | undefined;

  constructor(
    /** The model's ranks (from 0) of the tokens, by descending logit; equal logits by ascending id. */
    readonly ranks: Uint32Array,
    /** Their logits. */
    readonly z: Float64Array,
    /** Token ids by the model's rank. */
    private readonly ids: Uint32Array,
    /** The logit that exponentials are relative to: the largest one, or one near it. */
    private readonly base = z[0] as number,
    private exponentials?: Float64Array,
  ) {}

  get size(): number {
    return this.ranks.length;
  }

  /** exp(z), up to a factor that all tokens share. */
  get e(): Float64Array {
    if (this.exponentials) return this.exponentials;
    const [z, base, e] = [this.z, this.base, new Float64Array(this.size)];
    for (let at = 0; at < z.length; at++) e[at] = Math.exp((z[at] as number) - base);
    return (this.exponentials = e);
  }

  /** Σ e. */
  get sum(): number {
    return this.sums().sum;
  }

  /** Σ exp(z - largest z). */
  get total(): number {
    return this.sum * Math.exp(this.base - (this.z[0] as number));
  }

  /** In nats. */
  get entropy(): number {
    return this.sums().entropy;
  }

  p(at: number): number {
    return (this.e[at] as number) / this.sum;
  }

  logP(at: number): number {
    return (this.z[at] as number) - this.base - Math.log(this.sum);
  }

  id(at: number): number {
    return this.ids[this.ranks[at] as number] as number;
  }

  /** By token id; 0 for all others. */
  probability(): Float64Array {
    const { ids, ranks, e, sum } = this;
    const p = new Float64Array(ids.length);
    for (let at = 0; at < ranks.length; at++) p[ids[ranks[at] as number] as number] = (e[at] as number) / sum;
    return p;
  }

  /** The probability that these tokens had among `all`, some of which were removed. */
  shareOf(all: Candidates): number {
    return (this.sum * Math.exp(this.base - all.base)) / all.sum;
  }

  /** The standard deviation of the logits. */
  get deviation(): number {
    const n = this.size;
    let [sum, squares] = [0, 0];
    for (let at = 0; at < n; at++) {
      const x = (this.z[at] as number) - (this.z[0] as number);
      sum += x;
      squares += x * x;
    }
    return Math.sqrt(Math.max(0, squares / n - (sum / n) ** 2));
  }

  slice(from: number, to: number): Candidates {
    if (from === 0 && to >= this.size) return this;
    return this.changed(
      this.ranks.subarray(from, to),
      this.z.subarray(from, to),
      this.exponentials?.subarray(from, to),
    );
  }

  /** The n best, at least one. */
  best(n: number): Candidates {
    return this.slice(0, Math.max(1, Math.min(n, this.size)));
  }

  /** Those with a logit of at least this, and the best one. */
  above(minimum: number): Candidates {
    return this.best(firstIndex(this.size, (at) => (this.z[at] as number) < minimum));
  }

  scaled(temperature: number): Candidates {
    const z = new Float64Array(this.size);
    for (let at = 0; at < z.length; at++) z[at] = (this.z[at] as number) / temperature;
    return new Candidates(this.ranks, z, this.ids);
  }

  /** With the logits of the tokens at some ranks changed, sorted again. */
  edited(edits: ReadonlyMap<number, Edit>): Candidates {
    const { ranks, z, e, size } = this;
    const touched = new Uint8Array(this.ids.length);
    for (const rank of edits.keys()) touched[rank] = 1;
    const gone: number[] = [];
    for (let at = 0; at < size; at++) if (touched[ranks[at] as number]) gone.push(at);
    const moved = gone.map((at) => {
      const rank = ranks[at] as number;
      const logit = (edits.get(rank) as Edit)(z[at] as number);
      return { rank, logit, id: this.ids[rank] as number, before: 0 };
    });
    moved.sort((a, b) => b.logit - a.logit || a.id - b.id);
    for (const one of moved)
      one.before = firstIndex(size, (at) => {
        const other = z[at] as number;
        return other < one.logit || (other === one.logit && this.id(at) > one.id);
      });
    // Copy the stretches between tokens that leave their place or arrive at a new one.
    const [newRanks, newZ, newE] = [new Uint32Array(size), new Float64Array(size), new Float64Array(size)];
    let [from, to] = [0, 0];
    const copy = (end: number): void => {
      newRanks.set(ranks.subarray(from, end), to);
      newZ.set(z.subarray(from, end), to);
      newE.set(e.subarray(from, end), to);
      to += end - from;
      from = end;
    };
    let leaving = 0;
    for (const one of [...moved, undefined]) {
      const end = one?.before ?? size;
      for (; leaving < gone.length && (gone[leaving] as number) < end; leaving++, from++) copy(gone[leaving] as number);
      copy(end);
      if (!one) break;
      newRanks[to] = one.rank;
      newZ[to] = one.logit;
      newE[to++] = Math.exp(one.logit - this.base);
    }
    return this.changed(newRanks, newZ, newE);
  }

  /** The indices from `from` to `gap` and from `resume` to `to`. */
  without(from: number, gap: number, resume: number, to: number): Candidates {
    if (gap === resume) return this.slice(from, to);
    const size = gap - from + to - resume;
    const [ranks, z] = [new Uint32Array(size), new Float64Array(size)];
    ranks.set(this.ranks.subarray(from, gap));
    z.set(this.z.subarray(from, gap));
    ranks.set(this.ranks.subarray(resume, to), gap - from);
    z.set(this.z.subarray(resume, to), gap - from);
    return new Candidates(ranks, z, this.ids);
  }

  private changed(ranks: Uint32Array, z: Float64Array, e: Float64Array | undefined): Candidates {
    return Math.abs((z[0] as number) - this.base) > FAR
      ? new Candidates(ranks, z, this.ids)
      : new Candidates(ranks, z, this.ids, this.base, e);
  }

  private sums(): { readonly sum: number; readonly entropy: number } {
    if (this.moments) return this.moments;
    const { e, z, base } = this;
    let [sum, weighted] = [0, 0];
    for (let at = e.length - 1; at >= 0; at--) {
      // From the smallest up, so that small terms are not lost.
      const term = e[at] as number;
      sum += term;
      if (term > 0) weighted += term * ((z[at] as number) - base);
    }
    return (this.moments = { sum, entropy: Math.max(0, Math.log(sum) - weighted / sum) });
  }
}

/** The first index below `size` that has it, where all later ones do too; `size` if none does. */
export function firstIndex(size: number, has: (n: number) => boolean): number {
  let [low, high] = [0, size];
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (has(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}
