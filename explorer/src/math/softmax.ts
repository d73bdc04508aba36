// Softmax, its entropy, and the loss: chapters 2, 4 and 5 of `lmhead.reference`.
//
// A logit of -Infinity is a masked token: its probability is 0.

import { sum, type Matrix, type Vector } from "./linear";

/** e^(z/T - m) / Σ e^(z/T - m), with m the largest z/T: nothing overflows. */
export function softmax(z: Vector, temperature = 1): number[] {
  const scaled = z.map((value) => value / temperature);
  const m = Math.max(...scaled);
  const e = scaled.map((value) => Math.exp(value - m));
  const total = sum(e);
  return e.map((value) => value / total);
}

export function logSoftmax(z: Vector): number[] {
  const m = Math.max(...z);
  const logTotal = Math.log(sum(z.map((value) => Math.exp(value - m))));
  return z.map((value) => value - m - logTotal);
}

/** -Σ p log p in nats, where 0 · log 0 = 0. */
export function entropy(z: Vector): number {
  return -sum(logSoftmax(z).map((logP) => (logP === -Infinity ? 0 : Math.exp(logP) * logP)));
}

/** x / Σ x: plain normalisation. */
export function normalize(x: Vector): number[] {
  const total = sum(x);
  return x.map((value) => value / total);
}

/** The smoothed label: (1 - ε) · one-hot + ε / V. */
export function smoothedTruth(size: number, target: number, smoothing: number): number[] {
  return Array.from({ length: size }, (_, v) => (1 - smoothing) * (v === target ? 1 : 0) + smoothing / size);
}

/** -Σ y log p. */
export function crossEntropy(z: Vector, target: number, smoothing = 0): number {
  const y = smoothedTruth(z.length, target, smoothing);
  return -sum(logSoftmax(z).map((logP, v) => logP * (y[v] ?? 0)));
}

/** p - y. */
export function crossEntropyGradient(z: Vector, target: number, smoothing = 0): number[] {
  const y = smoothedTruth(z.length, target, smoothing);
  return softmax(z).map((p, v) => p - (y[v] ?? 0));
}

/** One gradient step on the weight: W - rate · (p - y) hᵀ. */
export function stepDown(weight: Matrix, h: Vector, gradient: Vector, rate: number): number[][] {
  return weight.map((row, v) => row.map((w, d) => w - rate * ((gradient[v] ?? 0) * (h[d] ?? 0))));
}
