// Probability by rank, both on scales of powers of ten.

import { scaleLog } from "d3-scale";
import { line } from "d3-shape";
import type { JSX } from "preact";
import { useStrings } from "../i18n";
import { whole } from "../ui/format";
import { chance } from "./ranked";
import type { Row } from "./row";

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT] = [440, 200, 48, 28, 10, 14];
const LEAST = 1e-9;
const POINTS = 120;

export function RankCurve({ row }: { row: Row }): JSX.Element {
  const { next: s, common } = useStrings();
  const last = row.ids.length;
  const x = scaleLog([1, Math.max(last, 2)], [LEFT, WIDTH - RIGHT]);
  const y = scaleLog([LEAST, 1], [HEIGHT - BOTTOM, TOP]);
  const ranks = [...new Set(Array.from({ length: POINTS }, (_, k) => Math.round(last ** (k / (POINTS - 1)))))];
  const drawn = ranks.filter((rank) => row.p(rank - 1) >= LEAST);
  const path = line<number>((rank) => x(rank), (rank) => y(row.p(rank - 1)))(drawn) ?? "";
  const tens = [1, 10, 100, 1000, 10_000, 100_000].filter((rank) => rank <= last);
  return (
    <figure class="curve">
      <figcaption>{s.curve}</figcaption>
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={s.curve}>
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
            {whole(rank)}
          </text>
        ))}
        <path d={path} class="line" />
      </svg>
      <details>
        <summary>{common.numbers}</summary>
        <table class="facts">
          <thead>
            <tr>
              <th scope="col">{s.rank}</th>
              <th scope="col">{s.raw}</th>
            </tr>
          </thead>
          <tbody>
            {tens.map((rank) => (
              <tr key={rank}>
                <th scope="row">{whole(rank)}</th>
                <td>{chance(row.p(rank - 1))}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </details>
    </figure>
  );
}
