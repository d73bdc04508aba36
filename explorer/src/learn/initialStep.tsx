// How nn.Linear is initialised: weights as torch draws them, and why the scale of logits does not depend on D.

import { scaleLinear } from "d3-scale";
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { fill, useStrings } from "../i18n/strings";
import { Choice, NumberField } from "../ui/controls";
import { fixed, grouped } from "../ui/format";
import { Formula, frac, i, n, o, row, sqrt, sub } from "../ui/formula";
import { Step } from "./learnStep";
import { histogram, initialLayer, ROWS, WIDTHS } from "./initialWeights";
import type { Learn } from "./useLearn";
import { FactRow, Heads } from "../ui/factsTable";

const [WIDTH, HEIGHT, SIDE, BOTTOM, TOP] = [300, 150, 12, 26, 8];

export function Initial({ learn }: { learn: Learn }): JSX.Element {
  const { initial: s } = useStrings();
  const width = Number(learn.width);
  const { initialSeed: seed } = learn;
  const layer = useMemo(() => initialLayer(seed, width), [seed, width]);
  const lines = [
    ["bound", s.bound, layer.bound, layer.bound],
    ["weight", s.weight_deviation, layer.weightDeviation, 1 / Math.sqrt(3 * width)],
    ["logit", s.logit_deviation, layer.logitDeviation, 1 / Math.sqrt(3)],
    ["unscaled", s.unscaled, layer.logitDeviation / layer.bound, Math.sqrt(width / 3)],
  ] as const;
  return (
    <Step
      id="initial"
      texts={s}
      learn={learn}
      formula={
        <>
          <Formula label="weights are uniform between minus and plus one over the root of D">
            {row(sub(i("W"), [i("v"), i("d")]), o("∼"), i("U"))}
            {row(o("("), o("−"), frac(n(1), sqrt(i("D"))), o(","), frac(n(1), sqrt(i("D"))), o(")"))}
          </Formula>
          <Formula label="the variance of z is D times the variance of W, which is one third">
            {row(i("Var"), o("("), sub(i("z"), i("v")), o(")"), o("="), i("D"), o("·"))}
            {frac(n(1), [n(3), i("D")])}
            {o("=")}
            {frac(n(1), n(3))}
          </Formula>
        </>
      }
    >
      <div class="controls">
        <Choice
          name="width"
          label={s.width}
          value={learn.width}
          options={WIDTHS.map((one) => [one, grouped(Number(one))] as const)}
          onChoose={learn.setWidth}
        />
        <NumberField
          name="initseed"
          label={s.seed}
          value={seed}
          low={0}
          high={2 ** 32 - 1}
          onSet={(x) => learn.setInitialSeed(x, true)}
        />
      </div>
      <div class="duo">
        <Histogram
          name="initial-weights"
          caption={fill(s.weights, { n: grouped(layer.weight.length) })}
          values={layer.weight}
          limit={1}
          bins={64}
          bound={layer.bound}
        />
        <Histogram
          name="initial-logits"
          caption={fill(s.logits, { n: grouped(ROWS) })}
          values={layer.logits}
          limit={3}
          bins={24}
        />
      </div>
      <table class="facts" data-chart="initial">
        <Heads of={["", s.drawn, s.formula]} />
        <tbody>
          {lines.map(([key, name, drawn, formula]) => (
            <FactRow
              key={key}
              data-line={key}
              data-value={drawn}
              head={name}
              cells={[fixed(drawn, 4), fixed(formula, 4)]}
            />
          ))}
        </tbody>
      </table>
    </Step>
  );
}

interface HistogramProps {
  readonly name: string;
  readonly caption: string;
  readonly values: ArrayLike<number>;
  /** The axis goes from -limit to limit. */
  readonly limit: number;
  readonly bins: number;
  /** Drawn as two lines. */
  readonly bound?: number;
}

function Histogram({ name, caption, values, limit, bins, bound }: HistogramProps): JSX.Element {
  const counts = histogram(values, limit, bins);
  const x = scaleLinear([-limit, limit], [SIDE, WIDTH - SIDE]);
  const y = scaleLinear([0, Math.max(...counts)], [HEIGHT - BOTTOM, TOP]);
  const wide = (WIDTH - 2 * SIDE) / bins;
  return (
    <figure class="curve" data-chart={name}>
      <figcaption>{caption}</figcaption>
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={caption}>
        {counts.map((count, at) => (
          <rect
            key={at}
            class="bin"
            x={SIDE + at * wide + 0.5}
            y={y(count)}
            width={wide - 1}
            height={HEIGHT - BOTTOM - y(count)}
          />
        ))}
        <line class="axis" x1={SIDE} x2={WIDTH - SIDE} y1={HEIGHT - BOTTOM} y2={HEIGHT - BOTTOM} />
        {bound === undefined
          ? null
          : [-bound, bound].map((end) => (
              <line key={end} class="limit" x1={x(end)} x2={x(end)} y1={TOP} y2={HEIGHT - BOTTOM} />
            ))}
        {[-limit, -limit / 2, 0, limit / 2, limit].map((tick) => (
          <text key={tick} class="label" x={x(tick)} y={HEIGHT - 8} text-anchor="middle">
            {fixed(tick, 1)}
          </text>
        ))}
      </svg>
    </figure>
  );
}
