// A token and its four measures in one line.

import type { JSX } from "preact";
import { useStrings } from "../i18n/strings";
import { MEASURES, SCALES } from "./textMeasures";
import type { Scored } from "./score";

export function Figures({ shown, token }: { shown: string; token: Scored }): JSX.Element {
  const { text: s } = useStrings();
  return (
    <dl class="figures">
      <div class="token-shown">
        <dt class="unseen">{s.token}</dt>
        <dd>
          <bdi class="token">{shown}</bdi>
        </dd>
      </div>
      {MEASURES.map((measure) => (
        <div key={measure}>
          <dt>{s.measures[measure]}</dt>
          <dd data-figure={measure} data-value={SCALES[measure].of(token)}>
            {SCALES[measure].show(SCALES[measure].of(token))}
            {measure in s.units ? <span class="unit"> {s.units[measure as keyof typeof s.units]}</span> : null}
          </dd>
        </div>
      ))}
    </dl>
  );
}
