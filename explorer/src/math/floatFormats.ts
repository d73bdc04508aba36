// Rounding to float32 and float16, and softmax computed in them.

import type { Vector } from "./linear";

export type Format = "fp32" | "fp16";

/** The nearest float16, ties to even; beyond 65504 it is ±Infinity. */
export function toHalf(x: number): number {
  if (!Number.isFinite(x) || x === 0) return x;
  const exponent = Math.max(Math.floor(Math.log2(Math.abs(x))), -14); // -14: below are subnormals
  const unit = 2 ** (exponent - 10);
  const rounded = roundEven(x / unit) * unit;
  return Math.abs(rounded) >= 65520 ? Math.sign(x) * Infinity : rounded;
}

function roundEven(x: number): number {
  const low = Math.floor(x);
  const rest = x - low;
  if (rest !== 0.5) return Math.round(x);
  return low % 2 === 0 ? low : low + 1;
}

export function round(x: number, format: Format): number {
  return format === "fp32" ? Math.fround(x) : toHalf(x);
}

/** The largest logit whose exponential still fits. */
export const LIMIT: Record<Format, number> = {
  fp32: Math.log(3.4028234663852886e38), // 88.72
  fp16: Math.log(65504), // 11.09
};

export interface Worked {
  readonly exponentials: number[];
  readonly total: number;
  readonly p: number[];
}

/** e^z / Σ e^z computed literally, every result rounded to the format. */
export function naive(z: Vector, format: Format): Worked {
  const exponentials = z.map((value) => round(Math.exp(round(value, format)), format));
  const total = exponentials.reduce((sum, e) => round(sum + e, format), 0);
  return { exponentials, total, p: exponentials.map((e) => round(e / total, format)) };
}

/** The same after the largest logit was subtracted. */
export function stable(z: Vector, format: Format): Worked {
  const rounded = z.map((value) => round(value, format));
  const m = Math.max(...rounded);
  return naive(
    rounded.map((value) => round(value - m, format)),
    format,
  );
}
