// The legend: a row of patches with their values.

import type { JSX } from "preact";
import { shade, type Tone } from "./color";

export interface Step {
  readonly text: string;
  readonly share: number;
  readonly tone?: Tone;
}

interface LegendProps {
  readonly title: string;
  readonly steps: readonly Step[];
  readonly notes: readonly string[];
}

export function Legend({ title, steps, notes }: LegendProps): JSX.Element {
  return (
    <div class="legend" data-chart="legend">
      <p class="note">{title}</p>
      <ol>
        {steps.map(({ text, share, tone }) => {
          const look = shade(share, tone);
          return (
            <li key={text} class={look.class} style={look.style}>
              {text}
            </li>
          );
        })}
      </ol>
      {notes.map((note) => (
        <p key={note} class="note">
          {note}
        </p>
      ))}
    </div>
  );
}
