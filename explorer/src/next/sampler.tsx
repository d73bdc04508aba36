// The sampler's controls: penalties, temperature and cuts, whose order, the seed.

import type { JSX } from "preact";
import { useStrings } from "../i18n";
import { Choice, Slider, WholeNumber } from "../ui/controls";
import { fixed, signed } from "../ui/format";
import type { SamplerState } from "./useSampler";

export function SamplerControls({ sampler: { settings, seed, set } }: { sampler: SamplerState }): JSX.Element {
  const { next: s, common } = useStrings();
  const off = (value: number, none: number, shown: string): string => (value === none ? common.off : shown);
  return (
    <>
      <fieldset class="group">
        <legend>{s.cuts}</legend>
        <Slider name="t" label={s.temperature} value={settings.temperature} low={0.05} high={3} step={0.05} shown={fixed(settings.temperature)} onMove={(x) => set.temperature(x, true)} />
        <Slider name="k" label={s.top_k} value={settings.topK} low={0} high={200} step={1} shown={settings.topK ? String(settings.topK) : s.all} onMove={(x) => set.topK(x, true)} />
        <Slider name="p" label={s.top_p} value={settings.topP} low={0} high={1} step={0.01} shown={off(settings.topP, 1, fixed(settings.topP))} onMove={(x) => set.topP(x, true)} />
        <Slider name="m" label={s.min_p} value={settings.minP} low={0} high={1} step={0.01} shown={off(settings.minP, 0, fixed(settings.minP))} onMove={(x) => set.minP(x, true)} />
        <Slider name="typ" label={s.typical_p} value={settings.typicalP} low={0.01} high={1} step={0.01} shown={off(settings.typicalP, 1, fixed(settings.typicalP))} onMove={(x) => set.typicalP(x, true)} />
      </fieldset>
      <fieldset class="group">
        <legend>{s.penalties}</legend>
        <Slider name="rep" label={s.repetition} value={settings.repetition} low={0.5} high={2} step={0.05} shown={off(settings.repetition, 1, `× ${fixed(settings.repetition)}`)} onMove={(x) => set.repetition(x, true)} />
        <Slider name="freq" label={s.frequency} value={settings.frequency} low={-2} high={2} step={0.1} shown={off(settings.frequency, 0, signed(settings.frequency, 1))} onMove={(x) => set.frequency(x, true)} />
        <Slider name="pres" label={s.presence} value={settings.presence} low={-2} high={2} step={0.1} shown={off(settings.presence, 0, signed(settings.presence, 1))} onMove={(x) => set.presence(x, true)} />
        <p class="note">{settings.order === "hf" ? s.counts_hf : s.counts_llama}</p>
      </fieldset>
      <Choice name="order" label={s.order} value={settings.order} options={[["hf", s.hf], ["llama.cpp", s.llama]] as const} onChoose={set.order} />
      <WholeNumber name="seed" label={s.seed} value={seed} low={0} high={Number.MAX_SAFE_INTEGER} onSet={(x) => set.seed(x, true)} />
    </>
  );
}
