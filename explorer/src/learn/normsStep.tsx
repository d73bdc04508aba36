// LayerNorm with γ and β, RMSNorm, and Add & Norm.

import type { JSX } from "preact";
import { useStrings } from "../i18n/strings";

import { Bars } from "../ui/bars";
import { fixed } from "../ui/format";
import { Formula, frac, i, n, o, row, space, sqrt, sup } from "../ui/formula";
import { Step, StepSlider } from "./learnStep";
import { norms } from "./learnPython";
import { SUBLAYER } from "./toyModel";
import type { Learn } from "./useLearn";

export function Norms({ learn }: { learn: Learn }): JSX.Element {
  const { norms: s, common } = useStrings();
  const { gamma, beta, sublayer } = learn;
  const { f, layer, rms, add } = norms(learn);
  const columns = [
    ["layer", s.layer, layer],
    ["rms", s.rms, rms],
    ["add", s.add, add],
  ] as const;
  return (
    <Step
      id="norms"
      texts={s}
      learn={learn}
      formula={
        <>
          <Formula label="LayerNorm: gamma times (h - mean) / √(var + ε) plus beta">
            {i("γ")}
            {space()}
            {frac([i("h"), o("−"), i("mean")], sqrt([i("var"), o("+"), i("ε")]))}
            {o("+")}
            {i("β")}
          </Formula>
          <Formula label="RMSNorm: gamma times h over the root mean square">
            {i("γ")}
            {space()}
            {frac(i("h"), sqrt([i("mean"), o("("), sup(i("h"), n(2)), o(")"), o("+"), i("ε")]))}
          </Formula>
          <Formula label="Add and Norm: the norm of h plus f">
            {row(i("LayerNorm"), o("("), i("h"), o("+"), i("f"), o(")"))}
          </Formula>
        </>
      }
    >
      <div class="controls">
        {(
          [
            ["gamma", s.gamma, gamma, -3, 3, learn.setGamma],
            ["beta", s.beta, beta, -3, 3, learn.setBeta],
            ["f", s.residual, sublayer, -3, 3, learn.setSublayer],
          ] as const
        ).map(([name, label, value, low, high, set]) => (
          <StepSlider key={name} name={name} label={label} value={value} range={[low, high, 0.1]} onMove={set} />
        ))}
      </div>
      <p class="note" data-chart="sublayer">
        f = {fixed(sublayer, 1)} · ({SUBLAYER.map((x) => fixed(x, 0)).join(", ")}) = (
        {f.map((x) => fixed(x, 1)).join(", ")})
      </p>
      <div class="trio">
        {columns.map(([key, title, values]) => (
          <Bars
            key={key}
            name={`norm-${key}`}
            caption={title}
            heads={["", common.value]}
            domain={[-6, 6]}
            rows={values.map((value, d) => ({ head: `h${d + 1}`, cells: [fixed(value, 2)], value }))}
          />
        ))}
      </div>
    </Step>
  );
}
