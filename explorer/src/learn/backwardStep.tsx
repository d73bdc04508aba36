// The gradient with respect to W, b and h, and the weight after some steps.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { Bars } from "../ui/bars";
import { fixed, signed } from "../ui/format";
import { Formula, frac, gap, i, o, row, sup } from "../ui/formula";
import { Step } from "./learnStep";
import { descend } from "./descent";
import { gradients } from "./learnPython";
import { MAX_STEPS } from "./lossStep";
import { WEIGHT } from "./toyModel";
import type { Learn } from "./useLearn";
import { Heads } from "../ui/factsTable";

export function Backward({ learn }: { learn: Learn }): JSX.Element {
  const { backward: s, common, loss, words } = useStrings();
  const { hidden, target, steps } = learn;
  const { weight: weightGradient, bias: gradient, hidden: hiddenGradient } = gradients(learn);
  const { weight } = descend(learn);
  const widest = Math.max(2, ...weight.flat().map(Math.abs));
  return (
    <Step
      id="backward"
      texts={s}
      learn={learn}
      formula={
        <>
          <Formula label="the gradient by W is p minus y, transposed, times h; the gradient by b is p minus y">
            {frac([o("∂"), i("L")], [o("∂"), i("W")])}
            {row(o("="), sup([o("("), i("p"), o("−"), i("y"), o(")")], i("⊤")), i("h"), gap())}
            {frac([o("∂"), i("L")], [o("∂"), i("b")])}
            {row(o("="), i("p"), o("−"), i("y"))}
          </Formula>
          <Formula label="the gradient by h is p minus y times W">
            {frac([o("∂"), i("L")], [o("∂"), i("h")])}
            {row(o("="), o("("), i("p"), o("−"), i("y"), o(")"), i("W"))}
          </Formula>
        </>
      }
    >
      <div class="controls buttons">
        <button
          type="button"
          data-do="step-weight"
          disabled={steps >= MAX_STEPS}
          onClick={() => learn.setSteps(steps + 1)}
        >
          {loss.step}
        </button>
        <button type="button" class="quiet" disabled={steps === 0} onClick={() => learn.setSteps(0)}>
          {loss.undo}
        </button>
        <span class="note">
          {`${loss.target}${common.colon}${words[target] ?? ""} · ${loss.steps}${common.colon}${steps}`}
        </span>
      </div>
      <div class="trio">
        {hidden.map((_, d) => (
          <Bars
            key={d}
            name={`weight-${d + 1}`}
            caption={fill(s.column, { d: d + 1 })}
            heads={[common.word, common.value]}
            domain={[-widest, widest]}
            rows={weight.map((entries, v) => ({
              head: words[v] ?? "",
              cells: [fixed(entries[d] ?? NaN)],
              value: entries[d] ?? NaN,
              mark: WEIGHT[v]?.[d] ?? NaN,
            }))}
          />
        ))}
      </div>
      <p class="note">{s.bar_and_tick}</p>
      <table class="dots" data-chart="backward">
        <Heads of={[common.word, "p − y", s.gradient, fill(s.weight, { n: steps })]} />
        <tbody>
          {words.map((word, v) => (
            <tr key={v} class={v === target ? "hit" : undefined}>
              <th scope="row">{word}</th>
              <td>{signed(gradient[v] ?? NaN, 3)}</td>
              {[weightGradient[v], weight[v]].map((entries, i) => (
                <td key={i}>
                  {(entries ?? []).map((x, d) => (
                    <span key={d} class="weight">
                      {fixed(x)}
                    </span>
                  ))}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
      <p class="note" data-chart="grad-hidden">
        {s.hidden}
        {common.colon}
        {hiddenGradient.map((x) => signed(x, 3)).join(", ")}
      </p>
    </Step>
  );
}
