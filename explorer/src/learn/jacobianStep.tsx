// The Jacobian of softmax, checked against a small change of one logit.

import type { JSX } from "preact";
import { useStrings } from "../i18n/strings";
import { softmax } from "../math/softmax";
import { Bars } from "../ui/bars";
import { Choice } from "../ui/controls";
import { fixed, signed } from "../ui/format";
import { Formula, frac, i, o, row, sub } from "../ui/formula";
import { Step } from "./learnStep";
import { jacobian } from "./learnPython";
import type { Learn } from "./useLearn";

const SMALL = 1e-6;

export function Jacobian({ learn }: { learn: Learn }): JSX.Element {
  const { jacobian: s, common, words } = useStrings();
  const { logits, changed } = learn;
  const p = softmax(logits);
  const column = jacobian(p).map((entries) => entries[changed] ?? NaN);
  const after = softmax(logits.map((z, v) => (v === changed ? z + SMALL : z)));
  const measured = after.map((x, v) => (x - (p[v] ?? NaN)) / SMALL);
  const wrong = p.map((a) => a * (1 - (p[changed] ?? NaN)) * (p[changed] ?? NaN));
  return (
    <Step
      id="jacobian"
      texts={s}
      learn={learn}
      formula={
        <Formula label="the derivative of p of i by z of j is p of i times delta minus p of j">
          {frac([o("∂"), sub(i("p"), i("i"))], [o("∂"), sub(i("z"), i("j"))])}
          {row(o("="), sub(i("p"), i("i")), o("("), sub(i("δ"), [i("i"), i("j")]), o("−"), sub(i("p"), i("j")), o(")"))}
        </Formula>
      }
    >
      <div class="controls">
        <Choice
          name="changed"
          label={s.word}
          value={String(changed)}
          options={words.map((word, v) => [String(v), word] as const)}
          onChoose={(v) => learn.setChanged(Number(v))}
        />
      </div>
      <Bars
        name="jacobian"
        caption="∂p / ∂z"
        heads={[common.word, s.formula, s.measured, s.wrong]}
        domain={[-0.25, 0.25]}
        rows={column.map((value, v) => ({
          head: words[v] ?? "",
          cells: [signed(value, 4), signed(measured[v] ?? NaN, 4), signed(wrong[v] ?? NaN, 4)],
          value,
          tone: value < 0 ? "down" : "up",
        }))}
        footHead={common.sum}
        foot={[
          fixed(0, 4),
          "",
          signed(
            wrong.reduce((sum, x) => sum + x, 0),
            4,
          ),
        ]}
      />
    </Step>
  );
}
