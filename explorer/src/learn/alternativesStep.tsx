// Plain normalisation, sigmoid and ReLU beside softmax.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { replaced, sigmoid, sum } from "../math/linear";
import { normalize, softmax } from "../math/softmax";
import { Bars, Figure } from "../ui/bars";
import { fixed } from "../ui/format";
import { Formula, frac, gap, i, n, o, over, row, sub, sup } from "../ui/formula";
import { Step, StepSlider } from "./learnStep";
import type { Learn } from "./useLearn";

const [LOW, HIGH] = [-5, 5];

export function Compare({ learn }: { learn: Learn }): JSX.Element {
  const { compare: s, common } = useStrings();
  const x = learn.scores;
  const ways = [
    ["plain", s.plain, normalize(x)],
    ["softmax3", s.softmax, softmax(x)],
    ["sigmoid", s.sigmoid, x.map(sigmoid)],
    ["relu", s.relu, x.map((value) => Math.max(0, value))],
  ] as const;
  const shift = (by: number): void => learn.setScores(x.map((value) => Math.round((value + by) * 10) / 10));
  return (
    <Step
      id="compare"
      texts={s}
      learn={learn}
      formula={
        <>
          <Formula label="plain: x over the sum of x; softmax: e to the x over the sum of e to the x">
            {frac(sub(i("x"), i("i")), [over("∑", i("j")), sub(i("x"), i("j"))])}
            {gap()}
            {frac(sup(i("e"), sub(i("x"), i("i"))), [over("∑", i("j")), sup(i("e"), sub(i("x"), i("j")))])}
          </Formula>
          <Formula label="sigmoid: 1 over 1 plus e to the minus x">
            {row(i("σ"), o("("), i("x"), o(")"), o("="))}
            {frac(n(1), [n(1), o("+"), sup(i("e"), [o("−"), i("x")])])}
          </Formula>
          <Formula label="ReLU: the larger of 0 and x">
            {row(i("ReLU"), o("("), i("x"), o(")"), o("="), i("max"), o("("), n(0), o(","), i("x"), o(")"))}
          </Formula>
        </>
      }
    >
      <div class="controls">
        {x.map((value, d) => (
          <StepSlider
            key={d}
            name={`x${d + 1}`}
            label={fill(s.score, { i: d + 1 })}
            value={value}
            range={[LOW, HIGH, 0.1]}
            onMove={(next, drag) => learn.setScores(replaced(x, d, next), drag)}
          />
        ))}
      </div>
      <div class="controls buttons">
        <button type="button" data-do="shift" disabled={Math.max(...x) + 1 > HIGH} onClick={() => shift(1)}>
          {s.shift}
        </button>
        <button type="button" data-do="unshift" disabled={Math.min(...x) - 1 < LOW} onClick={() => shift(-1)}>
          {s.unshift}
        </button>
      </div>
      <div class="quartet">
        {ways.map(([key, title, values]) => (
          <Bars
            key={key}
            name={key}
            caption={title}
            heads={["", common.value]}
            domain={key === "relu" ? [0, HIGH] : [0, 1]}
            rows={values.map((value, d) => {
              const bad = key !== "relu" && !(value >= 0 && value <= 1);
              return {
                head: fill(s.score, { i: d + 1 }),
                cells: [<Figure text={fixed(value, 3)} bad={bad} />],
                value,
                ...(bad ? { note: s.bad } : {}),
              };
            })}
            footHead={common.sum}
            foot={[fixed(sum(values), 3)]}
          />
        ))}
      </div>
    </Step>
  );
}
