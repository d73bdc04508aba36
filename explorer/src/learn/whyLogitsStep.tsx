// Why models output logits: the loss through log-sum-exp, and argmax without softmax.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { softmax } from "../math/softmax";
import { Figure } from "../ui/bars";
import { fixed } from "../ui/format";
import { Formula, i, log, o, over, row, space, sub, sup } from "../ui/formula";
import { Step, StepSlider } from "./learnStep";
import { argmax, loweredTarget } from "./learnPython";
import type { Learn } from "./useLearn";
import { FactRow } from "../ui/factsTable";

export function WhyLogits({ learn }: { learn: Learn }): JSX.Element {
  const { whylogits: s, words } = useStrings();
  const { target, low } = learn;
  const { z, naive, exact } = loweredTarget(learn);
  return (
    <Step
      id="whylogits"
      texts={s}
      learn={learn}
      formula={
        <>
          <Formula label="log p of i is z of i minus the log of the sum of e to the z of j">
            {row(log(sub(i("p"), i("i"))), o("="), sub(i("z"), i("i")), o("−"))}
            {log([over("∑", i("j")), sup(i("e"), sub(i("z"), i("j")))])}
          </Formula>
          <Formula label="argmax z is argmax p">
            {row(i("argmax"), space(), i("z"), o("="), i("argmax"), space(), i("p"))}
          </Formula>
        </>
      }
    >
      <div class="controls">
        <StepSlider
          name="low"
          label={fill(s.slider, { word: words[target] ?? "" })}
          value={low}
          range={[-150, 5, 1]}
          onMove={learn.setLow}
        />
      </div>
      <table class="facts" data-chart="whylogits">
        <tbody>
          <FactRow head={s.naive} cells={[<Figure text={fixed(naive, 4)} bad={!Number.isFinite(naive)} />]} />
          <FactRow head={s.stable} cells={[fixed(exact, 4)]} />
        </tbody>
      </table>
      <p class="note">{fill(s.argmax, { a: words[argmax(z)] ?? "", b: words[argmax(softmax(z))] ?? "" })}</p>
    </Step>
  );
}
