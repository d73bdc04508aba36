// All words of a vocabulary by their scores, best first; of equal ones the lowest id first.
//
// Sorted once. After that nothing is sorted again: a temperature moves no word, and its running sums
// answer for any stretch of words in no time. What penalties move stands in `moved.ts`.

const ID_BITS = 2 ** 21;
// Scores this far from what the sums start at, temperature applied, are in the range of exp.
const REACH = 300;
const BLOCK = 64; // words between two sums that are kept

/** Words in an order, by place from 0. */
export interface Ranking {
  readonly size: number;
  /** How many words are not masked; those that are come last. */
  readonly words: number;
  id(place: number): number;
  score(place: number): number;
  placeOf(id: number): number;
  /** How much of the model's probability the words of a stretch have. */
  mass(from: number, to: number): number;
  at(temperature: number): Sums;
}

/** A ranking at a temperature: x is a score less one that all share, divided. */
export interface Sums {
  x(place: number): number;
  /** Σ exp(x) of a stretch. */
  odds(from: number, to: number): number;
  /** Σ x · exp(x) of a stretch. */
  weighted(from: number, to: number): number;
}

/** The model's own order. */
export class Order implements Ranking {
  readonly words: number;
  private readonly one: RunningSums;
  private other: RunningSums | undefined;

  private constructor(
    private readonly logits: Float32Array,
    readonly ids: Uint32Array,
    /** In the same order. */
    private readonly scores: Float32Array,
  ) {
    this.words = first(ids.length, (place) => at(scores, place) === -Infinity);
    this.one = new RunningSums(scores, 1, at(scores, 0));
  }

  static of(logits: Float32Array): Order {
    const ids = sorted(logits);
    const scores = new Float32Array(ids.length);
    for (let place = 0; place < ids.length; place++) scores[place] = at(logits, at(ids, place));
    return new Order(logits, ids, scores);
  }

  get size(): number {
    return this.ids.length;
  }

  id(place: number): number {
    return at(this.ids, place);
  }

  score(place: number): number {
    return at(this.scores, place);
  }

  placeOf(id: number): number {
    return this.before(id, at(this.logits, id));
  }

  /** How many words come before one that had this id and score. */
  before(id: number, score: number): number {
    return first(this.size, (place) => {
      const here = at(this.scores, place);
      return here < score || (here === score && at(this.ids, place) >= id);
    });
  }

  mass(from: number, to: number): number {
    return this.one.odds(from, to) / this.one.odds(0, this.size);
  }

  /**
   * The sums at a temperature; those at 1 and the last others are kept.
   *
   * `best` is the largest score that counts, if it is another than the order's: words above it are
   * taken to be gone.
   */
  at(temperature: number, best = this.score(0)): RunningSums {
    const own = this.score(0);
    const top = Math.abs(best - own) <= REACH * temperature ? own : best;
    if (this.one.is(temperature, top)) return this.one;
    if (!this.other?.is(temperature, top)) this.other = new RunningSums(this.scores, temperature, top);
    return this.other;
  }
}

/**
 * Sums over everything behind a place: of the small numbers there, none is lost in a large one.
 *
 * Kept for every so many words; what lies between is added up when it is asked for.
 */
export class RunningSums implements Sums {
  private readonly behind: Float64Array;
  private readonly turned: Float64Array;

  constructor(
    private readonly scores: Float32Array,
    readonly temperature: number,
    readonly top: number,
  ) {
    const blocks = Math.ceil(scores.length / BLOCK);
    [this.behind, this.turned] = [new Float64Array(blocks + 1), new Float64Array(blocks + 1)];
    let [odds, weighted] = [0, 0];
    for (let place = scores.length - 1; place >= 0; place--) {
      const x = (at(scores, place) - top) / temperature;
      const e = odd(x);
      odds += e;
      if (e > 0) weighted += e * x;
      if (place % BLOCK) continue;
      this.behind[place / BLOCK] = odds;
      this.turned[place / BLOCK] = weighted;
    }
  }

  is(temperature: number, top: number): boolean {
    return this.temperature === temperature && Object.is(this.top, top);
  }

  x(place: number): number {
    return this.of(at(this.scores, place));
  }

  /** The x of a score. */
  of(score: number): number {
    return (score - this.top) / this.temperature;
  }

  odds(from: number, to: number): number {
    return this.sum(this.behind, from, to, odd);
  }

  weighted(from: number, to: number): number {
    return this.sum(this.turned, from, to, (x) => (odd(x) > 0 ? odd(x) * x : 0));
  }

  private sum(running: Float64Array, from: number, to: number, of: (x: number) => number): number {
    const [first, last] = [Math.ceil(from / BLOCK), Math.floor(to / BLOCK)];
    if (last <= first) return this.part(from, to, of);
    const between = at(running, first) - at(running, last);
    return this.part(from, first * BLOCK, of) + between + this.part(last * BLOCK, to, of);
  }

  private part(from: number, to: number, of: (x: number) => number): number {
    let sum = 0;
    for (let place = to - 1; place >= from; place--) sum += of(this.x(place));
    return sum;
  }
}

/** Of words above all that count, nothing. */
function odd(x: number): number {
  return x > 0 ? 0 : Math.exp(x);
}

/** The ids by descending logit. */
function sorted(logits: Float32Array): Uint32Array {
  const size = logits.length;
  if (size > ID_BITS) return Uint32Array.from(logits, (_, id) => id).sort((a, b) => at(logits, b) - at(logits, a) || a - b);
  // One number holds both, 32 bits of the logit and 21 of the id: sorted without a call per pair.
  const bits = new Uint32Array(Float32Array.from(logits, (z) => z + 0).buffer); // -0 is 0
  const keys = new Float64Array(size);
  for (let id = 0; id < size; id++) {
    const word = at(bits, id);
    const descending = word >>> 31 ? word : ~(word | 0x80000000) >>> 0;
    keys[id] = descending * ID_BITS + id;
  }
  keys.sort();
  return Uint32Array.from(keys, (key) => key % ID_BITS);
}

/** The first number below `size` that has it, where all behind it do too; `size` if none does. */
export function first(size: number, has: (n: number) => boolean): number {
  let [low, high] = [0, size];
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (has(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

export function at(x: { readonly [place: number]: number }, place: number): number {
  return x[place] ?? NaN;
}
