// One measure by layer, at one position.

import { scaleLinear } from "d3-scale";
import { line } from "d3-shape";
import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { layerName, type At } from "./grid";
import { brief, legendOf, shareOf, valueOf, type Lens, type Measure, type Scale } from "./lensMeasures";

const MIN_DISTANCE = 0.12; // least distance between two labels
const [WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM] = [300, 150, 52, 12, 10, 24];

interface ClimbProps {
  readonly lens: Lens;
  readonly scale: Scale;
  readonly measure: Measure;
  readonly at: At;
}

export function LayerCurve({ lens, scale, measure, at: [row, column] }: ClimbProps): JSX.Element {
  const { lens: s } = useStrings();
  const last = lens.rows - 1;
  const x = scaleLinear([0, Math.max(last, 1)], [LEFT, WIDTH - RIGHT]);
  // The color's share grows towards the final prediction; an axis grows upwards with its value.
  const y = measure === "p" ? scaleLinear([0, 1], [HEIGHT - BOTTOM, TOP]) : scaleLinear([1, 0], [HEIGHT - BOTTOM, TOP]);
  const shares = lens.layers.map(({ cells }) => {
    const cell = cells[column];
    return cell ? shareOf(valueOf(cell, measure), measure, scale) : 0;
  });
  const path =
    line<number>(
      (_, layer) => x(layer),
      (share) => y(share),
    )(shares) ?? "";
  const steps = legendOf(measure, scale);
  const ticks = steps.filter(({ share }, i) => i === 0 || share - (steps[i - 1]?.share ?? 0) > MIN_DISTANCE);
  const title = fill(s.climb, { measure: s.measures[measure], scale: s.scales[measure] });
  return (
    <figure class="curve climb" data-chart="climb">
      <figcaption>{title}</figcaption>
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={title}>
        {ticks.map(({ text, share }) => (
          <g key={text} class="tick">
            <line x1={LEFT} x2={WIDTH - RIGHT} y1={y(share)} y2={y(share)} />
            <text x={LEFT - 8} y={y(share) + 4} text-anchor="end">
              {text}
            </text>
          </g>
        ))}
        <text class="label" x={LEFT} y={HEIGHT - 6}>
          {layerName(0, last, s)}
        </text>
        <text class="label" x={WIDTH - RIGHT} y={HEIGHT - 6} text-anchor="end">
          {layerName(last, last, s)}
        </text>
        <path d={path} class="line" />
        <circle class="dot" cx={x(row)} cy={y(shares[row] ?? 0)} r={5}>
          <title>{brief(valueOf(lens.layers[row]?.cells[column] ?? NONE, measure), measure)}</title>
        </circle>
      </svg>
    </figure>
  );
}

const NONE = { best: [], entropy: 0, target_p: 0, target_rank: 0, kl: 0 };
