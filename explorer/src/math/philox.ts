// Philox 4x32-10: random numbers that are a function of (seed, position, token id), chapter 16.
//
// The package uses the same numbers, so a seeded draw gives the same token.

import type { Vector } from "./linear";

const MULTIPLIERS = [0xd2511f53, 0xcd9e8d57] as const;
const STEPS = [0x9e3779b9, 0xbb67ae85] as const;
const ROUNDS = 10;

type Four = [number, number, number, number];

/** The upper 32 bits of a product of two 32-bit numbers; the lower ones are Math.imul's. */
function upper(a: number, b: number): number {
  const aHigh = a >>> 16;
  const aLow = a & 0xffff;
  const bHigh = b >>> 16;
  const bLow = b & 0xffff;
  const middle = aHigh * bLow + ((aLow * bLow) >>> 16); // below 2^32: both factors are below 2^16
  const other = aLow * bHigh + (middle & 0xffff);
  return (aHigh * bHigh + (middle >>> 16) + (other >>> 16)) >>> 0;
}

export function philox(counter: Four, key: readonly [number, number]): Four {
  // No arrays inside: this runs once for every two tokens of a vocabulary.
  let [c0, c1, c2, c3] = counter;
  let [k0, k1] = key;
  for (let round = 0; round < ROUNDS; round++) {
    const first = (upper(MULTIPLIERS[1], c2) ^ c1 ^ k0) >>> 0;
    const third = (upper(MULTIPLIERS[0], c0) ^ c3 ^ k1) >>> 0;
    c1 = Math.imul(MULTIPLIERS[1], c2) >>> 0;
    c3 = Math.imul(MULTIPLIERS[0], c0) >>> 0;
    c0 = first;
    c2 = third;
    k0 = (k0 + STEPS[0]) >>> 0;
    k1 = (k1 + STEPS[1]) >>> 0;
  }
  return [c0, c1, c2, c3];
}

/** A number in (0, 1). Seed and position are integers from 0 to 2^53 - 1. */
export function uniform(seed: number, position: number, id: number, stream = 0): number {
  const out = philox([id >>> 1, position >>> 0, high(position), stream], [seed >>> 0, high(seed)]);
  return id & 1 ? fraction(out[2], out[3]) : fraction(out[0], out[1]);
}

/** From 64 random bits: (⌊bits / 2^11⌋ + 1/2) / 2^53, never 1. */
function fraction(first: number, second: number): number {
  const bits = first * 2 ** 21 + (second >>> 11); // 53 bits: exact
  return Math.min((bits + 0.5) * 2 ** -53, 1 - 2 ** -53);
}

/** Gumbel noise: argmax(z + g) is a draw from softmax(z). */
export function gumbel(seed: number, position: number, id: number): number {
  return -Math.log(-Math.log(uniform(seed, position, id)));
}

/** Gumbel noise of all token ids below `size`; one call of Philox gives two. */
export function gumbels(seed: number, position: number, size: number): Float64Array {
  const noise = new Float64Array(size);
  const key = [seed >>> 0, high(seed)] as const;
  for (let id = 0; id < size; id += 2) {
    const out = philox([id >>> 1, position >>> 0, high(position), 0], key);
    noise[id] = -Math.log(-Math.log(fraction(out[0], out[1])));
    if (id + 1 < size) noise[id + 1] = -Math.log(-Math.log(fraction(out[2], out[3])));
  }
  return noise;
}

/** The token drawn at a position: the largest sum of logit and noise. */
export function draw(z: Vector, seed: number, position: number): number {
  let best = -1;
  let largest = -Infinity;
  z.forEach((value, id) => {
    if (value === -Infinity) return;
    const noisy = value + gumbel(seed, position, id);
    if (noisy > largest) [best, largest] = [id, noisy];
  });
  return best;
}

function high(x: number): number {
  return Math.floor(x / 2 ** 32) >>> 0;
}
