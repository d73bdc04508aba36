// One row of logits of a whole vocabulary, sorted once, so that a slider costs one pass over it.
//
// Temperature keeps the order of words, and top-k, top-p and min-p each keep the best so many. So
// every chain of them is a number of words in the sorted row.

export type Order = "hf" | "llama.cpp";

export interface Settings {
  readonly temperature: number;
  /** 0: all. */
  readonly topK: number;
  readonly topP: number;
  readonly minP: number;
  readonly order: Order;
}

export class Row {
  /** Ids, best first; of equal ones the lowest first. */
  readonly ids: Uint32Array;
  /** Their logits less the largest one, in the same order. */
  readonly below: Float64Array;
  readonly largest: number;
  readonly logSum: number;
  readonly entropy: number;
  /** mass[n]: how much of the probability the best n words have. */
  readonly mass: Float64Array;
  private places: Uint32Array | undefined;

  constructor(readonly logits: Float32Array) {
    this.ids = Uint32Array.from(logits, (_, id) => id).sort((a, b) => at(logits, b) - at(logits, a) || a - b);
    this.largest = at(logits, this.ids[0] ?? 0);
    this.below = Float64Array.from(this.ids, (id) => at(logits, id) - this.largest);
    let [sum, weighted] = [0, 0];
    for (const z of this.below) {
      const e = Math.exp(z);
      sum += e;
      if (e > 0) weighted += e * z;
    }
    this.logSum = Math.log(sum);
    this.entropy = this.logSum - weighted / sum;
    this.mass = new Float64Array(logits.length + 1);
    this.below.forEach((z, place) => (this.mass[place + 1] = at(this.mass, place) + Math.exp(z) / sum));
  }

  /** The model's own probability of the word at a place. */
  p(place: number): number {
    return Math.exp(at(this.below, place) - this.logSum);
  }

  /** The place of an id, 0 for the best. */
  placeOf(id: number): number {
    if (!this.places) {
      this.places = new Uint32Array(this.ids.length);
      this.ids.forEach((word, place) => ((this.places as Uint32Array)[word] = place));
    }
    return this.places[id] ?? -1;
  }

  process(settings: Settings): Processed {
    return new Processed(this, settings);
  }
}

export interface Cut {
  readonly name: "temperature" | "top_k" | "top_p" | "min_p";
  /** How many words are left after it. */
  readonly left: number;
  /** How much of the model's probability they have. */
  readonly mass: number;
}

export class Processed {
  readonly words: number;
  readonly cuts: readonly Cut[];
  readonly entropy: number;
  private readonly total: number;

  constructor(
    private readonly row: Row,
    private readonly settings: Settings,
  ) {
    const { temperature, topK, topP, minP, order } = settings;
    const first = order === "hf";
    const warm = (place: number): number => Math.exp(at(row.below, place) / (first ? temperature : 1));
    const cuts: Cut[] = [];
    let left = row.ids.length;
    const note = (name: Cut["name"]): void => void cuts.push({ name, left, mass: at(row.mass, left) });

    if (first && temperature !== 1) note("temperature");
    if (topK > 0) {
      left = Math.min(left, topK);
      note("top_k");
    }
    if (topP < 1) {
      const odds = new Float64Array(left);
      let total = 0;
      for (let place = 0; place < left; place++) total += odds[place] = warm(place);
      let [before, kept] = [0, 0];
      while (kept < left && before < topP * total) before += at(odds, kept++);
      left = Math.max(kept, 1);
      note("top_p");
    }
    if (minP > 0) {
      let kept = 1;
      while (kept < left && warm(kept) >= minP) kept++;
      left = kept;
      note("min_p");
    }
    if (!first && temperature !== 1) note("temperature");

    let [total, weighted] = [0, 0];
    for (let place = 0; place < left; place++) {
      const z = at(row.below, place) / temperature;
      const e = Math.exp(z);
      total += e;
      if (e > 0) weighted += e * z;
    }
    this.words = left;
    this.cuts = cuts;
    this.total = total;
    this.entropy = Math.log(total) - weighted / total;
  }

  /** The probability of the word at a place, 0 if it was struck out. */
  p(place: number): number {
    if (place >= this.words) return 0;
    return Math.exp(at(this.row.below, place) / this.settings.temperature) / this.total;
  }

  /** The place of the word that is drawn with the noise of all words, `gumbels`. */
  draw(noise: Float64Array): number {
    let best = 0;
    let largest = -Infinity;
    for (let place = 0; place < this.words; place++) {
      const id = at(this.row.ids, place);
      const noisy = at(this.row.logits, id) / this.settings.temperature + at(noise, id);
      if (noisy > largest) {
        best = place;
        largest = noisy;
      }
    }
    return best;
  }
}

function at(x: { readonly [place: number]: number }, place: number): number {
  return x[place] ?? NaN;
}
