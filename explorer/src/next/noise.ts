// The noise of all words at a position, and the words that have most of it.

import { at } from "./order";

const MANY = 4096; // loud words, about

export class Noise {
  /** The ids of the loudest words, loudest first. */
  readonly loudest: Uint32Array;
  /** What no other word has more of. */
  private readonly floor: number;

  constructor(readonly of: Float64Array) {
    // Of Gumbel's noise, a share of exp(-x) is above x.
    this.floor = of.length > MANY ? Math.log(of.length / MANY) : -Infinity;
    const loud: number[] = [];
    for (let id = 0; id < of.length; id++) if (at(of, id) > this.floor) loud.push(id);
    this.loudest = Uint32Array.from(loud).sort((a, b) => at(of, b) - at(of, a));
  }

  /** The most that a word has which is not among the n loudest. */
  most(n: number): number {
    return n < this.loudest.length ? at(this.of, at(this.loudest, n)) : this.floor;
  }
}
