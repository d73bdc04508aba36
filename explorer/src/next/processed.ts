// A row behind a sampler: penalties move words, a temperature spreads them, cuts keep some.
//
// The stages come in the order of Hugging Face or of llama.cpp, as in `lmhead.sampling.dialects`.

import { Kept, minP, topK, topP, typicalP } from "./kept";
import { Moved } from "./moved";
import type { Noise } from "./noise";
import { at, type Ranking, type Sums } from "./order";
import { counted, counts, repeated, repetition, type Said, type Whose } from "./penalties";
import type { Row } from "./row";

/** What is left out does nothing. */
export interface Settings {
  readonly temperature?: number;
  /** 0: all. */
  readonly topK?: number;
  readonly topP?: number;
  readonly minP?: number;
  readonly typicalP?: number;
  readonly repetition?: number;
  readonly frequency?: number;
  readonly presence?: number;
  readonly order?: Whose;
}

export type StageName =
  | "repetition_penalty"
  | "frequency_penalty"
  | "temperature"
  | "top_k"
  | "top_p"
  | "min_p"
  | "typical_p";

/** The distribution behind a stage. */
export interface Cut {
  readonly name: StageName;
  /** How many words are left. */
  readonly left: number;
  /** How much of the model's probability they have. */
  readonly mass: number;
  readonly entropy: number;
  /** The id of the best one, and its probability. */
  readonly best: number;
  readonly bestP: number;
  readonly kept: Kept;
  /** How much of this distribution a later stage leaves. */
  share(later: Kept): number;
}

const CUTS: Record<Whose, readonly StageName[]> = {
  hf: ["temperature", "top_k", "top_p", "min_p", "typical_p"],
  "llama.cpp": ["top_k", "typical_p", "top_p", "min_p", "temperature"],
};

export class Processed {
  readonly words: number;
  readonly cuts: readonly Cut[];
  readonly entropy: number;
  private readonly kept: Kept;
  private readonly order: Ranking;
  private readonly sums: Sums;
  private readonly total: number;

  constructor(
    private readonly row: Row,
    private readonly settings: Settings,
    said: Said,
  ) {
    const order = (settings.order ?? "hf") satisfies Whose;
    const cuts: Cut[] = [];
    this.order = this.penalised(said, order, cuts);
    this.sums = this.order.at(1);
    this.kept = Kept.best(this.order.words);
    for (const name of CUTS[order]) {
      if (name === "temperature") {
        const { temperature = 1 } = settings;
        if (temperature === 1) continue;
        this.sums = this.order.at(temperature);
      } else {
        const kept = this.cut(name);
        if (!kept) continue;
        this.kept = kept;
      }
      cuts.push(look(name, this.order, this.sums, this.kept));
    }
    this.cuts = cuts;
    this.words = this.kept.words;
    this.total = this.kept.odds(this.sums);
    this.entropy = this.kept.entropy(this.sums);
  }

  /** The probability of the word at a place of the model's ranking, 0 if it was struck out. */
  p(place: number): number {
    const here = this.place(place);
    return this.kept.has(here) ? Math.exp(this.sums.x(here)) / this.total : 0;
  }

  /** Whether the word at a place of the model's ranking is left. */
  has(place: number): boolean {
    return this.kept.has(this.place(place));
  }

  /** The stage that struck out the word at a place of the model's ranking. */
  cutBy(place: number): StageName | undefined {
    const here = this.place(place);
    return this.cuts.find(({ kept }) => !kept.has(here))?.name;
  }

  /** The places in the model's ranking of the sampler's best words. */
  best(n: number): number[] {
    const some = Math.min(n, this.words);
    return Array.from({ length: some }, (_, i) => this.row.placeOf(this.order.id(this.kept.place(i))));
  }

  /**
   * The place, in the model's ranking, of the word that is drawn with the noise of all words.
   *
   * The best words and the loudest ones are tried in turn, until no other can have a larger sum.
   */
  draw(noise: Noise): number {
    let [best, largest] = [Infinity, -Infinity];
    const consider = (place: number): void => {
      if (!this.kept.has(place)) return;
      const noisy = this.sums.x(place) + at(noise.of, this.order.id(place));
      if (noisy > largest || (noisy === largest && place < best)) [best, largest] = [place, noisy];
    };
    for (let n = 0; n < this.words; n++) {
      const place = this.kept.place(n);
      if (this.sums.x(place) + noise.most(n) < largest) break;
      consider(place);
      if (n < noise.loudest.length) consider(this.order.placeOf(at(noise.loudest, n)));
    }
    return this.row.placeOf(this.order.id(best));
  }

  /** From a place in the model's ranking to one in the sampler's. */
  private place(place: number): number {
    if (this.order === this.row.order) return place;
    return this.order.placeOf(at(this.row.ids, place));
  }

  private penalised(said: Said, whose: Whose, cuts: Cut[]): Ranking {
    const { repetition: factor = 1, frequency = 0, presence = 0 } = this.settings;
    const size = this.row.logits.length;
    const scores = new Map<number, number>();
    const score = (id: number): number => scores.get(id) ?? at(this.row.logits, id);
    let order: Ranking = this.row.order;
    const move = (name: StageName, changes: ReadonlyMap<number, number>): void => {
      changes.forEach((value, id) => scores.set(id, value));
      if (changes.size) order = new Moved(this.row.order, scores);
      cuts.push(look(name, order, order.at(1), Kept.best(order.words)));
    };
    if (factor !== 1) {
      const ids = repeated(said, whose).filter((id) => id < size);
      move("repetition_penalty", repetition(ids, factor, score));
    }
    if (frequency !== 0 || presence !== 0) {
      const ids = counted(said, whose).filter((id) => id < size);
      move("frequency_penalty", counts(ids, frequency, presence, score));
    }
    return order;
  }

  /** What a cut leaves; nothing for one that is off. */
  private cut(name: StageName): Kept | undefined {
    const { topK: k = 0, topP: p = 1, minP: m = 0, typicalP: typical = 1 } = this.settings;
    if (name === "top_k" && k > 0) return topK(this.kept, k);
    if (name === "top_p" && p < 1) return topP(this.kept, p, this.sums);
    if (name === "min_p" && m > 0) return minP(this.kept, m, this.sums);
    if (name === "typical_p" && typical < 1) return typicalP(this.kept, typical, this.sums, this.order);
    return undefined;
  }
}

function look(name: StageName, order: Ranking, sums: Sums, kept: Kept): Cut {
  const place = kept.place(0);
  return {
    name,
    left: kept.words,
    mass: kept.mass(order),
    entropy: kept.entropy(sums),
    best: order.id(place),
    bestP: Math.exp(sums.x(place)) / kept.odds(sums),
    kept,
    share: (later) => later.odds(sums) / kept.odds(sums),
  };
}
