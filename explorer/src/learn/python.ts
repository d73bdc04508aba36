// The Python of a sampler, with the reader's own settings.

import type { StageName } from "../math/filters";
import { py } from "../ui/format";
import { active, orderOf, type Card, type Learn } from "./state";

const CLASSES: Record<StageName, string> = {
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
    if (on.length) head.push(`from lmhead.sampling import ${on.map((s) => CLASSES[s.name]).sort().join(", ")}`);
    const stages = on.map((stage) => `${CLASSES[stage.name]}(${value(stage)})`).join(", ");
    sampler = `lmhead.Sampler(stages=[${stages}], seed=${seed})`;
  }
  return [...head, "", `sampler = ${sampler}`, "logits = torch.tensor(z)[None]", "sampler(logits).kept[0]"].join("\n");
}

function value(stage: Pick<Card, "name" | "value">): string {
  return stage.name === "top_k" ? String(stage.value) : py(stage.value);
}
