// Which words of an order are left: a stretch of it, perhaps with a gap.
//
// Top-k, top-p and min-p keep the best of what is left, so after any of them it is a beginning.
// Typical keeps the words around one score: a stretch in the middle, and a gap only where it could
// not take all of several equal words and took those with the lowest ids.

import { first, type Ranking, type Sums } from "./order";

export class Kept {
  /** The places from `from` to `gap` and from `resume` to `to`, without the ends. */
  constructor(
    readonly from: number,
    readonly gap: number,
    readonly resume: number,
    readonly to: number,
  ) {}

  static best(words: number): Kept {
    return new Kept(0, words, words, words);
  }

  get words(): number {
    return this.gap - this.from + this.to - this.resume;
  }

  has(place: number): boolean {
    return (place >= this.from && place < this.gap) || (place >= this.resume && place < this.to);
  }

  /** The place of the n-th of them, from 0. */
  place(n: number): number {
    return this.from + n < this.gap ? this.from + n : this.resume + n - (this.gap - this.from);
  }

  /** The first n of them. */
  best(n: number): Kept {
    const before = this.gap - this.from;
    if (n <= before) return new Kept(this.from, this.from + n, this.from + n, this.from + n);
    return new Kept(this.from, this.gap, this.resume, Math.min(this.to, this.resume + n - before));
  }

  /** How much of the model's probability they have. */
  mass(order: Ranking): number {
    return Math.min(1, order.mass(this.from, this.gap) + order.mass(this.resume, this.to));
  }

  /** Σ exp(x). */
  odds(sums: Sums): number {
    return sums.odds(this.from, this.gap) + sums.odds(this.resume, this.to);
  }

  /** The mean of x. */
  mean(sums: Sums): number {
    return (sums.weighted(this.from, this.gap) + sums.weighted(this.resume, this.to)) / this.odds(sums);
  }

  entropy(sums: Sums): number {
    return Math.max(0, Math.log(this.odds(sums)) - this.mean(sums));
  }
}

export function topK(kept: Kept, k: number): Kept {
  return kept.best(Math.min(k, kept.words));
}

/** A word stays if those before it have less than the share. */
export function topP(kept: Kept, share: number, sums: Sums): Kept {
  const limit = share * kept.odds(sums);
  return kept.best(Math.max(1, first(kept.words, (n) => kept.best(n).odds(sums) >= limit)));
}

/** A word stays if it has at least this share of the best one's probability. */
export function minP(kept: Kept, share: number, sums: Sums): Kept {
  const best = sums.x(kept.place(0));
  return kept.best(Math.max(1, first(kept.words, (n) => Math.exp(sums.x(kept.place(n)) - best) < share)));
}

/**
 * The words whose surprise is nearest to the entropy, until they have the share.
 *
 * Surprise less entropy is (mean of x) - x, so the nearest words are those around the mean: all up to
 * some distance, found by halving, and from there two pointers walk apart. It comes where the best so
 * many words are left, and no gap.
 */
export function typicalP(kept: Kept, share: number, sums: Sums, order: Ranking): Kept {
  const end = kept.words;
  const mean = kept.mean(sums);
  const limit = share * kept.odds(sums);
  const centre = first(end, (place) => sums.x(place) < mean);
  let [up, down] = nearer(sums, mean, centre, end, limit); // what is kept: from up to down
  let mass = sums.odds(up, down);
  while (mass < limit && (up > 0 || down < end)) {
    if (up > 0 && (down === end || sums.x(up - 1) - mean <= mean - sums.x(down))) {
      const score = order.score(up - 1);
      let [start, taken] = [up - 1, 0];
      while (start > 0 && order.score(start - 1) === score) start--;
      for (; start + taken < up && mass < limit; taken++) mass += Math.exp(sums.x(start + taken));
      if (start + taken < up) return new Kept(start, start + taken, up, down);
      up = start;
    } else mass += Math.exp(sums.x(down++));
  }
  return new Kept(up, down, down, down);
}

const HALVINGS = 40;

/** From where to where the words are nearer than some distance, nearly as far as the limit allows. */
function nearer(sums: Sums, mean: number, centre: number, end: number, limit: number): [number, number] {
  let found: [number, number] = [centre, centre];
  let [low, high] = [0, Math.max(sums.x(0) - mean, mean - sums.x(end - 1))];
  for (let n = 0; n < HALVINGS; n++) {
    const distance = (low + high) / 2;
    const up = first(centre, (place) => sums.x(place) - mean < distance);
    const down = centre + first(end - centre, (more) => mean - sums.x(centre + more) >= distance);
    if (sums.odds(up, down) < limit) [low, found] = [distance, [up, down]];
    else high = distance;
  }
  return found;
}
