// Where the head sits in an encoder–decoder.

import type { JSX } from "preact";
import { useStrings } from "../i18n/strings";
import { linear } from "../math/linear";
import { fixed, pyList } from "../ui/format";
import { Formula, i, o, row, sup } from "../ui/formula";
import { Step } from "../ui/learnStep";
import { Python } from "../ui/prose";
import { WEIGHT } from "./toyModel";
import type { Learn } from "./useLearn";

export function Translation({ learn }: { learn: Learn }): JSX.Element {
  const { translation: s, common } = useStrings();
  // Two positions of a decoder: the head gives one row of logits for each.
  const states = [learn.hidden, learn.hidden.map((x) => -x)];
  const rows = states.map((state) => linear(state, WEIGHT));
  const box = (x: number, y: number, text: string, marked = false): JSX.Element => (
    <g class={marked ? "leaf lit" : "leaf"}>
      <rect x={x} y={y} width={120} height={40} rx={6} fill="none" stroke="currentColor" />
      <text x={x + 60} y={y + 25} text-anchor="middle">
        {text}
      </text>
    </g>
  );
  return (
    <Step
      id="translation"
      title={s.title}
      text={s.text}
      tryThis={s.try}
      formula={
        <Formula label="the logits of every position of the decoder are H times W transposed">
          {row(i("Z"), o("="), i("H"), sup(i("W"), i("⊤")))}
        </Formula>
      }
      python={
        <Python
          code={`H = np.array([${states.map((state) => pyList(state)).join(", ")}])  # two positions of the decoder\nref.linear(H, W)`}
          values={[rows]}
        />
      }
    >
      <svg class="tree" viewBox="0 0 420 200" role="img" aria-label={s.title}>
        {box(20, 130, s.source)}
        {box(20, 70, s.encoder)}
        {box(270, 130, s.sofar)}
        {box(270, 70, s.decoder)}
        {box(270, 10, `${s.head} W`, true)}
        <line x1={80} y1={130} x2={80} y2={110} stroke="currentColor" />
        <line x1={330} y1={130} x2={330} y2={110} stroke="currentColor" />
        <line x1={140} y1={90} x2={270} y2={90} stroke="currentColor" />
        <line x1={330} y1={70} x2={330} y2={50} stroke="currentColor" />
        <text x={205} y={82} text-anchor="middle">
          softmax(q Kᵀ / √d)
        </text>
      </svg>
      <p class="note">
        {common.logit}: {rows[0]?.map((z) => fixed(z)).join(", ")}
      </p>
    </Step>
  );
}
