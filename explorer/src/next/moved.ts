// An order with a few words at other places: penalties changed their scores.
//
// Nothing is copied. The words that stay keep their order and their sums; a place is found, and a
// stretch added up, by stepping over the places that were left and counting in those that came.

import { at, first, type Order, type Ranking, type Sums } from "./order";

type Running = (from: number, to: number) => number;

export class Moved implements Ranking {
  readonly size: number;
  readonly words: number;
  /** Ids and new scores of the words that moved, best first. */
  private readonly come: readonly (readonly [id: number, score: number])[];
  /** How many of the words that stay are before each of these. */
  private readonly staying: readonly number[];
  /** Places in the order that were left, lowest first. */
  private readonly left: readonly number[];

  constructor(
    private readonly order: Order,
    /** New scores by id; a word that is masked stays so. */
    changes: ReadonlyMap<number, number>,
  ) {
    [this.size, this.words] = [order.size, order.words];
    this.left = [...changes.keys()].map((id) => order.placeOf(id)).sort((a, b) => a - b);
    this.come = [...changes].sort(([a, x], [b, y]) => y - x || a - b);
    this.staying = this.come.map(([id, score]) => this.stayBefore(order.before(id, score)));
  }

  id(place: number): number {
    return this.moved(place)?.[0] ?? this.order.id(this.stayed(place));
  }

  score(place: number): number {
    return this.moved(place)?.[1] ?? this.order.score(this.stayed(place));
  }

  placeOf(id: number): number {
    const coming = this.come.findIndex(([other]) => other === id);
    if (coming >= 0) return at(this.staying, coming) + coming;
    const stays = this.stayBefore(this.order.placeOf(id));
    return stays + first(this.come.length, (n) => at(this.staying, n) > stays);
  }

  mass(from: number, to: number): number {
    const own = (id: number): number => {
      const place = this.order.placeOf(id);
      return this.order.mass(place, place + 1);
    };
    return this.sum(from, to, (a, b) => this.order.mass(a, b), ([id]) => own(id));
  }

  at(temperature: number): Sums {
    const sums = this.order.at(temperature, this.score(0));
    const odds: Running = (a, b) => sums.odds(a, b);
    const weighted: Running = (a, b) => sums.weighted(a, b);
    return {
      x: (place) => sums.of(this.score(place)),
      odds: (from, to) => this.sum(from, to, odds, ([, score]) => Math.exp(sums.of(score))),
      weighted: (from, to) =>
        this.sum(from, to, weighted, ([, score]) => (score === -Infinity ? 0 : sums.of(score) * Math.exp(sums.of(score)))),
    };
  }

  /** What words have together: those that came one by one, those that stayed by the stretch. */
  private sum(from: number, to: number, running: Running, one: (word: readonly [number, number]) => number): number {
    const [a, b] = [this.comeBefore(from), this.comeBefore(to)];
    let sum = 0;
    for (const word of this.come.slice(a, b)) sum += one(word);
    let [start, end] = [this.nth(from - a), this.nth(to - b)];
    for (let n = first(this.left.length, (i) => at(this.left, i) >= start); n < this.left.length; n++) {
      const gap = at(this.left, n);
      if (gap >= end) break;
      sum += running(start, gap);
      start = gap + 1;
    }
    return sum + running(start, end);
  }

  /** The word at a place, if it is one that came. */
  private moved(place: number): readonly [number, number] | undefined {
    const next = this.comeBefore(place);
    return at(this.staying, next) + next === place ? this.come[next] : undefined;
  }

  /** The place in the order of the word at a place, if it is one that stayed. */
  private stayed(place: number): number {
    return this.nth(place - this.comeBefore(place));
  }

  /** How many of the words that came are before a place. */
  private comeBefore(place: number): number {
    return first(this.come.length, (n) => at(this.staying, n) + n >= place);
  }

  /** How many of the words before a place of the order stay. */
  private stayBefore(place: number): number {
    return place - first(this.left.length, (n) => at(this.left, n) >= place);
  }

  /** The place in the order of the n-th word that stays. */
  private nth(n: number): number {
    return n + first(this.left.length, (i) => at(this.left, i) - i > n);
  }
}
