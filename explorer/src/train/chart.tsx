// A line chart at the available width, with a table of its numbers.

import { scaleLinear, scaleLog } from "d3-scale";
import { line } from "d3-shape";
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { useStrings } from "../i18n/strings";

export interface Series {
  readonly label: string;
  readonly points: readonly (readonly [number, number])[];
  /** Not by color alone: a plain line, a dashed one, or dots on a line. */
  readonly look: "plain" | "dashed" | "dots";
}

export interface Axis {
  readonly label: string;
  readonly domain: readonly [number, number];
  readonly log?: boolean;
  readonly ticks?: readonly number[];
  show(value: number): string;
}

interface ChartProps {
  readonly name: string;
  readonly caption: string;
  /** A sentence for screen readers. */
  readonly summary: string;
  readonly x: Axis;
  readonly y: Axis;
  readonly series: readonly Series[];
  /** A marked value on the horizontal axis. */
  readonly guide?: number;
  readonly height?: number;
  /** The table of its numbers. */
  readonly children?: ComponentChildren;
}

const [LEFT, RIGHT, TOP, BOTTOM] = [58, 16, 12, 44];

export function Chart({
  name,
  caption,
  summary,
  x,
  y,
  series,
  guide,
  height = 280,
  children,
}: ChartProps): JSX.Element {
  const { common } = useStrings();
  const [holder, width] = useWidth(620);
  const across = scaleOf(x, [LEFT, width - RIGHT]);
  const up = scaleOf(y, [height - BOTTOM, TOP]);
  const ticks = { x: ticksOf(x, across, Math.max(2, width / 110)), y: ticksOf(y, up, height / 50) };
  const shown = series.filter(({ points }) => points.length);
  return (
    <figure class="curve chart" data-chart={name} ref={holder}>
      <figcaption>
        {caption}
        <span class="series-key">
          {shown.map(({ label, look }) => (
            <span key={label}>
              <svg class={look} width="28" height="10" viewBox="0 0 28 10" aria-hidden="true">
                <line class="line" x1="0" x2="28" y1="5" y2="5" />
                {look === "dots" ? <circle class="dot" cx="14" cy="5" r="4" /> : null}
              </svg>
              {label}
            </span>
          ))}
        </span>
      </figcaption>
      <svg width={width} height={height} viewBox={`0 0 ${width} ${height}`} role="img" aria-label={summary}>
        {ticks.y.map((tick) => (
          <g key={tick} class="tick">
            <line x1={LEFT} x2={width - RIGHT} y1={up(tick)} y2={up(tick)} />
            <text x={LEFT - 8} y={up(tick) + 4} text-anchor="end">
              {y.show(tick)}
            </text>
          </g>
        ))}
        {ticks.x.map((tick) => (
          <g key={tick} class="tick">
            <line x1={across(tick)} x2={across(tick)} y1={height - BOTTOM} y2={height - BOTTOM + 5} />
            <text x={across(tick)} y={height - BOTTOM + 19} text-anchor="middle">
              {x.show(tick)}
            </text>
          </g>
        ))}
        <line class="axis" x1={LEFT} x2={width - RIGHT} y1={height - BOTTOM} y2={height - BOTTOM} />
        <text class="label" x={width - RIGHT} y={height - 6} text-anchor="end">
          {x.label}
        </text>
        {guide === undefined ? null : (
          <line class="guide" x1={across(guide)} x2={across(guide)} y1={TOP} y2={height - BOTTOM} />
        )}
        {shown.map(({ label, points, look }) => (
          <g key={label} class={`series ${look}`}>
            <path
              class="line"
              d={
                line<readonly [number, number]>(
                  ([a]) => across(a),
                  ([, b]) => up(b),
                )(points) ?? ""
              }
            />
            {look === "dots" || points.length === 1
              ? points.map(([a, b]) => <circle key={a} class="dot" cx={across(a)} cy={up(b)} r={4} />)
              : null}
          </g>
        ))}
      </svg>
      {children ? (
        <details>
          <summary>{common.numbers}</summary>
          <div class="scroll" tabIndex={0}>
            {children}
          </div>
        </details>
      ) : null}
    </figure>
  );
}

type Scale = ((value: number) => number) & { ticks(count: number): number[] };

function scaleOf({ domain, log }: Axis, range: [number, number]): Scale {
  const scale = log ? scaleLog([...domain], range) : scaleLinear([...domain], range);
  return scale.clamp(true);
}

/** Round numbers, no more than fit. */
function ticksOf({ ticks, domain, log }: Axis, scale: Scale, max: number): readonly number[] {
  const [low, high] = domain;
  const all = ticks?.filter((tick) => tick >= low && tick <= high) ?? scale.ticks(max);
  const fitting = !ticks && log ? all.filter((tick) => tick >= low && tick <= high) : all;
  const every = Math.ceil(fitting.length / Math.max(2, max));
  return fitting.filter((_, i) => i % every === 0);
}

/** The width of an element in pixels, kept up to date. */
function useWidth(initial: number): [{ current: HTMLElement | null }, number] {
  const holder = useRef<HTMLElement | null>(null);
  const [width, setWidth] = useState(initial);
  useEffect(() => {
    const element = holder.current;
    if (!element) return;
    const watch = new ResizeObserver(() => setWidth(Math.max(240, Math.floor(element.clientWidth))));
    watch.observe(element);
    return () => watch.disconnect();
  }, []);
  return [holder, width];
}
