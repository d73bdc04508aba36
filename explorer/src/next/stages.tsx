// What each stage of the sampler leaves, first to last.

import type { JSX } from "preact";
import { useStrings } from "../i18n";
import { fixed, whole } from "../ui/format";
import type { Processed, Row } from "./row";

export function Stages({ row, processed }: { row: Row; processed: Processed }): JSX.Element {
  const { next: s } = useStrings();
  const lines = [
    { name: s.given, left: row.ids.length, mass: 1 },
    ...processed.cuts.map((cut) => ({ name: s[cut.name], left: cut.left, mass: cut.mass })),
  ];
  return (
    <table class="facts" data-chart="stages">
      <caption>{s.stages}</caption>
      <thead>
        <tr>
          <th scope="col">{s.stage}</th>
          <th scope="col">{s.left}</th>
          <th scope="col">{s.mass}</th>
        </tr>
      </thead>
      <tbody>
        {lines.map((line, at) => (
          <tr key={at}>
            <th scope="row">{line.name}</th>
            <td>{whole(line.left)}</td>
            <td>{fixed(line.mass, 4)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
