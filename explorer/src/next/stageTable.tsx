// What each stage of the sampler leaves, in order, as in `Sampler.explain`.

import type { JSX } from "preact";
import { useStrings } from "../i18n/strings";
import { fixed, grouped } from "../ui/format";
import { chance } from "./rankedTokens";
import type { Processed } from "../sampler/process";
import type { Row } from "../sampler/row";
import { TokenText } from "../ui/tokenText";
import { Heads } from "../ui/factsTable";

interface StagesProps {
  readonly row: Row;
  readonly processed: Processed;
  tokenText(id: number): string;
}

export function Stages({ row, processed, tokenText }: StagesProps): JSX.Element {
  const { next: s, sampler: t } = useStrings();
  const given = { left: row.candidates.size, mass: 1, entropy: row.entropy, best: row.ids[0] ?? 0, bestP: row.p(0) };
  const lines = [
    { name: s.given, ...given },
    ...processed.steps.map(({ name, ...rest }) => ({ ...rest, name: t.stages[name] })),
  ];
  return (
    <table class="facts stages" data-chart="stages">
      <caption>{s.stages}</caption>
      <Heads of={[s.stage, s.left, s.mass, s.entropy_head, s.best]} />
      <tbody>
        {lines.map(({ name, left, mass, entropy, best, bestP }, at) => (
          <tr key={at} data-kept={left} data-mass={mass} data-entropy={entropy} data-best={best} data-p={bestP}>
            <th scope="row">{name}</th>
            <td>{grouped(left)}</td>
            <td>{fixed(mass, 4)}</td>
            <td>{fixed(entropy, 3)}</td>
            <td>
              <TokenText text={tokenText(best)} /> <small>{chance(bestP)}</small>
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
