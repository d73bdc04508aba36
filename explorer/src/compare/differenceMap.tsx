// The text, each token colored by the difference of the two predictions.
//
// One token is in the tab order; arrow keys, Home and End move, Enter or a click selects.

import type { JSX } from "preact";
import { useRef } from "preact/hooks";
import { shade } from "../heat/color";
import { Tooltip } from "../heat/tooltip";
import { useStrings } from "../i18n/strings";
import { TokenText, visible } from "../ui/tokenText";
import { parted, shareOf, shown, valueOf, type Measure } from "./compareMeasures";
import type { TextComparison } from "./useCompare";

const ROW = 10; // tokens that up and down move over

interface MapProps {
  readonly found: TextComparison;
  readonly measure: Measure;
  readonly max: number;
  readonly chosen: number;
  onChoose(position: number): void;
}

export function DifferenceMap({ found, measure, max, chosen, onChoose }: MapProps): JSX.Element {
  const { comparing: s } = useStrings();
  const box = useRef<HTMLDivElement>(null);
  const choose = (event: Event): void => {
    const position = positionOf(event.target);
    if (position) onChoose(position);
  };
  const move = (event: KeyboardEvent): void => {
    const position = positionOf(event.target);
    if (!position) return;
    const last = found.places.length;
    const keys: Record<string, number> = {
      ArrowLeft: position - 1,
      ArrowRight: position + 1,
      ArrowUp: position - ROW,
      ArrowDown: position + ROW,
      Home: 1,
      End: last,
    };
    const to = keys[event.key];
    if (to !== undefined)
      box.current?.querySelector<HTMLElement>(`[data-at="${Math.min(Math.max(to, 1), last)}"]`)?.focus();
    else if (event.key === "Enter" || event.key === " ") onChoose(position);
    else return;
    event.preventDefault();
  };
  return (
    <figure class="map" data-chart="map">
      <figcaption class="note">{s.map}</figcaption>
      <div
        class="panel"
        ref={box}
        role="listbox"
        aria-label={s.mapLabel}
        aria-orientation="horizontal"
        onClick={choose}
        onKeyDown={move}
      >
        <span class="place first" title={s.first}>
          <Place text={found.first.text} />
        </span>
        {found.places.map((place) => {
          const value = valueOf(place, measure);
          const { share, tone } = shareOf(value, max);
          const look = shade(share, tone);
          const here = place.position === chosen;
          return (
            <span
              key={place.position}
              role="option"
              class={`place ${look.class}${parted(place) ? " parted" : ""}`}
              style={look.style}
              tabIndex={here ? 0 : -1}
              aria-selected={here}
              aria-describedby="map-tip"
              data-at={place.position}
              data-value={value}
            >
              <Place text={place.token.text} />
            </span>
          );
        })}
        <Tooltip
          within={box}
          id="map-tip"
          content={(at) => {
            const place = found.places[Number(at) - 1];
            return place ? (
              <>
                <p>
                  <TokenText text={place.token.text} />
                </p>
                <dl>
                  <div>
                    <dt>{s.measures[measure]}</dt>
                    <dd>{shown(valueOf(place, measure), measure)}</dd>
                  </div>
                  {(["a", "b"] as const).map((side) => (
                    <div key={side}>
                      <dt>{s.expects.replace("{side}", s[side])}</dt>
                      <dd>
                        <TokenText text={place[`best_${side}`].text} />
                      </dd>
                    </div>
                  ))}
                </dl>
              </>
            ) : null;
          }}
        />
      </div>
    </figure>
  );
}

/** A token within a text: spaces stay, invisible characters are shown by code point. */
function Place({ text }: { text: string }): JSX.Element {
  return (
    <>
      <bdi>{visible(text).replaceAll("␣", " ")}</bdi>
      {text.includes("\n") ? <br /> : null}
    </>
  );
}

function positionOf(target: EventTarget | null): number {
  return Number((target as Element | null)?.closest<HTMLElement>("[data-at]")?.dataset["at"] ?? 0);
}
