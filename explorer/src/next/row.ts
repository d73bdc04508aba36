// One row of logits of a whole vocabulary, sorted once: the model's own distribution.

import { Order } from "./order";
import type { Said } from "./penalties";
import { Processed, type Settings } from "./processed";

export type { Said, Whose } from "./penalties";
export { Processed, type Cut, type Settings, type StageName } from "./processed";

export class Row {
  /** Ids, best first; of equal ones the lowest first. */
  readonly ids: Uint32Array;
  readonly entropy: number;
  readonly order: Order;
  private readonly logTotal: number;

  constructor(readonly logits: Float32Array) {
    this.order = Order.of(logits);
    this.ids = this.order.ids;
    const sums = this.order.at(1);
    const odds = sums.odds(0, logits.length);
    this.logTotal = Math.log(odds);
    this.entropy = this.logTotal - sums.weighted(0, logits.length) / odds;
  }

  /** The model's own probability of the word at a place. */
  p(place: number): number {
    return Math.exp(this.logP(place));
  }

  logP(place: number): number {
    return this.order.at(1).x(place) - this.logTotal;
  }

  /** The place of an id, 0 for the best. */
  placeOf(id: number): number {
    return id < this.logits.length ? this.order.placeOf(id) : -1;
  }

  /** What a sampler makes of it, behind what was said. */
  process(settings: Settings, said: Said = { prompt: [], output: [] }): Processed {
    return new Processed(this, settings, said);
  }
}
