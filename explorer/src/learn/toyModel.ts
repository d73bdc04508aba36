// A toy model with 6 words and 3 hidden numbers, small enough to check by hand; that of `lmhead demo`,
// with a tree for hierarchical softmax.

import type { Matrix, Vector } from "../math/linear";

export const HIDDEN: Vector = [2, 1, -1];
export const WEIGHT: Matrix = [
  [1.5, 0.2, 0.1],
  [0.5, 1.4, -0.1],
  [0.6, 1.0, 0.2],
  [0.3, 0.1, -0.5],
  [0.1, -0.4, -0.2],
  [-0.6, -0.3, 0.5],
];
/** The word that step "bias" gives a bias: "taxes". */
export const BIASED = 5;
/** The direction of a sublayer's output. Its numbers differ, because LayerNorm removes what all have in common. */
export const SUBLAYER: Vector = [1, -1, 2];
/** The keys of three earlier positions. */
export const KEYS: Matrix = [
  [0.9, 0.1, -0.3],
  [-0.4, 1.2, 0.5],
  [0.2, -0.6, 1.1],
];
export const COUNTS: Vector = [50, 30, 20, 12, 6, 2];
export const FORKS: Matrix = [
  [0.5, -0.2, 0.3],
  [-0.4, 0.6, 0.1],
  [0.2, 0.8, -0.6],
  [0.3, -0.7, 0.2],
  [-0.5, 0.4, 0.6],
];
