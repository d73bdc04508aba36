// All words of a vocabulary by their scores, best first; of equal ones the lowest id first.
//
// Sorted once. After that nothing is sorted again: a penalty moves a few words to other places, a
// temperature moves none, and its running sums answer for any stretch of words in no time.

const ID_BITS = 2 ** 21;

export class Order {
  /** mass[n]: how much of the model's probability the first n words have. */
  readonly mass: Float64Array;
  /** How many words are not masked; those that are come last. */
  readonly words: number;
  private one: Sums | undefined;
  private other: Sums | undefined;

  constructor(
    readonly ids: Uint32Array,
    /** In the same order. */
    readonly scores: Float64Array,
    /** The model's probabilities, in the same order. */
    private readonly p: Float64Array,
  ) {
    this.mass = new Float64Array(ids.length + 1);
    let sum = 0;
    for (let place = 0; place < ids.length; place++) this.mass[place + 1] = sum += at(p, place);
    this.words = first(ids.length, (place) => at(scores, place) === -Infinity);
  }

  static of(logits: Float32Array): Order {
    const ids = sorted(logits);
    const scores = new Float64Array(ids.length);
    const p = new Float64Array(ids.length);
    const largest = at(logits, ids[0] ?? 0);
    let sum = 0;
    for (let place = 0; place < ids.length; place++) {
      const score = (scores[place] = at(logits, at(ids, place)));
      sum += p[place] = Math.exp(score - largest);
    }
    for (let place = 0; place < ids.length; place++) p[place] = at(p, place) / sum;
    return new Order(ids, scores, p);
  }

  /** Where a word stands, by its id and score. */
  placeOf(id: number, score: number): number {
    return first(this.ids.length, (place) => {
      const here = at(this.scores, place);
      return here < score || (here === score && at(this.ids, place) >= id);
    });
  }

  /** The same words, a few of them with other scores: they are taken out and put in again. */
  moved(changes: ReadonlyMap<number, number>): Order {
    const size = this.ids.length;
    const away = new Uint8Array(size);
    const own = new Map<number, number>();
    const coming = [...changes].sort(([a, x], [b, y]) => y - x || a - b);
    const [ids, scores, p] = [new Uint32Array(size), new Float64Array(size), new Float64Array(size)];
    for (const id of changes.keys()) away[id] = 1;
    for (let place = 0; place < size; place++) {
      const id = at(this.ids, place);
      if (away[id]) own.set(id, at(this.p, place));
    }
    let [to, next] = [0, 0];
    const put = (id: number, score: number, mass: number): void => {
      ids[to] = id;
      scores[to] = score;
      p[to++] = mass;
    };
    for (let place = 0; place < size; place++) {
      const [id, score] = [at(this.ids, place), at(this.scores, place)];
      if (away[id]) continue;
      for (; next < coming.length; next++) {
        const [other, given] = coming[next] as [number, number];
        if (given < score || (given === score && other > id)) break;
        put(other, given, own.get(other) ?? NaN);
      }
      put(id, score, at(this.p, place));
    }
    for (const [other, given] of coming.slice(next)) put(other, given, own.get(other) ?? NaN);
    return new Order(ids, scores, p);
  }

  /** The sums at a temperature; those at 1 and at the last other one are kept. */
  at(temperature: number): Sums {
    if (temperature === 1) return (this.one ??= new Sums(this.scores, 1));
    if (this.other?.temperature !== temperature) this.other = new Sums(this.scores, temperature);
    return this.other;
  }
}

/** Running sums over an order at a temperature; x is a score less the largest one, divided. */
export class Sums {
  /** odds[n]: Σ exp(x) of the first n words. */
  readonly odds: Float64Array;
  /** weighted[n]: Σ x · exp(x). */
  readonly weighted: Float64Array;

  constructor(
    private readonly scores: Float64Array,
    readonly temperature: number,
  ) {
    this.odds = new Float64Array(scores.length + 1);
    this.weighted = new Float64Array(scores.length + 1);
    let [odds, weighted] = [0, 0];
    for (let place = 0; place < scores.length; place++) {
      const x = this.x(place);
      const e = Math.exp(x);
      odds += e;
      if (e > 0) weighted += e * x;
      this.odds[place + 1] = odds;
      this.weighted[place + 1] = weighted;
    }
  }

  x(place: number): number {
    return (at(this.scores, place) - at(this.scores, 0)) / this.temperature;
  }
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
