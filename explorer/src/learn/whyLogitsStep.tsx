// Why models output logits: the loss through log-sum-exp, and argmax without softmax.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { stable } from "../math/floatFormats";
import { logSoftmax, softmax } from "../math/softmax";
import { Figure } from "../ui/bars";
import { Slider } from "../ui/controls";
import { fixed, py } from "../ui/format";
import { Formula, i, log, o, over, row, space, sub, sup } from "../ui/formula";
import { Step } from "../ui/learnStep";
import { Python } from "../ui/prose";
import type { Learn } from "./useLearn";

export function WhyLogits({ learn }: { learn: Learn }): JSX.Element {
  const { whylogits: s, words } = useStrings();
  const { target, low } = learn;
  const z = learn.logits.map((x, v) => (v === target ? low : x));
  const exact = -(logSoftmax(z)[target] ?? NaN);
  const naive = Math.fround(-Math.log(stable(z, "fp32").p[target] ?? NaN));
  const best = (x: readonly number[]): number => x.indexOf(Math.max(...x));
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
      python={
        <Python
          code={[
            `low = z.copy()\nlow[${target}] = ${py(low)}`,
            "e = np.exp((low - low.max()).astype(np.float32))",
            `-np.log(e[${target}] / e.sum())  # inf once p underflows to 0`,
            `np.logaddexp.reduce(low) - low[${target}]`,
            `ref.cross_entropy(low, ${target})`,
            "int(np.argmax(low)), int(np.argmax(ref.softmax(low)))",
          ].join("\n")}
          values={[naive, exact, exact, [best(z), best(softmax(z))]]}
        />
      }
    >
      <div class="controls">
        <Slider
          name="low"
          label={`${s.slider} (${words[target] ?? ""})`}
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
      <p class="note">{fill(s.argmax, { a: words[best(z)] ?? "", b: words[best(softmax(z))] ?? "" })}</p>
    </Step>
  );
}
