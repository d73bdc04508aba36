// The hidden vector, and why LayerNorm is not softmax.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { layerNorm, mean, replaced, sum, variance, type Vector } from "../math/linear";
import { softmax } from "../math/softmax";
import { Bars } from "../ui/bars";
import { Switch } from "../ui/controls";
import { FactRow, Heads } from "../ui/factsTable";
import { fixed } from "../ui/format";
import { Formula, frac, gap, i, n, o, row, sqrt } from "../ui/formula";
import { Step, StepSlider } from "./learnStep";
import type { Learn } from "./useLearn";

export function Hidden({ learn }: { learn: Learn }): JSX.Element {
  const { hidden: s, common } = useStrings();
  const normed = layerNorm(learn.given);
  const columns: readonly (readonly [string, string, Vector])[] = [
    ["given", s.given, learn.given],
    ["normed", s.normed, normed],
    ["softmaxed", s.softmaxed, softmax(learn.given)],
  ];
  const widest = Math.max(3, ...learn.given.map(Math.abs));
  return (
    <Step
      id="hidden"
      texts={s}
      learn={learn}
      formula={
        <Formula label="(x - mean) / √(variance + ε)">
          {row(i("h"), o("↦"))}
          {frac([i("h"), o("−"), i("mean")], sqrt([i("var"), o("+"), i("ε")]))}
          {row(gap(), i("ε"), o("="), n("0.00001"))}
        </Formula>
      }
    >
      <div class="controls">
        {learn.h.map((x, d) => (
          <StepSlider
            key={d}
            name={`h${d + 1}`}
            label={fill(s.component, { i: d + 1 })}
            value={x}
            range={[-3, 3, 0.1]}
            onMove={(value, drag) => learn.setH(replaced(learn.h, d, value), drag)}
          />
        ))}
        <StepSlider
          name="stretch"
          label={s.stretch}
          value={learn.stretch}
          range={[0.5, 10, 0.5]}
          shown={`× ${fixed(learn.stretch, 1)}`}
          onMove={learn.setStretch}
        />
        <Switch name="norm" label={s.norm} on={learn.norm} onFlip={learn.setNorm} />
      </div>
      <div class="trio">
        {columns.map(([key, title, values]) => (
          <Bars
            key={key}
            name={key}
            caption={title + ((key === "normed") === learn.norm && key !== "softmaxed" ? ` → ${s.used}` : "")}
            heads={["", common.value]}
            domain={key === "softmaxed" ? [0, 1] : key === "normed" ? [-2, 2] : [-widest, widest]}
            rows={values.map((value, d) => ({
              head: fill(s.component, { i: d + 1 }),
              cells: [fixed(value, 2)],
              value,
            }))}
            footHead={common.sum}
            foot={[fixed(sum(values), 2)]}
          />
        ))}
      </div>
      <table class="facts">
        <Heads of={["", ...columns.map(([, title]) => title)]} />
        <tbody>
          {(
            [
              [s.mean, mean],
              [s.variance, variance],
              [common.sum, sum],
            ] as const
          ).map(([name, measure]) => (
            <FactRow key={name} head={name} cells={columns.map(([, , values]) => fixed(measure(values), 3))} />
          ))}
        </tbody>
      </table>
    </Step>
  );
}
