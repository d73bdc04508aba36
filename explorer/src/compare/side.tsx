// The controls of one side: which model, or how its sampler is set.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n";
import { Choice, Slider } from "../ui/controls";
import { fixed } from "../ui/format";
import type { Order, SideName } from "./sides";
import type { SamplerState } from "./useSampler";

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
      <Choice name={side} label={title} value={value} options={known.map((one) => [one, one] as const)} onChoose={onChoose} />
    </div>
  );
}

export function SamplerSide({ side, sampler }: { side: SideName; sampler: SamplerState }): JSX.Element {
  const { comparing: s, common } = useStrings();
  const { options, set } = sampler;
  const { temperature, topK, topP, minP, order } = options;
  return (
    <div class="panel side" data-side={side}>
      <SideTitle side={side} text={fill(s.sideSampler, { side: s[side] })} />
      <Slider name={`t${side}`} label={s.temperature} value={temperature} low={0.05} high={3} step={0.05} shown={fixed(temperature)} onMove={(x) => set("temperature")(x, true)} />
      <Slider name={`k${side}`} label={s.top_k} value={topK} low={0} high={200} step={1} shown={topK ? String(topK) : s.all} onMove={(x) => set("topK")(x, true)} />
      <Slider name={`p${side}`} label={s.top_p} value={topP} low={0} high={1} step={0.01} shown={topP === 1 ? common.off : fixed(topP)} onMove={(x) => set("topP")(x, true)} />
      <Slider name={`m${side}`} label={s.min_p} value={minP} low={0} high={1} step={0.01} shown={minP === 0 ? common.off : fixed(minP)} onMove={(x) => set("minP")(x, true)} />
      <Choice name={`o${side}`} label={s.order} value={order} options={[["hf", s.hf], ["llama.cpp", s.llama]] as [Order, string][]} onChoose={(one) => set("order")(one)} />
    </div>
  );
}
