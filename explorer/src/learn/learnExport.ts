// The numbers of every step, and the program that computes them.

import type { Table } from "../export/csv";
import { runnable } from "../export/runnable";
import type { Strings } from "../i18n/strings";
import { crossEntropy, crossEntropyGradient, entropy, smoothedTruth, softmax } from "../math/softmax";
import type { About, CodeLines } from "../ui/exportPanel";
import { fixed } from "../ui/format";
import { drawnTokens, STEP_CODE, STEP_IDS } from "./learnPython";
import { active, type Learn } from "./useLearn";
import { WEIGHT } from "./toyModel";

export function learnDocument(learn: Learn, strings: Strings): object {
  const { words } = strings;
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
      kept: left.ids().sort((a, b) => a - b),
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
    steps: STEP_IDS.map((id, at) => {
      const { code, values } = STEP_CODE[id](learn);
      return { step: at + 1, name: id, title: strings[id].title, python: code, values: values.map(jsonNumbers) };
    }),
  };
}

export function learnTables(learn: Learn, { words, intro }: Strings): Table[] {
  const { logits, temperature, left, target, smoothing } = learn;
  const warm = softmax(logits.map((z) => z / temperature));
  const processed = left.probability;
  const gradient = crossEntropyGradient(logits, target, smoothing);
  return [
    {
      title: intro.all_words,
      columns: ["id", "text", "logit", "softmax_p", "sampler_p", "gradient"],
      rows: words.map((word, id) => [id, word, logits[id], warm[id], processed[id], gradient[id]]),
    },
  ];
}

/** The Python code of all steps as one program. */
export function learnLines(learn: Learn): CodeLines {
  const program = STEP_IDS.map((id, at) => `# ${at + 1}. ${id}\n${STEP_CODE[id](learn).code}`);
  return { python: runnable(program.join("\n\n")), command: "lmhead explore --no-model" };
}

/** What a picture belongs to: the toy model, its prompt, and the settings of the steps. */
export function learnAbout(
  learn: Learn,
  { sentence, intro, hidden, draw, loss, words, chain, common }: Strings,
): About {
  const { given, norm, temperature, cards, seed, target, smoothing, rate, steps } = learn;
  const stages = active(cards).map(({ name, value }) => `${chain.names[name]} ${value}`);
  return {
    models: [intro.model],
    prompt: sentence,
    settings: [
      `h = (${given.map((x) => fixed(x, 1)).join(", ")})${norm ? ` → ${hidden.normed}` : ""}`,
      `T = ${temperature}`,
      stages.join(" → "),
      `${draw.seed} ${seed}`,
      `${loss.target}${common.colon}${words[target] ?? ""}`,
      `ε = ${smoothing}`,
      `η = ${rate}`,
      `${loss.steps}${common.colon}${steps}`,
    ]
      .filter(Boolean)
      .join(" · "),
  };
}

/** Numbers that JSON has no name for, as text. */
function jsonNumbers(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(jsonNumbers);
  return typeof value === "number" && !Number.isFinite(value) ? String(value) : value;
}
