// The Python code of the steps, with the current settings; together they are one program.

import { py, pyList } from "../ui/format";
import { active, orderOf, type Card, type CardName, type Learn } from "./useLearn";
import { WEIGHT } from "./toyModel";

/** How many draws are listed one by one. */
export const SHOWN = 12;

const CLASSES: Record<CardName, string> = {
  temperature: "Temperature",
  top_k: "TopK",
  top_p: "TopP",
  min_p: "MinP",
  typical_p: "Typical",
};

export function samplerCode({ cards, seed }: Learn): string {
  const order = orderOf(cards);
  const on = active(cards);
  const head = ["import torch, lmhead"];
  let sampler: string;
  if (order) {
    const options = on.map((stage) => `${stage.name}=${value(stage)}`);
    sampler = `lmhead.Sampler(${[...options, `order="${order}"`, `seed=${seed}`].join(", ")})`;
  } else {
    if (on.length)
      head.push(
        `from lmhead.sampling import ${on
          .map((s) => CLASSES[s.name])
          .sort()
          .join(", ")}`,
      );
    const stages = on.map((stage) => `${CLASSES[stage.name]}(${value(stage)})`).join(", ");
    sampler = `lmhead.Sampler(stages=[${stages}], seed=${seed})`;
  }
  return [...head, "", `sampler = ${sampler}`, "logits = torch.tensor(z)[None]", "sampler(logits).kept[0]"].join("\n");
}

export function hiddenCode({ h, stretch, norm }: Learn): string {
  const scale = stretch === 1 ? "" : `${py(stretch)} * `;
  return [
    "import numpy as np",
    "from lmhead import reference as ref",
    "",
    `h = ${scale}np.array(${pyList(h)})`,
    norm ? "h = ref.layer_norm(h)" : "",
    norm ? "h" : "ref.layer_norm(h)  # not used below",
  ]
    .filter((line, at) => line !== "" || at === 2)
    .join("\n");
}

export function linearCode(): string {
  return `W = np.array([${WEIGHT.map(pyList).join(", ")}])\nz = ref.linear(h, W)\nz`;
}

export function temperatureCode({ temperature }: Learn): string {
  return `ref.softmax(z, temperature=${py(temperature)})\nref.entropy(z / ${py(temperature)})`;
}

export function drawCode({ draws, logits }: Learn): string {
  return [
    "ref.greedy(z)",
    `tokens = sampler(logits.expand(${draws}, -1), position=torch.arange(${draws})).token`,
    `tokens[:${SHOWN}]`,
    `torch.bincount(tokens, minlength=${logits.length})`,
  ].join("\n");
}

export function lossOptions({ smoothing }: Learn): string {
  return smoothing ? `, label_smoothing=${py(smoothing)}` : "";
}

export function lossCode(learn: Learn): string {
  const { target, rate, steps } = learn;
  const options = lossOptions(learn);
  return [
    `ref.cross_entropy(z, ${target}${options})`,
    `ref.cross_entropy_backward(z, ${target}${options})`,
    "trained = W",
    `for _ in range(${steps}):`,
    `    grads = ref.linear_cross_entropy_backward(h, trained, ${target}${options})`,
    `    trained = trained - ${py(rate)} * grads.weight`,
    `ref.linear_cross_entropy(h, trained, ${target}${options})`,
  ].join("\n");
}

function value(stage: Pick<Card, "name" | "value">): string {
  return stage.name === "top_k" ? String(stage.value) : py(stage.value);
}
