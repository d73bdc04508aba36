// The bias, and the shapes of a batch.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { Bars } from "../ui/bars";
import { fixed } from "../ui/format";
import { Formula, i, o, row, sup } from "../ui/formula";
import { Step, StepSlider } from "./learnStep";
import { biased } from "./learnPython";
import { BIASED } from "./toyModel";
import type { Learn } from "./useLearn";

export function Bias({ learn }: { learn: Learn }): JSX.Element {
  const { bias: s, common, words } = useStrings();
  const { bias, batch, positions } = learn;
  const { biases, scores } = biased(learn);
  const widest = Math.max(5, ...scores.map(Math.abs));
  const [size, width] = [words.length, learn.hidden.length];
  return (
    <Step
      id="bias"
      texts={s}
      learn={learn}
      formula={
        <Formula label="z is h times W transposed plus b">
          {row(i("z"), o("="), i("h"), sup(i("W"), i("⊤")), o("+"), i("b"))}
        </Formula>
      }
    >
      <div class="controls">
        <StepSlider
          name="bias"
          label={fill(s.slider, { word: words[BIASED] ?? "" })}
          value={bias}
          range={[-8, 8, 0.5]}
          onMove={learn.setBias}
        />
        <StepSlider name="batch" label={s.batch} value={batch} range={[1, 8, 1]} onMove={learn.setBatch} />
        <StepSlider
          name="positions"
          label={s.positions}
          value={positions}
          range={[1, 16, 1]}
          onMove={learn.setPositions}
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
          hidden: shape(batch, positions, width),
          weight: shape(width, size),
          logits: shape(batch, positions, size),
        })}
      </p>
    </Step>
  );
}

/** A shape in one line. */
function shape(...sizes: number[]): string {
  return `(${sizes.join(",\u00a0")})`;
}
