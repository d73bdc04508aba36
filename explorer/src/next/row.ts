// One row of logits of a whole vocabulary, sorted once: the model's own distribution.

import { Order, at } from "./order";
import type { Said } from "./penalties";
import { Processed, type Settings } from "./processed";

export type { Said, Whose } from "./penalties";
export { Processed, type Cut, type Settings, type StageName } from "./processed";

export class Row {
  /** Ids, best first; of equal ones the lowest first. */
  readonly ids: Uint32Array;
  readonly entropy: number;
  /** mass[n]: how much of the probability the best n words have. */
  readonly mass: Float64Array;
  readonly order: Order;
  private readonly logTotal: number;
  private readonly made = new Map<string, readonly [string, Order]>();

  constructor(readonly logits: Float32Array) {
    this.order = Order.of(logits);
    this.ids = this.order.ids;
    this.mass = this.order.mass;
    const { odds, weighted } = this.order.at(1);
    this.logTotal = Math.log(at(odds, logits.length));
    this.entropy = this.logTotal - at(weighted, logits.length) / at(odds, logits.length);
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
    return id < this.logits.length ? this.order.placeOf(id, at(this.logits, id)) : -1;
  }

  /** What a sampler makes of it, behind what was said. */
  process(settings: Settings, said: Said = { prompt: [], output: [] }): Processed {
    return new Processed(this, settings, said);
  }

  /** An order that was made for the same reason before, or a new one: one is kept per stage. */
  remembered(stage: string, reason: string, make: () => Order): Order {
    const known = this.made.get(stage);
    if (known?.[0] === reason) return known[1];
    const order = make();
    this.made.set(stage, [reason, order]);
    return order;
  }
}
