// The numbers of every step, and the program that computes them.

import type { Table } from "../export/csv";
import { runnable } from "../export/runnable";
import type { Strings } from "../i18n/strings";
import { drawnTokens } from "./drawStep";
import { crossEntropy, crossEntropyGradient, entropy, smoothedTruth, softmax } from "../math/softmax";
import type { CodeLines } from "../ui/exportPanel";
import { drawCode, hiddenCode, linearCode, lossCode, samplerCode, temperatureCode } from "./learnPython";
import { active, type Learn } from "./useLearn";
import { WEIGHT } from "./toyModel";

export function learnDocument(learn: Learn, words: readonly string[]): object {
  const { given, norm, hidden, logits, temperature, cards, left, seed, target, smoothing } = learn;
  const warm = logits.map((z) => z / temperature);
  return {
    words,
    hidden: { given, layer_norm: norm, used: hidden },
    weight: WEIGHT,
    logits,
    softmax: { temperature, p: softmax(warm), entropy: entropy(warm) },
    sampler: {
      stages: active(cards).map(({ name, value }) => ({ name, value })),
      kept: [...left.left.ids].sort((a, b) => a - b),
      p: [...left.probability],
    },
    drawn: { seed, tokens: drawnTokens(learn) },
    loss: {
      target,
      label_smoothing: smoothing,
      truth: smoothedTruth(words.length, target, smoothing),
      value: crossEntropy(logits, target, smoothing),
      gradient: crossEntropyGradient(logits, target, smoothing),
    },
  };
}

export function learnTables(learn: Learn, { words, common }: Strings): Table[] {
  const { logits, temperature, left, target, smoothing } = learn;
  const warm = softmax(logits.map((z) => z / temperature));
  const processed = left.probability;
  const gradient = crossEntropyGradient(logits, target, smoothing);
  return [
    {
      title: common.numbers,
      columns: ["id", "text", "logit", "softmax_p", "sampler_p", "gradient"],
      rows: words.map((word, id) => [id, word, logits[id], warm[id], processed[id], gradient[id]]),
    },
  ];
}

export function learnLines(learn: Learn): CodeLines {
  const steps = [
    hiddenCode(learn),
    linearCode(),
    temperatureCode(learn),
    samplerCode(learn),
    drawCode(learn),
    lossCode(learn),
  ];
  return { python: runnable(steps.join("\n\n")), command: "lmhead explore --no-model" };
}
