// Philox 4x32-10: noise that is a function of (seed, position, word id), chapter 16.
//
// The package draws with the same numbers, so a seeded draw here is the package's own.

import type { Vector } from "./linear";

const MULTIPLIERS = [0xd2511f53, 0xcd9e8d57] as const;
const STEPS = [0x9e3779b9, 0xbb67ae85] as const;
const ROUNDS = 10;

type Four = [number, number, number, number];

/** High and low 32 bits of a product of two 32-bit numbers. */
function multiply(a: number, b: number): [number, number] {
  const [aHigh, aLow, bHigh, bLow] = [a >>> 16, a & 0xffff, b >>> 16, b & 0xffff];
  const low = aLow * bLow;
  const middle = aHigh * bLow + (low >>> 16); // below 2^32: both factors are below 2^16
  const other = aLow * bHigh + (middle & 0xffff);
  const high = aHigh * bHigh + Math.floor(middle / 65536) + Math.floor(other / 65536);
  return [high >>> 0, Math.imul(a, b) >>> 0];
}

export function philox(counter: Four, key: readonly [number, number]): Four {
  let [c0, c1, c2, c3] = counter;
  let [k0, k1] = key;
  for (let round = 0; round < ROUNDS; round++) {
    const [high0, low0] = multiply(MULTIPLIERS[0], c0);
    const [high1, low1] = multiply(MULTIPLIERS[1], c2);
    [c0, c1, c2, c3] = [(high1 ^ c1 ^ k0) >>> 0, low1, (high0 ^ c3 ^ k1) >>> 0, low0];
    k0 = (k0 + STEPS[0]) >>> 0;
    k1 = (k1 + STEPS[1]) >>> 0;
  }
  return [c0, c1, c2, c3];
}

/** A number in (0, 1). Seed and position are whole numbers from 0 to 2^53 - 1. */
export function uniform(seed: number, position: number, id: number, stream = 0): number {
  const out = philox([id >>> 1, position >>> 0, high(position), stream], [seed >>> 0, high(seed)]);
  const [first, second] = id & 1 ? [out[2], out[3]] : [out[0], out[1]];
  const bits = first * 2 ** 21 + (second >>> 11); // 53 bits: exact
  return Math.min((bits + 0.5) * 2 ** -53, 1 - 2 ** -53);
}

/** Gumbel noise: argmax(z + g) is a draw from softmax(z). */
export function gumbel(seed: number, position: number, id: number): number {
  return -Math.log(-Math.log(uniform(seed, position, id)));
}

/** The word drawn at a position: the largest sum of logit and noise. */
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
