// LayerNorm with γ and β, RMSNorm, and Add & Norm.

import type { JSX } from "preact";
import { useStrings } from "../i18n/strings";
import { layerNorm, mean, type Vector } from "../math/linear";
import { Bars } from "../ui/bars";
import { Slider } from "../ui/controls";
import { fixed, py, pyList } from "../ui/format";
import { Formula, frac, i, n, o, row, sqrt, sup } from "../ui/formula";
import { Step } from "../ui/learnStep";
import { Python } from "../ui/prose";
import type { Learn } from "./useLearn";

const EPS = 1e-5;
// The direction of the sublayer's output. Its numbers differ, because LayerNorm removes what all have in common.
const SUBLAYER: Vector = [1, -1, 2];

export function rmsNorm(x: Vector, gamma: number): number[] {
  const rms = Math.sqrt(mean(x.map((value) => value * value)) + EPS);
  return x.map((value) => (gamma * value) / rms);
}

export function Norms({ learn }: { learn: Learn }): JSX.Element {
  const { norms: s, common } = useStrings();
  const { gamma, beta, sublayer, given } = learn;
  const f = SUBLAYER.map((x) => x * sublayer);
  const affine = (x: Vector): number[] => layerNorm(x).map((value) => gamma * value + beta);
  const columns = [
    ["layer", s.layer, affine(given)],
    ["rms", s.rms, rmsNorm(given, gamma)],
    ["add", s.add, affine(given.map((x, d) => x + (f[d] ?? 0)))],
  ] as const;
  return (
    <Step
      id="norms"
      title={s.title}
      text={s.text}
      tryThis={s.try}
      formula={
        <>
          <Formula label="LayerNorm: gamma times (h - mean) / √(var + ε) plus beta">
            {row(i("γ"))}
            {frac([i("h"), o("−"), i("mean")], sqrt([i("var"), o("+"), i("ε")]))}
            {row(o("+"), i("β"))}
          </Formula>
          <Formula label="RMSNorm: gamma times h over the root mean square">
            {row(i("γ"))}
            {frac(i("h"), sqrt([i("mean"), o("("), sup(i("h"), n(2)), o(")"), o("+"), i("ε")]))}
          </Formula>
          <Formula label="Add and Norm: the norm of h plus f">
            {row(i("LayerNorm"), o("("), i("h"), o("+"), i("f"), o(")"))}
          </Formula>
        </>
      }
      python={
        <Python
          code={[
            `x, gamma, beta = np.array(${pyList(given)}), ${py(gamma)}, ${py(beta)}`,
            `f = ${py(sublayer)} * np.array(${pyList(SUBLAYER)})`,
            "ref.layer_norm(x, gamma, beta)",
            "gamma * x / np.sqrt(np.mean(x**2) + 1e-5)  # RMSNorm",
            "ref.layer_norm(x + f, gamma, beta)  # Add & Norm",
          ].join("\n")}
          values={columns.map(([, , values]) => values)}
        />
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
          <Slider
            key={name}
            name={name}
            label={label}
            value={value}
            low={low}
            high={high}
            step={0.1}
            shown={fixed(value, 1)}
            onMove={(x) => set(x, true)}
          />
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
