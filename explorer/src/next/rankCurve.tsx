// Probability by rank on log scales, before and after the sampler, with the cut and the value under the pointer.

import { scaleLog } from "d3-scale";
import { line } from "d3-shape";
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { fill, useStrings } from "../i18n/strings";
import type { Processed } from "../sampler/process";
import type { Row } from "../sampler/row";
import { grouped } from "../ui/format";
import { chance } from "./rankedTokens";
import { visible } from "../ui/tokenText";
import { FactRow, Heads } from "../ui/factsTable";

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT] = [440, 200, 48, 28, 10, 14];
const MIN_P = 1e-9;
const POINTS = 120;

interface CurveProps {
  readonly row: Row;
  readonly processed: Processed;
  tokenText(id: number): string;
}

export function RankCurve({ row, processed, tokenText }: CurveProps): JSX.Element {
  const { next: s, common } = useStrings();
  const [pointed, setPointed] = useState<number>();
  const last = row.ids.length;
  const x = scaleLog([1, Math.max(last, 2)], [LEFT, WIDTH - RIGHT]).clamp(true);
  const y = scaleLog([MIN_P, 1], [HEIGHT - BOTTOM, TOP]).clamp(true);
  const ranks = [...new Set(Array.from({ length: POINTS }, (_, k) => Math.round(last ** (k / (POINTS - 1)))))];
  const path = (p: (rank: number) => number): string =>
    line<number>(
      (rank) => x(rank),
      (rank) => y(p(rank - 1)),
    )(ranks.filter((rank) => p(rank - 1) >= MIN_P)) ?? "";
  const tens = [1, 10, 100, 1000, 10_000, 100_000].filter((rank) => rank <= last);
  const removed = processed.kept < row.candidates.size;
  // The lowest rank of the model that is left; with XTC or typical-p, higher ranks may be gone too.
  const cut = removed ? processed.lastRank + 1 : undefined;
  const point = (event: PointerEvent & { currentTarget: SVGSVGElement }): void => {
    const box = event.currentTarget.getBoundingClientRect();
    const rank = Math.round(x.invert(((event.clientX - box.left) / box.width) * WIDTH));
    setPointed(Math.max(1, Math.min(last, rank)));
  };
  const id = pointed === undefined ? 0 : (row.ids[pointed - 1] ?? 0);
  return (
    <figure class="curve" data-chart="curve">
      <figcaption class="with-key">
        {s.curve}
        {processed.steps.length ? (
          <span class="curve-key">
            <i class="after" aria-hidden="true" /> {s.processed}
            <i class="before" aria-hidden="true" /> {s.raw}
          </span>
        ) : null}
      </figcaption>
      <svg
        viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
        role="img"
        aria-label={s.curve}
        onPointerMove={point}
        onPointerLeave={() => setPointed(undefined)}
      >
        {[1, 1e-3, 1e-6, 1e-9].map((p) => (
          <g key={p} class="tick">
            <line x1={LEFT} x2={WIDTH - RIGHT} y1={y(p)} y2={y(p)} />
            <text x={LEFT - 8} y={y(p) + 4} text-anchor="end">
              {p === 1 ? "1" : p.toExponential(0).replace("-", "−")}
            </text>
          </g>
        ))}
        {tens.map((rank) => (
          <text key={rank} class="label" x={x(rank)} y={HEIGHT - 8} text-anchor="middle">
            {grouped(rank)}
          </text>
        ))}
        <path d={path((rank) => row.p(rank))} class={processed.steps.length ? "line before" : "line"} />
        {processed.steps.length ? <path d={path((rank) => processed.p(rank))} class="line" /> : null}
        {cut === undefined ? null : (
          <g class="cut" data-cut={cut}>
            <line x1={x(cut)} x2={x(cut)} y1={TOP} y2={HEIGHT - BOTTOM} />
            <text
              x={x(cut) + (x(cut) > WIDTH / 2 ? -6 : 6)}
              y={x(cut) > WIDTH / 2 ? TOP + 10 : HEIGHT - BOTTOM - 8}
              text-anchor={x(cut) > WIDTH / 2 ? "end" : "start"}
            >
              {fill(s.cut, { n: grouped(processed.kept) })}
            </text>
          </g>
        )}
        {pointed === undefined ? null : (
          <circle class="dot" cx={x(pointed)} cy={y(Math.max(MIN_P, row.p(pointed - 1)))} r={4} />
        )}
      </svg>
      <p class="note pointed" data-picture="none">
        {pointed === undefined
          ? "\u00a0"
          : fill(s.at, { rank: grouped(pointed), token: visible(tokenText(id)), p: chance(row.p(pointed - 1)) })}
      </p>
      <details>
        <summary>{common.numbers}</summary>
        <table class="facts">
          <Heads of={[s.rank, s.raw, s.processed]} />
          <tbody>
            {tens.map((rank) => (
              <FactRow
                key={rank}
                head={grouped(rank)}
                cells={[chance(row.p(rank - 1)), chance(processed.p(rank - 1))]}
              />
            ))}
          </tbody>
        </table>
      </details>
    </figure>
  );
}
