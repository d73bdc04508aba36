// A bar chart as a table: a label, numbers and a bar in each row.

import { scaleLinear } from "d3-scale";
import { Fragment, type ComponentChildren, type JSX } from "preact";

export interface Row {
  readonly head: string;
  readonly cells: readonly ComponentChildren[];
  readonly value: number;
  /** A second value, drawn as a mark. */
  readonly mark?: number;
  /** An interval, drawn as a bracket. */
  readonly band?: readonly [number, number];
  readonly dead?: boolean;
  readonly tone?: "plain" | "up" | "down" | "bad";
  readonly note?: string;
}

interface BarsProps {
  readonly caption: string;
  readonly heads: readonly string[];
  readonly rows: readonly Row[];
  readonly domain: readonly [number, number];
  readonly foot?: readonly ComponentChildren[];
  readonly footHead?: string;
  readonly name: string;
}

export function Bars({ caption, heads, rows, domain, foot, footHead, name }: BarsProps): JSX.Element {
  const scale = scaleLinear([...domain], [0, 100]).clamp(true);
  return (
    <table class="bars" data-chart={name}>
      <caption>
        {caption.split("┃").map((text, i) => (
          <Fragment key={i}>
            {i ? <i class="of-mark">┃</i> : null}
            {text}
          </Fragment>
        ))}
      </caption>
      <thead>
        <tr>
          {heads.map((head, i) => (
            <th key={i} scope="col" class={i ? "figure" : undefined}>
              {head}
            </th>
          ))}
          <td class="bar" />
        </tr>
      </thead>
      <tbody>
        {rows.map((row) => (
          <tr key={row.head} class={row.dead ? "dead" : undefined}>
            <th scope="row">{row.head}</th>
            {row.cells.map((cell, i) => (
              <td key={i} class="figure">
                {cell}
              </td>
            ))}
            <td class="bar">
              <Bar row={row} scale={scale} />
              {row.note ? <span class="note">{row.note}</span> : null}
            </td>
          </tr>
        ))}
      </tbody>
      {foot ? (
        <tfoot>
          <tr>
            <th scope="row">{footHead}</th>
            {foot.map((cell, i) => (
              <td key={i} class="figure">
                {cell}
              </td>
            ))}
            <td class="bar" />
          </tr>
        </tfoot>
      ) : null}
    </table>
  );
}

function Bar({ row, scale }: { row: Row; scale: (x: number) => number }): JSX.Element {
  const zero = scale(0);
  const end = Number.isFinite(row.value) ? scale(row.value) : zero;
  const [left, width] = [Math.min(zero, end), Math.abs(end - zero)];
  return (
    <div class="track" aria-hidden="true">
      <div class={`fill ${row.tone ?? "plain"}`} style={{ left: `${left}%`, width: `${width}%` }} />
      {zero > 0 && zero < 100 ? <div class="zero" style={{ left: `${zero}%` }} /> : null}
      {row.band ? (
        <div
          class="band"
          style={{
            left: `${scale(row.band[0])}%`,
            width: `${scale(row.band[1]) - scale(row.band[0])}%`,
          }}
        />
      ) : null}
      {row.mark === undefined ? null : <div class="mark" style={{ left: `${scale(row.mark)}%` }} />}
    </div>
  );
}

interface TrackProps {
  /** The length of the bar, from 0 to 1. */
  readonly share: number;
  readonly mark?: number;
  readonly tone?: string;
}

/** A bar from the left end, and a mark. */
export function Track({ share, mark, tone = "plain" }: TrackProps): JSX.Element {
  return (
    <div class="track" aria-hidden="true">
      <div class={`fill ${tone}`} style={{ left: "0", width: `${100 * share}%` }} />
      {mark === undefined ? null : <div class="mark" style={{ left: `${100 * mark}%` }} />}
    </div>
  );
}

/** A number; an invalid one is red, bold and has a warning sign. */
export function Figure({ text, bad }: { text: string; bad: boolean }): JSX.Element {
  return bad ? (
    <strong class="bad">
      <span aria-hidden="true">⚠ </span>
      {text}
    </strong>
  ) : (
    <span>{text}</span>
  );
}
