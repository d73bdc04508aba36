// Temperature and entropy.

import { scaleLinear } from "d3-scale";
import { line } from "d3-shape";
import type { JSX } from "preact";
import { useStrings } from "../i18n/strings";
import { entropy, softmax } from "../math/softmax";
import type { Vector } from "../math/linear";
import { Bars } from "../ui/bars";
import { fixed } from "../ui/format";
import { Formula, frac, i, log, o, over, sub, sup } from "../ui/formula";
import { Step, StepSlider } from "./learnStep";
import type { Learn } from "./useLearn";

export function Temperature({ learn }: { learn: Learn }): JSX.Element {
  const { temperature: s, common, words } = useStrings();
  const t = learn.temperature;
  const p = softmax(learn.logits, t);
  const plain = softmax(learn.logits);
  const nats = entropy(learn.logits.map((z) => z / t));
  return (
    <Step
      id="temperature"
      texts={s}
      learn={learn}
      formula={
        <>
          <Formula label="p of i is e to the z of i over T, normalised">
            {sub(i("p"), i("i"))}
            {o("=")}
            {frac(sup(i("e"), [sub(i("z"), i("i")), o("/"), i("T")]), [
              over("∑", i("j")),
              sup(i("e"), [sub(i("z"), i("j")), o("/"), i("T")]),
            ])}
          </Formula>
          <Formula label="entropy is minus the sum of p log p">
            {i("H")}
            {o("=")}
            {o("−")}
            {over("∑", i("i"))}
            {sub(i("p"), i("i"))}
            {log(sub(i("p"), i("i")))}
          </Formula>
        </>
      }
    >
      <div class="controls">
        <StepSlider name="t" label={s.slider} value={t} range={[0.1, 5, 0.05]} onMove={learn.setTemperature} />
      </div>
      <Bars
        name="warm"
        caption={`softmax(z / ${fixed(t, 2)})   ┃ ${s.atOne}`}
        heads={[common.word, common.probability]}
        domain={[0, 1]}
        rows={p.map((value, v) => ({
          head: words[v] ?? "",
          cells: [fixed(value, 3)],
          value,
          ...(plain[v] === undefined ? {} : { mark: plain[v] }),
        }))}
        footHead={common.entropy}
        foot={[fixed(nats, 3)]}
      />
      <Curve logits={learn.logits} t={t} />
    </Step>
  );
}

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [440, 190, 34, 28, 16];

function Curve({ logits, t }: { logits: Vector; t: number }): JSX.Element {
  const { temperature: s, common } = useStrings();
  const max = Math.log(logits.length);
  const x = scaleLinear([0, 5], [LEFT, WIDTH - 12]);
  const y = scaleLinear([0, max * 1.08], [HEIGHT - BOTTOM, TOP]);
  const at = (warm: number): number => entropy(logits.map((z) => z / warm));
  const samples = Array.from({ length: 99 }, (_, k) => 0.1 + 0.05 * k);
  const path =
    line<number>(
      (warm) => x(warm),
      (warm) => y(at(warm)),
    )(samples) ?? "";
  const listed = [0.1, 0.5, 1, 2, 3, 4, 5];
  return (
    <figure class="curve">
      <figcaption>{s.curve}</figcaption>
      <svg
        viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
        role="img"
        aria-label={`${s.curve}: T = ${fixed(t)}, H = ${fixed(at(t), 3)}`}
      >
        {[0, 0.5, 1, 1.5].map((tick) => (
          <g key={tick} class="tick">
            <line x1={LEFT} x2={WIDTH - 12} y1={y(tick)} y2={y(tick)} />
            <text x={LEFT - 8} y={y(tick) + 4} text-anchor="end">
              {fixed(tick, 1)}
            </text>
          </g>
        ))}
        {[0, 1, 2, 3, 4, 5].map((tick) => (
          <text key={tick} class="label" x={x(tick)} y={HEIGHT - 8} text-anchor="middle">
            {tick}
          </text>
        ))}
        <line class="limit" x1={LEFT} x2={WIDTH - 12} y1={y(max)} y2={y(max)} />
        <text class="label" x={WIDTH - 14} y={y(max) - 5} text-anchor="end">
          {s.most}
        </text>
        <path d={path} class="line" />
        <line class="guide" x1={x(t)} x2={x(t)} y1={y(0)} y2={y(at(t))} />
        <circle class="dot" cx={x(t)} cy={y(at(t))} r={5} />
      </svg>
      <details>
        <summary>{common.numbers}</summary>
        <table class="facts">
          <thead>
            <tr>
              <th scope="col">T</th>
              {listed.map((warm) => (
                <td key={warm}>{fixed(warm, 1)}</td>
              ))}
            </tr>
          </thead>
          <tbody>
            <tr>
              <th scope="row">{common.entropy}</th>
              {listed.map((warm) => (
                <td key={warm}>{fixed(at(warm), 2)}</td>
              ))}
            </tr>
          </tbody>
        </table>
      </details>
    </figure>
  );
}
