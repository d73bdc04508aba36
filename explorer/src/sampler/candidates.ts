// The tokens that can still be drawn, with their logits, best first; and the operations of the stages on them.

import type { Edit } from "./penalties";

export class Candidates {
  private moments: { readonly total: number; readonly entropy: number } | undefined;

  constructor(
    /** Token ids by descending logit; equal logits by ascending id. */
    readonly ids: Uint32Array,
    /** Their logits. */
    readonly z: Float64Array,
  ) {}

  get size(): number {
    return this.ids.length;
  }

  /** Σ exp(z - largest z). */
  get total(): number {
    return this.sums().total;
  }

  /** In nats. */
  get entropy(): number {
    return this.sums().entropy;
  }

  p(at: number): number {
    return Math.exp((this.z[at] as number) - (this.z[0] as number)) / this.total;
  }

  logP(at: number): number {
    return (this.z[at] as number) - (this.z[0] as number) - Math.log(this.total);
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
    return from === 0 && to >= this.size
      ? this
      : new Candidates(this.ids.subarray(from, to), this.z.subarray(from, to));
  }

  /** The n best, at least one. */
  best(n: number): Candidates {
    return this.slice(0, Math.max(1, Math.min(n, this.size)));
  }

  /** Those with a logit of at least this, and the best one. */
  above(least: number): Candidates {
    return this.best(firstIndex(this.size, (at) => (this.z[at] as number) < least));
  }

  scaled(temperature: number): Candidates {
    return new Candidates(
      this.ids,
      this.z.map((z) => z / temperature),
    );
  }

  /** With the logits of some tokens changed, sorted again. */
  edited(edits: ReadonlyMap<number, Edit>): Candidates {
    const touched = new Uint8Array(Math.max(0, ...edits.keys()) + 1);
    for (const id of edits.keys()) touched[id] = 1;
    const moved: [number, number][] = [];
    const [ids, z] = [new Uint32Array(this.size), new Float64Array(this.size)];
    this.ids.forEach((id, at) => {
      if (touched[id]) moved.push([id, (edits.get(id) as Edit)(this.z[at] as number)]);
    });
    moved.sort(([a, x], [b, y]) => y - x || a - b);
    let next = 0;
    let to = 0;
    const put = (id: number, value: number): void => {
      ids[to] = id;
      z[to++] = value;
    };
    for (let at = 0; at < this.size; at++) {
      const [id, value] = [this.ids[at] as number, this.z[at] as number];
      if (touched[id]) continue;
      for (let one = moved[next]; one && (one[1] > value || (one[1] === value && one[0] < id)); one = moved[++next])
        put(...one);
      put(id, value);
    }
    for (const one of moved.slice(next)) put(...one);
    return new Candidates(ids, z);
  }

  /** The indices from `from` to `gap` and from `resume` to `to`. */
  without(from: number, gap: number, resume: number, to: number): Candidates {
    if (gap === resume) return this.slice(from, to);
    const size = gap - from + to - resume;
    const [ids, z] = [new Uint32Array(size), new Float64Array(size)];
    ids.set(this.ids.subarray(from, gap));
    z.set(this.z.subarray(from, gap));
    ids.set(this.ids.subarray(resume, to), gap - from);
    z.set(this.z.subarray(resume, to), gap - from);
    return new Candidates(ids, z);
  }

  private sums(): { readonly total: number; readonly entropy: number } {
    if (this.moments) return this.moments;
    let [total, weighted] = [0, 0];
    const best = this.z[0] as number;
    for (let at = this.size - 1; at >= 0; at--) {
      // From the smallest up, so that small terms are not lost.
      const x = (this.z[at] as number) - best;
      const e = Math.exp(x);
      total += e;
      if (e > 0) weighted += e * x;
    }
    return (this.moments = { total, entropy: Math.max(0, Math.log(total) - weighted / total) });
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
