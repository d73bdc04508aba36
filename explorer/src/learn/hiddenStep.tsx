// The hidden vector, and why LayerNorm is not softmax.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { layerNorm, mean, sum, variance, type Vector } from "../math/linear";
import { softmax } from "../math/softmax";
import { Bars } from "../ui/bars";
import { Slider, Switch } from "../ui/controls";
import { fixed } from "../ui/format";
import { Formula, frac, gap, i, n, o, row, sqrt } from "../ui/formula";
import { Python } from "../ui/prose";
import { Step } from "../ui/learnStep";
import { STEP_CODE } from "./learnPython";
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
      title={s.title}
      text={s.text}
      tryThis={s.try}
      formula={
        <Formula label="(x - mean) / √(variance + ε)">
          {row(i("h"), o("↦"))}
          {frac([i("h"), o("−"), i("mean")], sqrt([i("var"), o("+"), i("ε")]))}
          {row(gap(), i("ε"), o("="), n("0.00001"))}
        </Formula>
      }
      python={<Python {...STEP_CODE.hidden(learn)} />}
    >
      <div class="controls">
        {learn.h.map((x, d) => (
          <Slider
            key={d}
            name={`h${d + 1}`}
            label={fill(s.component, { i: d + 1 })}
            value={x}
            low={-3}
            high={3}
            step={0.1}
            shown={fixed(x, 1)}
            onMove={(value) =>
              learn.setH(
                learn.h.map((old, at) => (at === d ? value : old)),
                true,
              )
            }
          />
        ))}
        <Slider
          name="stretch"
          label={s.stretch}
          value={learn.stretch}
          low={0.5}
          high={10}
          step={0.5}
          shown={`× ${fixed(learn.stretch, 1)}`}
          onMove={(value) => learn.setStretch(value, true)}
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
        <thead>
          <tr>
            <td />
            {columns.map(([key, title]) => (
              <th key={key} scope="col">
                {title}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {(
            [
              [s.mean, mean],
              [s.variance, variance],
              [common.sum, sum],
            ] as const
          ).map(([name, measure]) => (
            <tr key={name}>
              <th scope="row">{name}</th>
              {columns.map(([key, , values]) => (
                <td key={key}>{fixed(measure(values), 3)}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </Step>
  );
}
