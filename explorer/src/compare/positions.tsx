// Positions of a text: the selected one, the largest differences, and all as a table.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { fill, useStrings } from "../i18n/strings";
import { chance } from "../next/rankedTokens";
import { TokenText } from "../ui/tokenText";
import { shown, valueOf } from "./compareMeasures";
import type { Place } from "./useCompare";
import { FactRow, Heads } from "../ui/factsTable";

const WORST = 8;

interface PanelProps {
  readonly place: Place;
  readonly samplers: boolean;
  /** Open this position as a prompt; undefined if the tokens before it are not valid text. */
  readonly onOpen: (() => void) | undefined;
}

export function PlacePanel({ place, samplers, onOpen }: PanelProps): JSX.Element {
  const { comparing: s } = useStrings();
  return (
    <aside class="panel cell" data-chart="place" data-at={place.position} aria-label={s.chosen} aria-live="polite">
      <h2>
        <TokenText text={place.token.text} />
      </h2>
      <p class="note">{fill(s.place, { n: place.position + 1 })}</p>
      <table class="facts">
        <tbody>
          <FactRow head={s.klNats} cells={[shown(valueOf(place, "kl"), "kl")]} />
          {samplers ? <FactRow head={s.variation} cells={[shown(valueOf(place, "variation"), "variation")]} /> : null}
          {(["a", "b"] as const).map((side) => (
            <FactRow
              key={side}
              head={fill(s.gives, { side: s[side] })}
              cells={[given(place[`log_prob_${side}`], s.ruledOut)]}
            />
          ))}
          {(["a", "b"] as const).map((side) => (
            <tr key={side}>
              <th scope="row">{fill(s.expects, { side: s[side] })}</th>
              <td>
                <TokenText text={place[`best_${side}`].text} /> {chance(place[`best_${side}`].p)}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      {onOpen ? (
        <button type="button" data-do="open" onClick={onOpen}>
          {s.open}
        </button>
      ) : null}
    </aside>
  );
}

export function Worst({
  places,
  onChoose,
}: {
  places: readonly Place[];
  onChoose(position: number): void;
}): JSX.Element {
  const { comparing: s } = useStrings();
  return (
    <table class="facts worst" data-chart="worst">
      <caption>{s.worst}</caption>
      <Heads of={[s.token, s.klNats, fill(s.expects, { side: s.a }), fill(s.expects, { side: s.b })]} />
      <tbody>
        {places.slice(0, WORST).map((place) => (
          <tr key={place.position}>
            <th scope="row">
              <button type="button" class="token-button" onClick={() => onChoose(place.position)}>
                <TokenText text={place.token.text} />
              </button>
            </th>
            <td>{shown(valueOf(place, "kl"), "kl")}</td>
            <td>
              <TokenText text={place.best_a.text} />
            </td>
            <td>
              <TokenText text={place.best_b.text} />
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

/** All positions, built when opened. */
export function PlaceTable({ places, samplers }: { places: readonly Place[]; samplers: boolean }): JSX.Element {
  const { comparing: s, common } = useStrings();
  const [open, setOpen] = useState(false);
  return (
    <details data-chart="numbers" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>{common.numbers}</summary>
      {open ? (
        <div class="gridbox" tabIndex={0} role="region" aria-label={s.map}>
          <table class="facts">
            <thead>
              <tr>
                <th scope="col">{s.token}</th>
                <th scope="col">{s.position}</th>
                <th scope="col">{s.measures.kl}</th>
                {samplers ? <th scope="col">{s.measures.variation}</th> : null}
                <th scope="col">{fill(s.gives, { side: s.a })}</th>
                <th scope="col">{fill(s.gives, { side: s.b })}</th>
                <th scope="col">{fill(s.expects, { side: s.a })}</th>
                <th scope="col">{fill(s.expects, { side: s.b })}</th>
              </tr>
            </thead>
            <tbody>
              {places.map((place) => (
                <tr key={place.position}>
                  <th scope="row">
                    <TokenText text={place.token.text} />
                  </th>
                  <td>{place.position + 1}</td>
                  <td>{shown(valueOf(place, "kl"), "kl")}</td>
                  {samplers ? <td>{shown(valueOf(place, "variation"), "variation")}</td> : null}
                  {[place.log_prob_a, place.log_prob_b].map((log, i) => (
                    <td key={i}>{given(log, s.ruledOut)}</td>
                  ))}
                  {[place.best_a, place.best_b].map((best, i) => (
                    <td key={i}>
                      <TokenText text={best.text} />
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      ) : null}
    </details>
  );
}

/** The probability of a log-probability; null is a token that a sampler removes. */
function given(log: number | null, removed: string): string {
  return log === null ? removed : chance(Math.exp(log));
}
