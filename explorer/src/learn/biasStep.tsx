// The bias, the initial weights of nn.Linear, and the shapes of a batch.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { Bars } from "../ui/bars";
import { Slider } from "../ui/controls";
import { fixed, py, pyList } from "../ui/format";
import { Formula, frac, i, n, o, row, sqrt, sub, sup } from "../ui/formula";
import { Step } from "../ui/learnStep";
import { Python } from "../ui/prose";
import type { Learn } from "./useLearn";

const BIASED = 5; // "taxes"

export function Bias({ learn }: { learn: Learn }): JSX.Element {
  const { bias: s, common, words } = useStrings();
  const { logits, bias, batch, positions } = learn;
  const biases = words.map((_, v) => (v === BIASED ? bias : 0));
  const scores = logits.map((z, v) => z + (biases[v] ?? 0));
  const widest = Math.max(5, ...scores.map(Math.abs));
  const [size, width] = [words.length, learn.hidden.length];
  return (
    <Step
      id="bias"
      title={s.title}
      text={s.text}
      tryThis={s.try}
      formula={
        <>
          <Formula label="z is h times W transposed plus b">
            {row(i("z"), o("="), i("h"), sup(i("W"), i("⊤")), o("+"), i("b"))}
          </Formula>
          <Formula label="initial weights are uniform between minus and plus one over the root of D">
            {row(o("|"), sub(i("W"), [i("v"), i("d")]), o("|"), o("≤"))}
            {frac(n(1), sqrt(i("D")))}
          </Formula>
        </>
      }
      python={
        <Python
          code={[
            `b = np.array(${pyList(biases)})`,
            "ref.linear(h, W, b)",
            "1 / np.sqrt(W.shape[1])  # bound of nn.Linear's initial weights",
            `ref.linear(np.zeros((${batch}, ${positions}, ${width})), W, b).shape`,
          ].join("\n")}
          values={[scores, 1 / Math.sqrt(width), [batch, positions, size]]}
        />
      }
    >
      <div class="controls">
        <Slider
          name="bias"
          label={fill(s.slider, { word: words[BIASED] ?? "" })}
          value={bias}
          low={-8}
          high={8}
          step={0.5}
          shown={fixed(bias, 1)}
          onMove={(x) => learn.setBias(x, true)}
        />
        <Slider
          name="batch"
          label={s.batch}
          value={batch}
          low={1}
          high={8}
          step={1}
          onMove={(x) => learn.setBatch(x, true)}
        />
        <Slider
          name="positions"
          label={s.positions}
          value={positions}
          low={1}
          high={16}
          step={1}
          onMove={(x) => learn.setPositions(x, true)}
        />
      </div>
      <Bars
        name="biased"
        caption="z = h Wᵀ + b"
        heads={[common.word, "b", common.logit]}
        domain={[-widest, widest]}
        rows={scores.map((value, v) => ({
          head: words[v] ?? "",
          cells: [fixed(biases[v] ?? 0, 1), fixed(value)],
          value,
        }))}
      />
      <p class="note" data-chart="shapes">
        {fill(s.shapes, {
          hidden: `(${batch}, ${positions}, ${width})`,
          weight: `(${size}, ${width})`,
          logits: `(${batch}, ${positions}, ${size})`,
        })}
      </p>
      <p class="note">{fill(s.bound, { x: py(Math.round(1e4 / Math.sqrt(width)) / 1e4) })}</p>
    </Step>
  );
}
