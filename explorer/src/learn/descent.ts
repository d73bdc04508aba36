// Gradient descent on W of the toy model.

import { linear, type Matrix } from "../math/linear";
import { crossEntropy, crossEntropyGradient, stepDown } from "../math/softmax";
import { WEIGHT } from "./toyModel";
import type { Learn } from "./useLearn";

/** The weight and logits after the steps, and the loss after 0, 1, ... steps. */
export function descend(learn: Learn): { weight: Matrix; logits: number[]; losses: number[] } {
  const { hidden, target, smoothing, rate, steps } = learn;
  let weight: Matrix = WEIGHT;
  let logits = learn.logits;
  const losses = [crossEntropy(logits, target, smoothing)];
  for (let k = 0; k < steps; k++) {
    weight = stepDown(weight, hidden, crossEntropyGradient(logits, target, smoothing), rate);
    logits = linear(hidden, weight);
    losses.push(crossEntropy(logits, target, smoothing));
  }
  return { weight, logits, losses };
}
