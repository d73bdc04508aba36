// The loss, its gradient p - y, and gradient descent.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { sum } from "../math/linear";
import { crossEntropyGradient, smoothedTruth, softmax } from "../math/softmax";
import { Bars } from "../ui/bars";
import { Choice } from "../ui/controls";
import { fixed, signed } from "../ui/format";
import { Formula, frac, gap, i, log, o, over, row, sub } from "../ui/formula";
import { Step, StepSlider } from "./learnStep";
import { descend } from "./descent";
import type { Learn } from "./useLearn";

export const MAX_STEPS = 50;

export function Loss({ learn }: { learn: Learn }): JSX.Element {
  const { loss: s, common, words } = useStrings();
  const { target, smoothing, steps } = learn;
  const { logits, losses } = descend(learn);
  const p = softmax(logits);
  const y = smoothedTruth(words.length, target, smoothing);
  const gradient = crossEntropyGradient(logits, target, smoothing);
  const loss = losses.at(-1) ?? NaN;
  return (
    <Step
      id="loss"
      texts={s}
      learn={learn}
      formula={
        <Formula label="loss is minus the sum of y log p; its gradient by the logits is p minus y">
          {row(i("L"), o("="), o("−"), over("∑", i("i")), sub(i("y"), i("i")), log(sub(i("p"), i("i"))), gap())}
          {frac([o("∂"), i("L")], [o("∂"), i("z")])}
          {row(o("="), i("p"), o("−"), i("y"))}
        </Formula>
      }
    >
      <div class="controls">
        <Choice
          name="target"
          label={s.target}
          value={String(target)}
          options={words.map((word, v) => [String(v), word] as const)}
          onChoose={(v) => learn.setTarget(Number(v))}
        />
        <StepSlider
          name="eps"
          label={s.smoothing}
          value={smoothing}
          range={[0, 0.9, 0.05]}
          onMove={learn.setSmoothing}
        />
        <StepSlider name="rate" label={s.rate} value={learn.rate} range={[0.01, 0.5, 0.01]} onMove={learn.setRate} />
      </div>
      <div class="controls buttons">
        <button type="button" data-do="step" disabled={steps >= MAX_STEPS} onClick={() => learn.setSteps(steps + 1)}>
          {s.step}
        </button>
        <button type="button" class="quiet" data-do="undo" disabled={steps === 0} onClick={() => learn.setSteps(0)}>
          {s.undo}
        </button>
        <span class="note">
          {s.steps}
          {common.colon}
          <output data-chart="steps">{steps}</output>
        </span>
      </div>
      <p class="headline" role="status">
        <strong data-chart="loss">{fill(s.price, { loss: fixed(loss, 4) })}</strong>{" "}
        <span class="note">
          {fill(s.perplexity, { p: fixed(p[target] ?? NaN, 4), n: fixed(1 / (p[target] ?? NaN), 2) })}
        </span>
      </p>
      <Bars
        name="gradient"
        caption={s.gradient}
        heads={[common.word, common.probability, s.truth, s.gradient]}
        domain={[-1, 1]}
        rows={gradient.map((value, v) => ({
          head: words[v] ?? "",
          cells: [fixed(p[v] ?? NaN, 3), fixed(y[v] ?? NaN, 3), signed(value, 3)],
          value,
          tone: value < 0 ? "up" : "down",
          note: value < -0.0005 ? `↑ ${s.push}` : value > 0.0005 ? `↓ ${s.pull}` : "",
        }))}
        footHead={common.sum}
        foot={[fixed(sum(p), 3), fixed(sum(y), 3), fixed(sum(gradient), 3)]}
      />
      {steps ? (
        <p class="note" data-chart="history">
          {s.history}
          {common.colon}
          {losses
            .slice(-8)
            .map((value) => fixed(value, 3))
            .join(" → ")}
        </p>
      ) : null}
    </Step>
  );
}
