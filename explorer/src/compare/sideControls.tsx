// The controls of one side: its model or its sampler.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { OPTIONS, ORDERS } from "../sampler/options";
import type { SamplerState } from "../sampler/useSampler";
import { Choice, SliderField } from "../ui/controls";
import { COMPARED, type SideName } from "./sides";

export function SideTitle({ side, text }: { side: SideName; text: string }): JSX.Element {
  return (
    <h2>
      <span class={`flag ${side}`} aria-hidden="true" />
      {text}
    </h2>
  );
}

interface ModelProps {
  readonly side: SideName;
  readonly value: string;
  readonly known: readonly string[];
  onChoose(name: string): void;
}

export function ModelSide({ side, value, known, onChoose }: ModelProps): JSX.Element {
  const { comparing: s } = useStrings();
  const title = fill(s.sideModel, { side: s[side] });
  return (
    <div class="panel side model" data-side={side}>
      <SideTitle side={side} text={title} />
      <Choice
        name={side}
        label={title}
        value={value}
        options={known.map((one) => [one, one] as const)}
        onChoose={onChoose}
      />
    </div>
  );
}

export function SamplerSide({ side, sampler }: { side: SideName; sampler: SamplerState }): JSX.Element {
  const { comparing: s, sampler: t, common } = useStrings();
  return (
    <div class="panel side" data-side={side}>
      <SideTitle side={side} text={fill(s.sideSampler, { side: s[side] })} />
      {COMPARED.map((name) => {
        const { param, neutral, low, high, step } = OPTIONS[name];
        const value = sampler.options[name];
        return (
          <SliderField
            key={name}
            name={param + side}
            label={t.stages[name]}
            value={value}
            low={low}
            high={high}
            step={step}
            shown={value === neutral && name !== "temperature" ? common.off : String(value)}
            onMove={(x) => sampler.set(name, x, true)}
          />
        );
      })}
      <Choice
        name={`o${side}`}
        label={s.order}
        value={sampler.orderName ?? "hf"}
        options={[
          ["hf", s.hf],
          ["vllm", "vLLM"],
          ["llama.cpp", s.llama],
        ]}
        onChoose={(name) => sampler.setOrder(ORDERS[name])}
      />
    </div>
  );
}
