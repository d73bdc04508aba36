// Why models output logits: the loss through log-sum-exp, and argmax without softmax.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { softmax } from "../math/softmax";
import { Figure } from "../ui/bars";
import { Slider } from "../ui/controls";
import { fixed } from "../ui/format";
import { Formula, i, log, o, over, row, space, sub, sup } from "../ui/formula";
import { Step } from "../ui/learnStep";
import { Python } from "../ui/prose";
import { argmax, loweredTarget, STEP_CODE } from "./learnPython";
import type { Learn } from "./useLearn";

export function WhyLogits({ learn }: { learn: Learn }): JSX.Element {
  const { whylogits: s, words } = useStrings();
  const { target, low } = learn;
  const { z, naive, exact } = loweredTarget(learn);
  return (
    <Step
      id="whylogits"
      title={s.title}
      text={s.text}
      tryThis={s.try}
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
      python={<Python {...STEP_CODE.whylogits(learn)} />}
    >
      <div class="controls">
        <Slider
          name="low"
          label={fill(s.slider, { word: words[target] ?? "" })}
          value={low}
          low={-150}
          high={5}
          step={1}
          shown={fixed(low, 0)}
          onMove={(x) => learn.setLow(x, true)}
        />
      </div>
      <table class="facts" data-chart="whylogits">
        <tbody>
          <tr>
            <th scope="row">{s.naive}</th>
            <td>
              <Figure text={fixed(naive, 4)} bad={!Number.isFinite(naive)} />
            </td>
          </tr>
          <tr>
            <th scope="row">{s.stable}</th>
            <td>{fixed(exact, 4)}</td>
          </tr>
        </tbody>
      </table>
      <p class="note">{fill(s.argmax, { a: words[argmax(z)] ?? "", b: words[argmax(softmax(z))] ?? "" })}</p>
    </Step>
  );
}
