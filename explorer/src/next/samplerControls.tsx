// The sampler's controls: stages as cards in any order, the orders of known programs, the seed.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { StageCards, type StageCard } from "../sampler/cards";
import {
  isActive,
  OPTIONS,
  ORDERS,
  STAGE_OPTIONS,
  switchesOf,
  type OrderName,
  type StageName,
} from "../sampler/options";
import type { Processed } from "../sampler/process";
import type { SamplerState } from "../sampler/useSampler";
import { Choice, NumberField, Slider } from "../ui/controls";
import { percent, grouped } from "../ui/format";

interface ControlsProps {
  readonly sampler: SamplerState;
  readonly processed: Processed;
}

export function SamplerControls({ sampler, processed }: ControlsProps): JSX.Element {
  const { next: s, sampler: t } = useStrings();
  const { options, order, problem } = sampler;
  const outcome = (name: StageName): string => {
    const step = processed.steps.find(({ stage }) => stage === name);
    if (!step) return isActive(name, options) ? t.ignored : "";
    if (!step.removed) return fill(t.keeps, { n: grouped(step.left) });
    return fill(t.removes, { n: grouped(step.removed), mass: percent(step.removedMass), left: grouped(step.left) });
  };
  const cards = order.map((name): StageCard => {
    const on = isActive(name, options);
    const shown = on || name === "frequency_penalty" ? STAGE_OPTIONS[name] : STAGE_OPTIONS[name].slice(0, 1);
    return {
      name,
      title: t.stages[name],
      on,
      outcome: outcome(name),
      fields: shown.map((option) => ({
        ...OPTIONS[option],
        name: OPTIONS[option].param,
        label: t.options[option],
        value: options[option],
        onMove: (value) => sampler.set(option, value, true),
      })),
      onSwitch: (active) => {
        const names = active ? switchesOf(name).slice(0, 1) : STAGE_OPTIONS[name];
        sampler.setAll(Object.fromEntries(names.map((one) => [one, OPTIONS[one][active ? "example" : "neutral"]])));
      },
    };
  });
  const orders: (readonly [OrderName | "own", string])[] = [
    ["hf", s.hf],
    ["vllm", "vLLM"],
    ["llama.cpp", s.llama],
    ...(sampler.orderName ? [] : [["own", t.own] as const]),
  ];
  return (
    <>
      <StageCards cards={cards} onOrder={(names) => sampler.setOrder(names)} />
      {problem ? (
        <p class="note alarm" role="alert">
          {fill(t.problems[problem.code], { stage: t.stages[problem.stage] })}
        </p>
      ) : null}
      {isActive("mirostat", options) && !problem ? <p class="note">{t.mirostat}</p> : null}
      <Choice
        name="order"
        label={s.order}
        value={sampler.orderName ?? "own"}
        options={orders}
        onChoose={(name) => name !== "own" && sampler.setOrder(ORDERS[name])}
      />
      <p class="note">{sampler.counting === "hf" ? s.counts_hf : s.counts_llama}</p>
      <NumberField
        name="seed"
        label={s.seed}
        value={sampler.seed}
        low={0}
        high={Number.MAX_SAFE_INTEGER}
        onSet={(x) => sampler.setSeed(x, true)}
      />
    </>
  );
}

const QUICK = ["temperature", "top_p"] as const;

/** Temperature and top-p above the bars, where the cards are far below them: on narrow screens only. */
export function QuickControls({ sampler }: { readonly sampler: SamplerState }): JSX.Element {
  const { sampler: t } = useStrings();
  return (
    <div class="quick">
      {QUICK.map((name) => (
        <Slider
          key={name}
          {...OPTIONS[name]}
          name={`quick-${OPTIONS[name].param}`}
          label={t.stages[name]}
          value={sampler.options[name]}
          onMove={(value) => sampler.set(name, value, true)}
        />
      ))}
    </div>
  );
}
