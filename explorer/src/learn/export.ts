// The story to take along: the numbers of every step, and the program that makes them.

import type { Table } from "../export/csv";
import type { Strings } from "../i18n";
import { kept } from "../math/filters";
import { draw } from "../math/philox";
import { crossEntropy, crossEntropyGradient, entropy, smoothedTruth, softmax } from "../math/softmax";
import type { Lines } from "../ui/export";
import { drawCode, hiddenCode, linearCode, lossCode, samplerCode, temperatureCode } from "./python";
import { active, type Learn } from "./state";
import { WEIGHT } from "./toy";

export function learnDocument(learn: Learn, words: readonly string[]): object {
  const { given, norm, hidden, logits, temperature, cards, left, seed, draws, target, smoothing } = learn;
  const warm = logits.map((z) => z / temperature);
  return {
    words,
    hidden: { given, layer_norm: norm, used: hidden },
    weight: WEIGHT,
    logits,
    softmax: { temperature, p: softmax(warm), entropy: entropy(warm) },
    sampler: {
      stages: active(cards).map(({ name, value }) => ({ name, value })),
      kept: kept(left.logits).sort((a, b) => a - b),
      p: softmax(left.logits),
    },
    drawn: { seed, tokens: Array.from({ length: Number(draws) }, (_, at) => draw(left.logits, seed, at)) },
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
  const processed = softmax(left.logits);
  const gradient = crossEntropyGradient(logits, target, smoothing);
  return [
    {
      title: common.numbers,
      columns: ["id", "text", "logit", "softmax_p", "sampler_p", "gradient"],
      rows: words.map((word, id) => [id, word, logits[id], warm[id], processed[id], gradient[id]]),
    },
  ];
}

export function learnLines(learn: Learn): Lines {
  const steps = [hiddenCode(learn), linearCode(), temperatureCode(learn), samplerCode(learn), drawCode(learn), lossCode(learn)];
  return { python: `${steps.join("\n\n")}\n`, command: "lmhead explore --no-model" };
}
