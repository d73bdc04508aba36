// Totals of a comparison.

import type { JSX } from "preact";

export interface Total {
  readonly name: string;
  readonly label: string;
  readonly value: number;
  readonly text: string;
}

export function Totals({ totals }: { totals: readonly Total[] }): JSX.Element {
  return (
    <dl class="totals" data-chart="totals">
      {totals.map(({ name, label, value, text }) => (
        <div key={name} data-name={name} data-value={value}>
          <dt>{label}</dt>
          <dd>{text}</dd>
        </div>
      ))}
    </dl>
  );
}
