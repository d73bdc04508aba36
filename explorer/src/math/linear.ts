// Dot products, LayerNorm and sigmoid, as in chapters 1 and 7 of `lmhead.reference`.

export type Vector = readonly number[];
export type Matrix = readonly Vector[];

export function dot(a: Vector, b: Vector): number {
  return a.reduce((sum, x, i) => sum + x * (b[i] ?? NaN), 0);
}

/** One score per row: y[v] = Σ_d x[d] · W[v][d]. */
export function linear(x: Vector, weight: Matrix): number[] {
  return weight.map((row) => dot(row, x));
}

export function sum(x: Vector): number {
  return x.reduce((total, value) => total + value, 0);
}

export function mean(x: Vector): number {
  return sum(x) / x.length;
}

/** Divided by D, not by D - 1. */
export function variance(x: Vector): number {
  const m = mean(x);
  return mean(x.map((value) => (value - m) ** 2));
}

/** (x - mean) / √(var + ε): mean 0, variance 1, both signs. */
export function layerNorm(x: Vector, eps = 1e-5): number[] {
  const m = mean(x);
  const spread = Math.sqrt(variance(x) + eps);
  return x.map((value) => (value - m) / spread);
}

/** 1 / (1 + e^-x), written so that no e^|x| overflows. */
export function sigmoid(x: number): number {
  const small = Math.exp(-Math.abs(x));
  return (x >= 0 ? 1 : small) / (1 + small);
}

/** A copy with one entry replaced. */
export function replaced(x: Vector, index: number, value: number): number[] {
  return x.map((old, at) => (at === index ? value : old));
}
