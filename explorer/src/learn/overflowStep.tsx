// Softmax computed literally overflows; with the maximum subtracted it does not.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { LIMIT, naive, stable } from "../math/floatFormats";
import { Figure } from "../ui/bars";
import { Choice, optionsOf } from "../ui/controls";
import { fixed, short } from "../ui/format";
import { Formula, frac, gap, i, o, over, row, sub, sup } from "../ui/formula";
import { Step, StepSlider } from "./learnStep";
import type { Learn } from "./useLearn";
import { FactRow, Heads } from "../ui/factsTable";

export function Stable({ learn }: { learn: Learn }): JSX.Element {
  const { stable: s, common, words } = useStrings();
  const z = learn.logits.map((value, v) => (v === 0 ? learn.big : value));
  const unshifted = naive(z, learn.format);
  const shifted = stable(z, learn.format);
  const wrong = unshifted.p.map((p, v) => !(Math.abs(p - (shifted.p[v] ?? NaN)) < 1e-3));
  const count = wrong.filter(Boolean).length;
  return (
    <Step
      id="stable"
      texts={s}
      learn={learn}
      formula={
        <Formula label="p of i is e to the z of i minus m, over the sum of e to the z of j minus m, where m is the largest z">
          {sub(i("p"), i("i"))}
          {o("=")}
          {frac(sup(i("e"), [sub(i("z"), i("i")), o("−"), i("m")]), [
            over("∑", i("j")),
            sup(i("e"), [sub(i("z"), i("j")), o("−"), i("m")]),
          ])}
          {row(gap(), i("m"), o("="), over("max", i("j")), sub(i("z"), i("j")))}
        </Formula>
      }
    >
      <div class="controls">
        <StepSlider
          name="big"
          label={fill(s.logit, { word: words[0] ?? "" })}
          value={learn.big}
          range={[-5, 120, 0.1]}
          onMove={learn.setBig}
        />
        <Choice
          name="format"
          label={s.format}
          value={learn.format}
          options={optionsOf(s, "fp32", "fp16")}
          onChoose={learn.setFormat}
        />
      </div>
      <table class="facts wide" data-chart="stable">
        <Heads of={[common.word, "z", s.exponential, s.naive, s.stable]} />
        <tbody>
          {z.map((value, v) => (
            <FactRow
              key={v}
              head={words[v]}
              cells={[
                fixed(value),
                <Odd x={unshifted.exponentials[v] ?? NaN} text={short} />,
                <Odd x={unshifted.p[v] ?? NaN} text={(x) => fixed(x, 3)} wrong={wrong[v] ?? false} />,
                fixed(shifted.p[v] ?? NaN, 3),
              ]}
            />
          ))}
        </tbody>
        <tfoot>
          <tr>
            <th scope="row">{common.sum}</th>
            <td />
            <td>
              <Odd x={unshifted.total} text={short} />
            </td>
            <td>
              <Odd x={unshifted.p.reduce((a, b) => a + b, 0)} text={(x) => fixed(x, 3)} />
            </td>
            <td>
              {fixed(
                shifted.p.reduce((a, b) => a + b, 0),
                3,
              )}
            </td>
          </tr>
        </tfoot>
      </table>
      <p class={count ? "note alarm" : "note"} role="status">
        {count ? fill(s.broken, { count, all: z.length }) : s.fine}
      </p>
      <p class="note">{fill(s.limit, { x: fixed(LIMIT[learn.format], 2) })}</p>
    </Step>
  );
}

function Odd({ x, text, wrong = false }: { x: number; text(x: number): string; wrong?: boolean }): JSX.Element {
  return <Figure text={text(x)} bad={wrong || !Number.isFinite(x)} />;
}
