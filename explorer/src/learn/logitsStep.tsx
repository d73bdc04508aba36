// A shift of all logits changes no probability.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { softmax } from "../math/softmax";
import { Bars } from "../ui/bars";
import { fixed, signed } from "../ui/format";
import { Formula, frac, i, o, over, sub, sup } from "../ui/formula";
import { Step, StepSlider } from "./learnStep";
import type { Learn } from "./useLearn";

export function Logits({ learn }: { learn: Learn }): JSX.Element {
  const { logits: s, common, words } = useStrings();
  const shifted = learn.logits.map((z) => z + learn.shift);
  const p = softmax(shifted);
  const before = softmax(learn.logits);
  const change = Math.max(...p.map((x, v) => Math.abs(x - (before[v] ?? NaN))));
  const widest = Math.max(15, ...shifted.map(Math.abs));
  return (
    <Step
      id="logits"
      texts={s}
      learn={learn}
      formula={
        <Formula label="p of i is e to the z of i plus c, over the sum of e to the z of j plus c; e to the c cancels">
          {sub(i("p"), i("i"))}
          {o("=")}
          {frac(sup(i("e"), sub(i("z"), i("i"))), [over("∑", i("j")), sup(i("e"), sub(i("z"), i("j")))])}
          {o("=")}
          {frac(
            [sup(i("e"), [sub(i("z"), i("i")), o("+"), i("c")])],
            [over("∑", i("j")), sup(i("e"), [sub(i("z"), i("j")), o("+"), i("c")])],
          )}
        </Formula>
      }
    >
      <div class="controls">
        <StepSlider
          name="c"
          label={s.shift}
          value={learn.shift}
          range={[-10, 10, 0.5]}
          shown={learn.shift ? signed(learn.shift, 1) : "0.0"}
          onMove={learn.setShift}
        />
      </div>
      <div class="duo">
        <Bars
          name="shifted"
          caption={s.shifted}
          heads={[common.word, s.shifted]}
          domain={[-widest, widest]}
          rows={shifted.map((value, v) => ({ head: words[v] ?? "", cells: [fixed(value)], value }))}
        />
        <Bars
          name="softmax"
          caption="softmax(z + c)"
          heads={[common.word, common.probability]}
          domain={[0, 1]}
          rows={p.map((value, v) => ({ head: words[v] ?? "", cells: [fixed(value, 3)], value }))}
        />
      </div>
      <p class="note" role="status">
        {fill(s.unchanged, { x: change < 1e-12 ? "0" : change.toExponential(1) })}
      </p>
    </Step>
  );
}
