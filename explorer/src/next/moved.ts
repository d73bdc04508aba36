// An order with a few words at other places: penalties changed their scores.
//
// Nothing is copied. The words that stay keep their order and their sums; a place is found, and a
// stretch added up, by stepping over the places that were left and counting in those that came.

import { at, first, type Order, type Ranking, type Sums } from "./order";

type Running = (from: number, to: number) => number;

/** What the words have that came, and those that stayed, behind each of the places that matter. */
interface Behind {
  readonly come: Float64Array;
  readonly stayed: Float64Array;
}

export class Moved implements Ranking {
  readonly size: number;
  readonly words: number;
  /** Ids and new scores of the words that moved, best first. */
  private readonly come: readonly (readonly [id: number, score: number])[];
  /** How many of the words that stay are before each of these. */
  private readonly staying: readonly number[];
  /** Places in the order that were left, lowest first. */
  private readonly left: readonly number[];
  private readonly numbers: ReadonlyMap<number, number>;

  constructor(
    private readonly order: Order,
    /** New scores by id; a word that is masked stays so. */
    changes: ReadonlyMap<number, number>,
  ) {
    [this.size, this.words] = [order.size, order.words];
    this.left = [...changes.keys()].map((id) => order.placeOf(id)).sort((a, b) => a - b);
    this.come = [...changes].sort(([a, x], [b, y]) => y - x || a - b);
    this.numbers = new Map(this.come.map(([id], number) => [id, number]));
    this.staying = this.come.map(([id, score]) => this.stayBefore(order.before(id, score)));
  }

  id(place: number): number {
    return this.moved(place)?.[0] ?? this.order.id(this.stayed(place));
  }

  score(place: number): number {
    return this.moved(place)?.[1] ?? this.order.score(this.stayed(place));
  }

  placeOf(id: number): number {
    const coming = this.numbers.get(id);
    if (coming !== undefined) return at(this.staying, coming) + coming;
    const stays = this.stayBefore(this.order.placeOf(id));
    return stays + first(this.come.length, (n) => at(this.staying, n) > stays);
  }

  mass(from: number, to: number): number {
    const own = (id: number): number => {
      const place = this.order.placeOf(id);
      return this.order.mass(place, place + 1);
    };
    return this.summing((a, b) => this.order.mass(a, b), ([id]) => own(id))(from, to);
  }

  at(temperature: number): Sums {
    const sums = this.order.at(temperature, this.score(0));
    const weight = (x: number): number => (x === -Infinity ? 0 : x * Math.exp(x));
    return {
      x: (place) => sums.of(this.score(place)),
      odds: this.summing((a, b) => sums.odds(a, b), ([, score]) => Math.exp(sums.of(score))),
      weighted: this.summing((a, b) => sums.weighted(a, b), ([, score]) => weight(sums.of(score))),
    };
  }

  /** What words have together: those that came one by one, those that stayed by the stretch. */
  private summing(running: Running, one: (word: readonly [number, number]) => number): Running {
    let known: Behind | undefined;
    return (from, to) => {
      known ??= this.behind(running, one);
      const [a, b] = [this.comeBefore(from), this.comeBefore(to)];
      const [start, end] = [this.nth(from - a), this.nth(to - b)];
      const [near, far] = [this.leftBefore(start), this.leftBefore(end) - 1]; // the gaps in between
      const came = at(known.come, a) - at(known.come, b);
      if (far < near) return came + running(start, end);
      const between = at(known.stayed, near) - at(known.stayed, far);
      return came + running(start, at(this.left, near)) + between + running(at(this.left, far) + 1, end);
    };
  }

  private behind(running: Running, one: (word: readonly [number, number]) => number): Behind {
    const [come, stayed] = [new Float64Array(this.come.length + 1), new Float64Array(this.left.length + 1)];
    for (let n = this.come.length - 1; n >= 0; n--) come[n] = at(come, n + 1) + one(this.come[n] ?? [NaN, NaN]);
    for (let n = this.left.length - 1; n >= 0; n--)
      stayed[n] = at(stayed, n + 1) + running(at(this.left, n) + 1, this.left[n + 1] ?? this.size);
    return { come, stayed };
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
    return place - this.leftBefore(place);
  }

  /** How many of the places before one were left. */
  private leftBefore(place: number): number {
    return first(this.left.length, (n) => at(this.left, n) >= place);
  }

  /** The place in the order of the n-th word that stays. */
  private nth(n: number): number {
    return n + first(this.left.length, (i) => at(this.left, i) - i > n);
  }
}
